"""Vectors in blocks, in shards over workers, and side by side as rows: none needs to fit into memory.

A shard computes entry-wise results without the others. For a sum over all entries (a norm, inner products) each shard
has some of the terms, and `ShardReduce` adds up the terms of all shards. Terms are sums over blocks or windows, added
in the order of the columns, and shards begin at window boundaries, so the bits do not depend on the number of shards.

Computations on all vectors of a cohort at once (a median over clients, the distances between them) read the vectors in
lockstep. Memory is the number of rows times a window, independent of the length of the rows. Each row is read from
beginning to end in long parts, so that even a hundred files on a hard disk are read sequentially.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from fedplat import system

Vector: TypeAlias = npt.NDArray[np.float32]
"""One float32 vector: the floating-point entries of a model, in canonical order."""

BLOCK = 1 << 16
"""Elements processed at a time: operands and scratch of this size stay in a core's cache."""


WINDOW = 4 * BLOCK
"""Elements that cheap passes process at a time if possible. Longer parts stream better from memory: a plain fold of
25 M entries takes 0.7 of the time that it takes by `BLOCK`, a pass over a file 0.75."""


class Blocks(Protocol):
    """A float32 vector that can be read repeatedly, always from its beginning, and need not be in memory as a whole.

    Each block has `BLOCK` elements, except the last one. A block must not be modified, and is valid until the next
    one is drawn.
    """

    @property
    def size(self) -> int:
        """Number of elements."""
        ...

    def __iter__(self) -> Iterator[Vector]:
        """Iterate over the blocks, in order."""
        ...


@runtime_checkable
class Windowed(Blocks, Protocol):
    """Blocks that can also be read several at a time."""

    def windows(self) -> Iterator[Vector]:
        """Iterate over the elements, `WINDOW` at a time; the rules for blocks apply to each window."""
        ...


class VectorBlocks:
    """A vector in memory as `Blocks`: slices of it, which copy nothing.

    Raises `ValueError` unless it is a float32 vector.

    >>> [block.tolist() for block in VectorBlocks(np.array([1, 2], np.float32))]
    [[1.0, 2.0]]
    """

    def __init__(self, vector: Vector) -> None:
        if vector.dtype != np.float32 or vector.ndim != 1:
            raise ValueError(f"the vector is {vector.dtype} {list(vector.shape)}; expected float32 of one dimension")
        self._vector = vector

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._vector.size

    def __iter__(self) -> Iterator[Vector]:
        return (self._vector[block] for block in blocks(self._vector.size))

    def windows(self) -> Iterator[Vector]:
        """Iterate over the elements, `WINDOW` at a time."""
        return (self._vector[window] for window in blocks(self._vector.size, WINDOW))


def blocks(size: int, length: int = BLOCK) -> Iterator[slice]:
    """Yield slices of `length` elements that cover `size` elements."""
    return (slice(start, min(start + length, size)) for start in range(0, size, length))


def windows(values: Blocks) -> Iterator[Vector]:
    """Iterate over the elements in parts of any size up to `WINDOW`, for callers that do not depend on boundaries."""
    # Not `isinstance`: on a protocol it takes as long as adding 60,000 entries, and there are many small updates.
    own: Callable[[], Iterator[Vector]] | None = getattr(values, "windows", None)
    return iter(values) if own is None else own()


def part_of(values: Blocks, columns: range | None) -> Blocks:
    """Return some columns of a vector, which begin at a multiple of `BLOCK`, or the vector itself if they are all."""
    return values if columns is None or len(columns) == values.size else _PartBlocks(values, columns)


class _PartBlocks:
    def __init__(self, values: Blocks, columns: range) -> None:
        self._values, self._columns = values, columns

    @property
    def size(self) -> int:
        return len(self._columns)

    def __iter__(self) -> Iterator[Vector]:
        position, columns = 0, self._columns
        for block in self._values:
            if position >= columns.stop:
                return
            if position >= columns.start:
                yield block[: columns.stop - position]
            position += block.size


def is_finite(values: Blocks) -> bool:
    """Return whether no entry is NaN or infinite."""
    return all(np.isfinite(part).all() for part in windows(values))


Terms = npt.NDArray[np.float64]


class ShardReduce(Protocol):
    """A sum over the terms of all shards."""

    def __call__(self, zero: Terms, terms: Iterable[Terms]) -> Terms:
        """Return `zero` plus the terms of the first shard, in order, plus those of the next, and so on; [...] each.

        All shards must call it, in the same order and with equal zeros. All receive the same result.
        """
        ...


def single_shard(zero: Terms, terms: Iterable[Terms]) -> Terms:
    """Return the sum of the terms when one shard has all columns."""
    total = zero.copy()
    for term in terms:
        total += term
    return total


def shards(size: int, number: int) -> list[range]:
    """Divide the columns of a vector of `size` entries into `number` shards, as evenly as whole windows allow.

    The last shards may be empty.

    >>> shards(3 * WINDOW + 5, 2)
    [range(0, 524288), range(524288, 786437)]
    """
    whole, more = divmod(-(-size // WINDOW), number)
    ends = [min((whole * (index + 1) + min(index + 1, more)) * WINDOW, size) for index in range(number)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def l2_norm(vector: Blocks, reduce_shards: ShardReduce = single_shard) -> float:
    """Return the Euclidean norm of a float32 vector, summed in float64; the same bits on every machine.

    If `vector` is a shard's part of an update, `reduce_shards` must be that of the `Partial`.
    """
    return math.sqrt(reduce_shards(np.zeros(1), _squares(vector)).item())


def _squares(vector: Blocks) -> Iterator[Terms]:
    wide = np.empty(min(BLOCK, vector.size), np.float64)
    for block in vector:
        squares = wide[: block.size]
        squares[:] = block
        # Not np.dot: BLAS sums in an order that depends on the processor and the number of threads.
        yield np.square(squares, out=squares).sum(keepdims=True)


def scale_vector(vector: Blocks, factor: float) -> Blocks:
    """Return a vector times a factor (as float32), computed block by block when read; for 1, the vector itself."""
    return vector if factor == 1 else _Scaled(vector, np.float32(factor))


class _Scaled:
    def __init__(self, vector: Blocks, factor: np.float32) -> None:
        self._vector = vector
        self._factor = factor

    @property
    def size(self) -> int:
        return self._vector.size

    def __iter__(self) -> Iterator[Vector]:
        scratch = np.empty(min(BLOCK, self.size), np.float32)
        for block in self._vector:
            yield np.multiply(block, self._factor, out=scratch[: block.size])


Matrix: TypeAlias = npt.NDArray[np.float64]
"""A small float64 matrix or vector: coefficients, inner products."""

Columns: TypeAlias = npt.NDArray[np.float32]
"""Some columns of many rows, [rows, columns]."""

CHUNK = 2048
"""Columns processed at a time: a hundred rows of this length stay in a core's cache."""

_FEW_ROWS = 256
"""Largest number of rows that are read by `WINDOW`; more are read by `BLOCK`, since windows would take gigabytes."""

_ONE_THREAD = 1 << 18
"""Multiplications up to which OpenBLAS stays in the calling thread. Matrices are multiplied in tiles of at most this
size, so that the bits do not depend on the number of threads, and the threads of BLAS do not compete with ours (on two
busy cores that took ten times as long)."""
_TILE_ROWS, _TILE_COLUMNS = 32, 256
_MIXED_COLUMNS = 64

_PADDING = 16
"""Entries between two rows in memory: rows at a distance of a power of two would share a few cache lines (sorting the
columns of a hundred rows then takes three times as long)."""


def allocate_rows(num_rows: int, num_columns: int, dtype: type[Any]) -> npt.NDArray[Any]:
    """Allocate uninitialized memory for rows side by side, [num_rows, num_columns]."""
    return np.empty((num_rows, num_columns + _PADDING), dtype)[:, :num_columns]


def gram(rows: Sequence[Blocks], reduce_shards: ShardReduce = single_shard) -> Matrix:
    """Compute the inner products of all pairs of rows, [rows, rows], in one pass.

    They are float64: the error of a distance computed from them is about 1e-8 of the rows' norms, no more than the
    float32 rounding of the rows. The bits are the same on the same machine for any number of threads; another processor
    may differ in the last bits. If the rows belong to a shard, `reduce_shards` adds the products of the other shards.
    """
    zero = np.zeros((len(rows), len(rows)))
    with _pool() as pool:
        lower = reduce_shards(zero, _window_products(rows, zero, pool))
    return lower + np.tril(lower, -1).T


def each_column(rows: Sequence[Blocks], combine: Callable[[Columns], Vector], mixing: Matrix | None = None) -> Vector:
    """Apply `combine` to the columns in one pass: it maps [rows, n] to [n], for any n, column by column.

    With `mixing`, [m, rows], `combine` receives the m weighted sums of the rows instead, computed in float32, with bits
    that are as reproducible as those of `gram`. It is called in several threads.
    """
    factors = None if mixing is None else mixing.astype(np.float32)
    size = rows[0].size
    result, start = np.empty(size, np.float32), 0
    with _pool() as pool:
        for part in _read_columns(rows, pool):

            def compute(chunk: slice, part: Columns = part, start: int = start) -> None:
                values = part[:, chunk] if factors is None else _combine(factors, part[:, chunk])
                result[start + chunk.start : start + chunk.stop] = combine(values)

            _run_all(pool, compute, blocks(part.shape[1], CHUNK))
            start += part.shape[1]
    assert start == size
    return result


def weighted_sum(rows: Sequence[Blocks], coefficients: Matrix) -> Vector:
    """Compute the sum of coefficient times row in float64; rows with coefficient 0 are not read.

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


def _read_columns(rows: Sequence[Blocks], pool: Executor) -> Iterator[Columns]:
    """Yield the columns of the rows in order, a window or a block at a time; valid until the next are drawn."""
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

        _run_all(pool, read, range(len(rows)))
        yield columns


def _window_products(rows: Sequence[Blocks], zero: Matrix, pool: Executor) -> Iterator[Matrix]:
    """Yield the products of each window of the rows, separately because a shard may begin at any window."""
    total, end = zero.copy(), 0
    for part in _read_columns(rows, pool):
        for products in pool.map(_products, (part[:, chunk] for chunk in blocks(part.shape[1], CHUNK))):
            total += products  # `map` keeps the order, so the sum does not depend on the threads
        end += part.shape[1]
        if end % WINDOW == 0 or end == rows[0].size:
            yield total
            total = zero.copy()


def _products(columns: Columns) -> Matrix:
    """Return the inner products of rows of a few columns: the lower triangle with the diagonal."""
    tiles = _tiles(columns, _TILE_COLUMNS, np.float64)
    products = np.zeros((len(columns), len(columns)))
    for left in blocks(len(columns), _TILE_ROWS):
        for right in blocks(left.stop, _TILE_ROWS):
            products[left, right] = np.matmul(tiles[:, left], tiles[:, right].transpose(0, 2, 1)).sum(axis=0)
    return np.tril(products)


def _combine(factors: Columns, columns: Columns) -> Columns:
    """Return weighted sums of rows of a few columns."""
    tiles = _tiles(columns, _MIXED_COLUMNS, np.float32)
    num_tiles, num_rows, _ = tiles.shape
    mixed = np.empty((len(factors), num_tiles * _MIXED_COLUMNS), np.float32)
    by_tile = mixed.reshape(len(factors), num_tiles, _MIXED_COLUMNS).transpose(1, 0, 2)
    for group in blocks(len(factors), max(1, _ONE_THREAD // (_MIXED_COLUMNS * num_rows))):
        np.matmul(factors[group], tiles, out=by_tile[:, group])
    return mixed[:, : columns.shape[1]]


def _tiles(columns: Columns, length: int, dtype: type[Any]) -> npt.NDArray[Any]:
    """Return the columns in groups of `length`, padded with zeros: [groups, rows, length]."""
    num_rows, count = columns.shape
    width = -(-count // length) * length
    filled = allocate_rows(num_rows, width, dtype)
    filled[:, :count] = columns
    filled[:, count:] = 0
    # A view in which rows keep their distance in memory: BLAS accepts it without a copy.
    step, item = filled.strides
    return np.lib.stride_tricks.as_strided(filled, (width // length, num_rows, length), (length * item, step, item))


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(system.num_cores())


def _run_all(pool: Executor, function: Callable[..., None], arguments: Iterator[slice] | range) -> None:
    """Call the function with each argument, and wait; raises the exception of the first argument that failed."""
    for _ in pool.map(function, arguments):
        pass
