"""The generators of a process, seeded for a block: those of Python's `random`, of NumPy's `np.random`, and of PyTorch.

The code of a model's author may draw from them (mixup, augmentation, noise in a loss), without a generator of its own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

_numpy: Any = np.random  # its stubs lack the functions below
_free: list[np.random.MT19937] = []
"""Bit generators for the next blocks: a new one takes longer than its seeding."""


@contextmanager
def use_seeds(seed: int) -> Generator[int]:
    """Seed the generators of the process within the block; restore their states at the end. Yields the number used.

    PyTorch's is that of the CPU, if the process has imported PyTorch.
    """
    number = int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])
    numpy_before, python_before = _numpy.get_bit_generator(), random.getstate()
    torch = sys.modules.get("torch")
    torch_generator = None if torch is None else torch.default_generator
    torch_before = None if torch_generator is None else torch_generator.get_state()
    ours = _free.pop() if _free else np.random.MT19937(0)
    _numpy.set_bit_generator(ours)  # in place of the other one, whose state need not be copied
    np.random.seed(number)
    random.seed(number)
    if torch_generator is not None:
        torch_generator.manual_seed(number)  # torch.manual_seed takes a millisecond, to record a stack trace
    try:
        yield number
    finally:
        _numpy.set_bit_generator(numpy_before)
        random.setstate(python_before)
        if torch_generator is not None:
            torch_generator.set_state(torch_before)
        _free.append(ours)


def read_states() -> object:
    """Return the states of Python's and NumPy's generators, which change with each draw."""
    name, key, *rest = _numpy.get_state(legacy=True)
    return name, key.tobytes(), *rest, random.getstate()
