"""A packed dataset is complete or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.errors import DataError
from fedplat.packed import PackedReader, PackedWriter
from support.packed import examples


def test_an_interrupted_packing_leaves_nothing(tmp_path: Path) -> None:
    def pack() -> None:
        with PackedWriter(tmp_path / "data", 1000) as writer:
            writer.add(*examples(100))
            (folder,) = tmp_path.iterdir()
            assert folder.name.startswith(".data-")
            assert len([*folder.iterdir()]) == 5
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack()
    assert not [*tmp_path.iterdir()]


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match=f"{tmp_path} exists; expected the name of a new folder"):
        PackedWriter(tmp_path)
    with pytest.raises(DataError, match="exists"):
        PackedWriter(tmp_path / "mine.txt")


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (np.zeros((2, 3, 5), np.float32), np.zeros(2, int), r"example 1: inputs is float32\[3, 5\]; expected float32"),
        (np.zeros((2, 3, 4)), np.zeros(2, int), r"inputs is float64\[3, 4\]; expected float32\[3, 4\]"),
        (np.zeros((2, 3, 4), np.float32), np.zeros((2, 1), int), r"targets is int64\[1\]; expected int64\[\]"),
        (np.zeros((2, 3, 4), np.float32), np.zeros(3, int), "expected two arrays with as many rows"),
        (np.zeros((2, 3, 4), np.float32), np.int64(3), "expected two arrays with as many rows"),
    ],
)
def test_examples_that_differ_from_the_first(tmp_path: Path, inputs: Any, targets: Any, message: str) -> None:
    def pack() -> None:
        with PackedWriter(tmp_path / "data") as writer:
            writer.add(*examples(1))
            writer.add(inputs, targets)

    with pytest.raises(DataError, match=message):
        pack()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (np.array([True, False]), "type bool, which cannot be packed; expected float16, "),
        (np.array(["a", "b"]), "type <U1"),
        (np.array([{}, {}]), "type object"),
        (np.zeros((2, 0)), r"shape \[0\] and 0 bytes; expected at most 16 dimensions, none of "),
    ],
)
def test_examples_that_cannot_be_packed(tmp_path: Path, inputs: Any, message: str) -> None:
    with pytest.raises(DataError, match=message), PackedWriter(tmp_path / "data") as writer:
        writer.add(inputs, np.zeros(2, int))


def test_no_examples(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no example"), PackedWriter(tmp_path / "data") as writer:
        writer.add(np.zeros((0, 3)), np.zeros(0))
    assert not [*tmp_path.iterdir()]


def test_each_dataset_has_an_id(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with PackedWriter(tmp_path / name) as writer:
            writer.add(*examples(1))
    assert PackedReader(tmp_path / "a").index.dataset != PackedReader(tmp_path / "b").index.dataset
