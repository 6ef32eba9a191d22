"""Parameters of tests for few combinations of several values: those in which each pair of values occurs.

Most faults of options that act on each other need two of them. `make test-all` runs the other combinations, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import pytest

Axis: TypeAlias = Mapping[str, Any] | Collection[str]
"""The values of a parameter by name, or names that are values."""
Names: TypeAlias = tuple[str, ...]


def pairwise(*axes: Axis, full: Sequence[int] = ()) -> list[Any]:
    """Return all combinations for `parametrize`; those marked `grid` are not needed to have each pair in another one.

    The first value of each axis in `full` occurs in all combinations with the values of the other axes.
    """
    whole = list(itertools.product(*axes))
    firsts = [next(iter(axis)) for axis in axes]
    begin = [names for names in whole if any(names[place] == firsts[place] for place in full)]
    needed = cover(whole, begin)
    return [
        pytest.param(
            *(axis[name] if isinstance(axis, Mapping) else name for axis, name in zip(axes, names, strict=True)),
            id="-".join(names),
            marks=() if names in needed else pytest.mark.grid,
        )
        for names in whole
    ]


def cover(whole: Sequence[Names], begin: Sequence[Names] = ()) -> set[Names]:
    """Return combinations in which each pair of values of `whole` occurs: those of `begin`, and as few as possible.

    The next one is always the first of those with the most pairs that no other one has.
    """
    chosen = set(begin)
    missing = set[Any]().union(*map(pairs, whole)).difference(*map(pairs, begin))
    while missing:
        best = max(whole, key=lambda names: len(missing & pairs(names)))
        chosen.add(best)
        missing -= pairs(best)
    return chosen


def pairs(names: Names) -> set[Any]:
    """Return the pairs of values of a combination, each value with the number of its axis; or its only value."""
    values = list(enumerate(names))
    return set(itertools.combinations(values, 2)) or set(values)
