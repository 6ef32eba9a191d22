"""Suppression of small cells in tables of counts, and of further cells that keep them from being computed.

A cell with a count from 1 to `min_cell` - 1 is suppressed. Its count would follow from a published total as the rest of
a sum, so more cells are suppressed (complementary suppression; Willenborg and de Waal, Elements of Statistical
Disclosure Control, 2001), the smallest first, until
- each sum of cells that is published, or equals one that is, has no suppressed cell, or several that together are large
  enough for any one of them to have `min_cell` rows;
- no suppressed cell follows from all published cells together by sums and differences: the unknown cells solve linear
  equations, the equal sums of any two tables, and a cell is determined if it is the same in all their solutions.

A count of 0 is published. What is suppressed has at least 1 row, and nothing shows which cells were small.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Counts: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Cells: TypeAlias = npt.NDArray[np.intp]
Equation: TypeAlias = tuple[Cells, Cells]
"""Cells of one table and of another that have the same sum."""

_MAX_UNKNOWN = 500
"""Suppressed cells up to which the equations are solved."""
_DETERMINED = 1 - 1e-9


def find_suppressed(tables: Sequence[tuple[tuple[str, ...], Counts]], min_cell: int) -> list[Mask]:
    """Return which cells of tables must not be published, from the columns of each table and its counts.

    All tables count the same rows. Each column has one axis, of the same size in all tables that have it.
    """
    sizes = [counts.size for _, counts in tables]
    starts = [sum(sizes[:place]) for place in range(len(tables))]
    counts = np.concatenate([each.reshape(-1) for _, each in tables])
    cells = [start + np.arange(each.size).reshape(each.shape) for start, (_, each) in zip(starts, tables, strict=True)]
    equations = [*_list_equations([columns for columns, _ in tables], cells)]
    hidden = (counts > 0) & (counts < min_cell)
    while _hide_rests(hidden, counts, equations, min_cell) or _hide_determined(hidden, counts, equations):
        if np.count_nonzero(hidden) > _MAX_UNKNOWN:
            for each in cells:
                hidden[each] |= bool(hidden[each].any())
            break
    return [hidden[each] for each in cells]


def _list_equations(columns: Sequence[tuple[str, ...]], cells: Sequence[Cells]) -> Iterator[Equation]:
    """Yield the equal sums of each two tables over the columns that they share.

    If another table has just these columns, they follow from the sums that each of the two shares with it.
    """
    published = {frozenset(each) for each in columns}
    for first, second in itertools.combinations(range(len(columns)), 2):
        shared = [name for name in columns[first] if name in columns[second]]
        if frozenset(shared) in published - {frozenset(columns[first]), frozenset(columns[second])}:
            continue
        parts = [_collect_sums(columns[place], cells[place], shared) for place in (first, second)]
        yield from zip(*parts, strict=True)


def _collect_sums(columns: tuple[str, ...], cells: Cells, shared: Sequence[str]) -> Cells:
    """Return the cells that each sum over the other columns has, shape [sums, cells of each]."""
    axes = [columns.index(name) for name in shared]
    moved = np.moveaxis(cells, axes, range(len(axes)))
    return moved.reshape(int(np.prod(moved.shape[: len(axes)], dtype=int)), -1)


def _hide_rests(hidden: Mask, counts: Counts, equations: Sequence[Equation], min_cell: int) -> bool:
    """Suppress more cells of published sums until their suppressed ones are large enough, and return whether any."""
    is_changed = False
    for one, other in itertools.chain.from_iterable(((a, b), (b, a)) for a, b in equations):
        while not hidden[other].any() and (unknown := one[hidden[one]]).size:
            # Each has a row at least, so that the others leave this for any one of them.
            if unknown.size > 1 and counts[unknown].sum() - (unknown.size - 1) >= min_cell:
                break
            is_changed = any(_hide_smallest(hidden, counts, cells) for cells in (one, other))
            assert is_changed
    return is_changed


def _hide_determined(hidden: Mask, counts: Counts, equations: Sequence[Equation]) -> bool:
    """Suppress one more cell if the equations determine a suppressed one, and return whether they do."""
    unknown = np.flatnonzero(hidden)
    relevant = [(one, other) for one, other in equations if hidden[one].any() or hidden[other].any()]
    if not relevant or unknown.size > _MAX_UNKNOWN:
        return bool(unknown.size > _MAX_UNKNOWN)
    matrix = np.zeros((len(relevant), counts.size))
    for row, (one, other) in zip(matrix, relevant, strict=True):
        row[one] += 1
        row[other] -= 1
    _, values, directions = np.linalg.svd(matrix[:, unknown], full_matrices=False)
    rows = directions[values > 1e-9 * max(matrix.shape) * max(values[0], 1)]
    determined = unknown[np.square(rows).sum(axis=0) > _DETERMINED]
    if not determined.size:
        return False
    near = [np.concatenate(each) for each in relevant if np.isin(determined[0], np.concatenate(each))]
    if not any(_hide_smallest(hidden, counts, each) for each in near):
        assert _hide_smallest(hidden, counts, np.arange(counts.size))
    return True


def _hide_smallest(hidden: Mask, counts: Counts, cells: Cells) -> bool:
    """Suppress the smallest of some cells that is published and not 0; return whether there is one."""
    shown = cells[~hidden[cells] & (counts[cells] > 0)]
    if not shown.size:
        return False
    hidden[shown[np.argmin(counts[shown])]] = True
    return True
