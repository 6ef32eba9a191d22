"""The generators of a process, those of Python's `random`, NumPy and PyTorch: seeded for a block, saved and restored.

The code of a model's author may draw from them (mixup, augmentation, noise in a loss), without a generator of its own.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

_numpy: Any = np.random  # its stubs lack the functions below
_free: list[np.random.MT19937] = []
"""Bit generators for the next blocks: a new one takes longer than its seeding."""
_blocks: list[_States] = []
"""What the open blocks restore, in the order in which they began. Blocks of several threads need not end in reverse."""
_lock = threading.Lock()


@dataclass(slots=True, eq=False)
class _States:
    """The generators as they were before a block."""

    numpy: np.random.MT19937
    python: tuple[Any, ...]
    torch: Any

    def restore(self) -> None:
        _numpy.set_bit_generator(self.numpy)
        random.setstate(self.python)
        if self.torch is not None:
            sys.modules["torch"].default_generator.set_state(self.torch)


@contextmanager
def use_seeds(seed: int) -> Generator[int]:
    """Seed the generators of the process within the block; restore their states at the end. Yields the number used.

    PyTorch's is that of the CPU, if the process has imported PyTorch. Threads share the generators: of blocks that
    overlap, the numbers are mixed, and the last one to end restores the states from before the first.
    """
    number = int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])
    torch = sys.modules.get("torch")
    with _lock:
        before = _States(
            numpy=_numpy.get_bit_generator(),
            python=random.getstate(),
            torch=None if torch is None else torch.default_generator.get_state(),
        )
        _blocks.append(before)
        ours = _free.pop() if _free else np.random.MT19937(0)
        _numpy.set_bit_generator(ours)  # in place of the other one, whose state need not be copied
        np.random.seed(number)
        random.seed(number)
        if torch is not None:
            torch.default_generator.manual_seed(number)  # torch.manual_seed takes a millisecond: it records a stack
    try:
        yield number
    finally:
        with _lock:
            place = _blocks.index(before)
            if place == len(_blocks) - 1:
                before.restore()
            else:  # a block of another thread began later: it restores what this one would have
                following = _blocks[place + 1]
                following.numpy, following.python, following.torch = before.numpy, before.python, before.torch
            del _blocks[place]
            _free.append(ours)


def read_states() -> object:
    """Return the states of Python's and NumPy's generators, which change with each draw."""
    name, key, *rest = _numpy.get_state(legacy=True)
    return name, key.tobytes(), *rest, random.getstate()


GeneratorStates: TypeAlias = tuple[Any, Any, Any]
"""The states of the generators of Python, NumPy and PyTorch; None for PyTorch while it is not imported."""


def seed_generators(number: int) -> None:
    """Seed the generators. `number` is from 0 to 2**64 - 1."""
    random.seed(number)
    np.random.seed(np.random.SeedSequence(number).generate_state(4))
    if torch := sys.modules.get("torch"):
        torch.manual_seed(number)


def get_states() -> GeneratorStates:
    """Return the states of the generators."""
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), torch.get_rng_state().numpy() if torch else None


def set_states(states: GeneratorStates) -> None:
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
    seed_generators(number)
    try:
        yield
    finally:
        set_states(states)
