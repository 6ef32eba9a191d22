"""Vectors side by side: in step, in few windows, the same bits whatever the number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedplat import codecs
from fedplat.codecs.container import Format
from fedplat.model import BLOCK, WINDOW, Blocks, ModelFile, Parameters, Vector, VectorBlocks
from fedplat.model.blocks import each_column, gram, weighted_sum


class OnlyBlocks:
    """A vector that has no windows."""

    def __init__(self, vector: Vector) -> None:
        self._inner = VectorBlocks(vector)
        self.size = vector.size

    def __iter__(self):
        return iter(self._inner)


def matrix_of(num_rows: int, size: int) -> np.ndarray:
    return np.random.default_rng([num_rows, size]).normal(size=(num_rows, size)).astype(np.float32)


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 4097), (33, 300), (70, BLOCK + 5), (4, WINDOW + BLOCK + 7)])
@pytest.mark.parametrize("kind", [VectorBlocks, OnlyBlocks])
def test_equal_to_numpy_for_any_shape(num_rows: int, size: int, kind: type[VectorBlocks | OnlyBlocks]) -> None:
    matrix = matrix_of(num_rows, size)
    rows, wide = [kind(row) for row in matrix], matrix.astype(np.float64)
    np.testing.assert_allclose(gram(rows), wide @ wide.T, rtol=1e-12, atol=1e-10)
    assert each_column(rows, lambda columns: columns.max(axis=0)).tobytes() == matrix.max(axis=0).tobytes()
    coefficients = np.arange(num_rows) / num_rows
    np.testing.assert_allclose(weighted_sum(rows, coefficients), coefficients @ wide, rtol=0, atol=1e-5)
    factors = np.random.default_rng(1).random((3, num_rows))
    mixed = each_column(rows, lambda columns: columns.sum(axis=0, dtype=np.float32), factors)
    np.testing.assert_allclose(mixed, (factors @ wide).sum(axis=0), rtol=0, atol=1e-4 * num_rows)


def test_rows_of_nothing() -> None:
    rows = [VectorBlocks(np.zeros(0, np.float32))] * 3
    assert gram(rows).tolist() == np.zeros((3, 3)).tolist()
    assert each_column(rows, lambda columns: columns[0]).size == 0
    assert weighted_sum(rows, np.ones(3)).size == 0


def test_files_encoded_updates_and_vectors_give_the_same_bits(tmp_path: Path) -> None:
    matrix = matrix_of(5, WINDOW + 9)
    updates = [Parameters.from_arrays({"a": row[:100], "b": row[100:]}) for row in matrix]
    encoded: list[Blocks] = []
    for number, update in enumerate(updates):
        format = Format(codecs.Plain(zstd=True), update.schema)
        (tmp_path / f"{number}").write_bytes(update.to_bytes())
        (tmp_path / f"{number}.zstd").write_bytes(b"".join(format.encode(update, np.random.default_rng(1))))
        encoded.append(format.open(tmp_path / f"{number}.zstd").to_blocks())
    files = [ModelFile.open(tmp_path / f"{number}").to_blocks() for number in range(5)]
    vectors = [VectorBlocks(row) for row in matrix]
    for rows in (files, encoded):
        assert gram(rows).tobytes() == gram(vectors).tobytes()
        assert weighted_sum(rows, np.ones(5)).tobytes() == weighted_sum(vectors, np.ones(5)).tobytes()


def test_rows_without_a_coefficient_are_not_read() -> None:
    class Unreadable(OnlyBlocks):
        def __iter__(self):
            raise AssertionError("it was read")

    one = np.ones(3, np.float32)
    assert weighted_sum([Unreadable(one), VectorBlocks(one)], np.array([0.0, 2.0])).tolist() == [2, 2, 2]
    assert weighted_sum([Unreadable(one)], np.zeros(1)).tolist() == [0, 0, 0]


def test_an_error_in_a_row_is_raised() -> None:
    class Broken(OnlyBlocks):
        def __iter__(self):
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        gram([VectorBlocks(np.ones(3, np.float32)), Broken(np.ones(3, np.float32))])


PROGRAM = """
import hashlib
import numpy as np
from fedplat.model import VectorBlocks
from fedplat.model.blocks import each_column, gram
matrix = np.random.default_rng(1).normal(size=(101, 5000)).astype(np.float32)
rows = [VectorBlocks(row) for row in matrix]
mixing = np.random.default_rng(2).random((101, 101))
mixed = each_column(rows, lambda columns: columns.sum(axis=0), mixing)
print(hashlib.sha256(gram(rows).tobytes() + mixed.tobytes()).hexdigest())
"""


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "OPENBLAS_NUM_THREADS": number},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for number in ("1", "2", "4")
    }
    assert len(found) == 1
