"""No suppressed cell of a table follows from those that are published."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.optimize import linprog

from fedplat.procedures import suppression
from fedplat.procedures.suppression import Mask, find_suppressed

NAMES = ("a", "b", "c")
Table = tuple[tuple[str, ...], npt.NDArray[np.int64]]


def sum_up(joint: npt.NDArray[np.int64], *sets: str) -> list[Table]:
    return [
        (tuple(names), joint.sum(axis=tuple(axis for axis in range(joint.ndim) if NAMES[axis] not in names)))
        for names in sets
    ]


def attack(joint: npt.NDArray[np.int64], tables: list[Table], hidden: list[Mask]) -> list[tuple[float, float]]:
    """Return the least and largest value of each suppressed cell that a reader cannot exclude, by linear programs.

    The unknowns are the counts of all combinations, which are not negative; suppressed cells have 1 row at least.
    """
    cells = np.arange(joint.size).reshape(joint.shape)
    known, totals, unknown = list[npt.NDArray[np.float64]](), list[int](), list[npt.NDArray[np.float64]]()
    for (names, counts), mask in zip(tables, hidden, strict=True):
        for place in np.ndindex(counts.shape):
            at = [place[names.index(name)] if name in names else slice(None) for name in NAMES[: joint.ndim]]
            row = np.isin(cells, cells[tuple(at)]).reshape(-1).astype(float)
            if mask[place]:
                unknown.append(row)
            else:
                known.append(row)
                totals.append(int(counts[place]))
    ends = list[tuple[float, float]]()
    for row in unknown:
        limits: dict[str, Any] = {"A_ub": -np.array(unknown), "b_ub": -np.ones(len(unknown))}
        if known:
            limits |= {"A_eq": np.array(known), "b_eq": np.array(totals)}
        low, high = (linprog(sign * row, **limits) for sign in (1, -1))
        ends.append((low.fun, -high.fun if high.status == 0 else np.inf))
    return ends


def check(seed: int, shape: tuple[int, ...], *sets: str) -> None:
    rng = np.random.default_rng(seed)
    joint = rng.poisson(rng.exponential(8, shape))
    tables = sum_up(joint, *sets)
    hidden = find_suppressed(tables, 5)
    for (_, counts), mask in zip(tables, hidden, strict=True):
        assert np.all(mask[(counts > 0) & (counts < 5)])
        assert not np.any(mask[counts == 0])
    for low, high in attack(joint, tables, hidden):
        assert high - low > 0.5


def test_a_reader_cannot_compute_a_suppressed_cell() -> None:
    for seed in range(3):
        check(seed, (3, 3), "", "a", "b", "ab")


@pytest.mark.slow
def test_a_reader_of_linked_tables_cannot_compute_a_suppressed_cell() -> None:
    for seed in range(30):
        check(seed, (3, 3), "", "a", "b", "ab")
        check(seed, (3, 2, 2), "", "a", "b", "c", "ab", "bc")
        check(seed, (2, 2, 3), "", "a", "b", "c", "ab", "abc")


def test_cells_are_published_unless_they_are_small_or_the_rest_of_a_sum() -> None:
    large = sum_up(np.array([[50, 60], [70, 0]]), "", "a", "b", "ab")
    assert not any(mask.any() for mask in find_suppressed(large, 10))
    (total, row) = find_suppressed(sum_up(np.array([50, 3, 20]), "", "a"), 10)
    assert (total.tolist(), row.tolist()) == (False, [False, True, True])  # 20 as well: 3 would be the rest
    (total, row) = find_suppressed(sum_up(np.array([50, 5, 5]), "", "a"), 10)
    assert row.tolist() == [True, True, True]  # each has a row, so that neither could have 10
    (total, row) = find_suppressed(sum_up(np.array([50, 6, 5]), "", "a"), 10)
    assert row.tolist() == [False, True, True]
    (total, row) = find_suppressed(sum_up(np.array([3, 0, 0]), "", "a"), 10)
    assert (total.tolist(), row.tolist()) == (True, [True, False, False])
    assert not any(mask.any() for mask in find_suppressed(sum_up(np.array([[3, 1], [2, 0]]), "", "a", "b", "ab"), 1))


def test_without_a_total_only_small_cells_are_suppressed() -> None:
    (mask,) = find_suppressed([(("a",), np.array([50, 3, 20]))], 10)
    assert mask.tolist() == [False, True, False]


def test_tables_with_too_many_unknown_cells_are_suppressed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suppression, "_MAX_UNKNOWN", 3)
    tables = sum_up(np.array([[50, 3, 20], [60, 70, 4], [0, 30, 20]]), "", "a", "b", "ab")
    *_, several = find_suppressed(tables, 10)
    assert several.all()
