"""The global random number generators of a process, which apps draw from: those of Python, NumPy and PyTorch."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Generator
from typing import Any, TypeAlias

import numpy as np

States: TypeAlias = tuple[Any, Any, Any]
"""The states of the generators of Python, NumPy and PyTorch; None for PyTorch while it is not imported."""


def seed(number: int) -> None:
    """Seed the generators. `number` is from 0 to 2**64 - 1."""
    random.seed(number)
    np.random.seed(np.random.SeedSequence(number).generate_state(4))
    if torch := sys.modules.get("torch"):
        torch.manual_seed(number)


def get_states() -> States:
    """Return the states of the generators."""
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), torch.get_rng_state().numpy() if torch else None


def set_states(states: States) -> None:
    """Restore the states of the generators."""
    python, numpy, torch_state = states
    random.setstate(python)
    np.random.set_state(numpy)
    if torch_state is not None and (torch := sys.modules.get("torch")):
        torch.set_rng_state(torch.from_numpy(torch_state))


@contextlib.contextmanager
def seed_within(number: int) -> Generator[None]:
    """Seed the generators within the block, and restore them afterwards."""
    states = get_states()
    seed(number)
    try:
        yield
    finally:
        set_states(states)
