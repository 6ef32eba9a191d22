"""Many vectors side by side: the rows of a matrix of which only some columns are in memory at a time.

Whoever needs all vectors of a cohort at once (a median over clients, the distances between them) reads them in step:
memory is the number of rows times a window, however long the rows are, and each row is read from its beginning to its
end in long parts, so that even a hundred files on a disk that spins are read in sequence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat.model.blocks import BLOCK, WINDOW, Blocks, Vector, Windowed, blocks
from fedplat.model.shards import ShardReduce, single_shard

Matrix: TypeAlias = npt.NDArray[np.float64]
"""Numbers of a few rows: coefficients, inner products."""

Columns: TypeAlias = npt.NDArray[np.float32]
"""Some columns of many rows, [rows, columns]."""

CHUNK = 2048
"""Columns that are computed on at a time: a hundred rows of so many stay in a core's cache."""

_FEW_ROWS = 256
"""Up to so many rows are read by `WINDOW`, more by `BLOCK`: else the windows would take gigabytes."""

_ONE_THREAD = 1 << 18
"""Multiplications up to which OpenBLAS works in the thread that calls it. Matrices are multiplied in tiles that are no
larger: the bits do then not depend on the number of threads, and those of BLAS do not get into the way of ours (on two
busy cores they took ten times as long)."""
_TILE_ROWS, _TILE_COLUMNS = 32, 256
_MIXED_COLUMNS = 64

_PADDING = 16
"""Entries between two rows in memory: at a distance of a power of two all of them would share a few lines of the cache
(sorting the columns of a hundred rows takes three times as long)."""


def allocate_rows(num_rows: int, num_columns: int, dtype: type[Any]) -> npt.NDArray[Any]:
    """Memory for rows side by side, not filled."""
    return np.empty((num_rows, num_columns + _PADDING), dtype)[:, :num_columns]


def gram(rows: Sequence[Blocks], across: ShardReduce = single_shard) -> Matrix:
    """The inner products of all pairs of rows, [rows, rows], in one pass.

    In float64: a distance that is computed from them is off by about 1e-8 of the rows' norms, no more than by what
    float32 has rounded off the rows. The same bits on the same machine, whatever its number of threads; another
    processor's may differ in the last ones. Where the rows are a shard's, `across` adds the products of the others.
    """
    zero = np.zeros((len(rows), len(rows)))
    with _pool() as pool:
        lower = across(zero, _by_window(rows, zero, pool))
    return lower + np.tril(lower, -1).T


def each_column(rows: Sequence[Blocks], combine: Callable[[Columns], Vector], mixing: Matrix | None = None) -> Vector:
    """What `combine` makes of the columns: [rows, n] to [n], for any n, entry by entry; in one pass.

    With `mixing`, [m, rows], it is given the m weighted sums of the rows instead, computed in float32; what is said of
    the bits of `gram` holds for them. It is called in several threads.
    """
    factors = None if mixing is None else mixing.astype(np.float32)
    size = rows[0].size
    result, start = np.empty(size, np.float32), 0
    with _pool() as pool:
        for part in _in_step(rows, pool):

            def compute(chunk: slice, part: Columns = part, start: int = start) -> None:
                values = part[:, chunk] if factors is None else _combine(factors, part[:, chunk])
                result[start + chunk.start : start + chunk.stop] = combine(values)

            _all(pool, compute, blocks(part.shape[1], CHUNK))
            start += part.shape[1]
    assert start == size
    return result


def weighted_sum(rows: Sequence[Blocks], coefficients: Matrix) -> Vector:
    """The sum of coefficient times row, summed in float64; rows whose coefficient is 0 are not read.

    The same bits on every machine. A result beyond the range of float32 becomes infinite, without a warning.
    """
    [chosen] = np.nonzero(coefficients)
    if not chosen.size:
        return np.zeros(rows[0].size, np.float32)
    factors = coefficients[chosen].tolist()

    def combine(columns: Columns) -> Vector:
        total, product = np.zeros(columns.shape[1]), np.empty(columns.shape[1])
        for factor, row in zip(factors, columns, strict=True):
            np.multiply(row, factor, out=product)
            total += product
        with np.errstate(over="ignore"):
            return total.astype(np.float32)

    return each_column([rows[index] for index in chosen.tolist()], combine)


def _in_step(rows: Sequence[Blocks], pool: Executor) -> Iterator[Columns]:
    """The columns of the rows, in order and as many at a time as fit; valid until the next are drawn."""
    wide = [row for row in rows if isinstance(row, Windowed)]
    if len(wide) == len(rows) <= _FEW_ROWS:
        length, readers = WINDOW, [row.windows() for row in wide]
    else:
        length, readers = BLOCK, [iter(row) for row in rows]
    size = rows[0].size
    matrix = allocate_rows(len(rows), min(length, size), np.float32)
    for part in blocks(size, length):
        columns = matrix[:, : part.stop - part.start]

        def read(index: int, columns: Columns = columns) -> None:
            columns[index] = next(readers[index])

        _all(pool, read, range(len(rows)))
        yield columns


def _by_window(rows: Sequence[Blocks], zero: Matrix, pool: Executor) -> Iterator[Matrix]:
    """The products of each window of the rows: a shard may begin with it, so each has a sum of its own."""
    total, end = zero.copy(), 0
    for part in _in_step(rows, pool):
        for products in pool.map(_products, (part[:, chunk] for chunk in blocks(part.shape[1], CHUNK))):
            total += products  # in order, whoever was first
        end += part.shape[1]
        if end % WINDOW == 0 or end == rows[0].size:
            yield total
            total = zero.copy()


def _products(columns: Columns) -> Matrix:
    """The inner products of rows of a few columns; those below the diagonal, and on it."""
    tiles = _tiles(columns, _TILE_COLUMNS, np.float64)
    products = np.zeros((len(columns), len(columns)))
    for left in blocks(len(columns), _TILE_ROWS):
        for right in blocks(left.stop, _TILE_ROWS):
            products[left, right] = np.matmul(tiles[:, left], tiles[:, right].transpose(0, 2, 1)).sum(axis=0)
    return np.tril(products)


def _combine(factors: Columns, columns: Columns) -> Columns:
    """Weighted sums of rows of a few columns."""
    tiles = _tiles(columns, _MIXED_COLUMNS, np.float32)
    num_tiles, num_rows, _ = tiles.shape
    mixed = np.empty((len(factors), num_tiles * _MIXED_COLUMNS), np.float32)
    by_tile = mixed.reshape(len(factors), num_tiles, _MIXED_COLUMNS).transpose(1, 0, 2)
    for group in blocks(len(factors), max(1, _ONE_THREAD // (_MIXED_COLUMNS * num_rows))):
        np.matmul(factors[group], tiles, out=by_tile[:, group])
    return mixed[:, : columns.shape[1]]


def _tiles(columns: Columns, length: int, dtype: type[Any]) -> npt.NDArray[Any]:
    """The columns in groups of `length`, filled up with zeros: [groups, rows, length]."""
    num_rows, count = columns.shape
    width = -(-count // length) * length
    filled = allocate_rows(num_rows, width, dtype)
    filled[:, :count] = columns
    filled[:, count:] = 0
    # A view with one row's distance between the rows of a group: what BLAS takes without a copy.
    step, item = filled.strides
    return np.lib.stride_tricks.as_strided(filled, (width // length, num_rows, length), (length * item, step, item))


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())


def _all(pool: Executor, function: Callable[..., None], arguments: Iterator[slice] | range) -> None:
    """Calls the function with each argument, and waits; raises what the first of them raised."""
    for _ in pool.map(function, arguments):
        pass
