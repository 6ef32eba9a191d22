"""The source of packed folders, and the partition of their examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.errors import DataError
from fedplat.packed import PackedWriter
from fedplat.simulation.data import federation, partitioners, sources
from support.packed import edit_index

IID = partitioners.Iid(clients=2)


def pack(folder: Path, inputs: Any, targets: Any, shard_bytes: int = 48) -> None:
    with PackedWriter(folder, shard_bytes) as writer:
        writer.add(np.asarray(inputs), np.asarray(targets))


def test_packed_folders(tmp_path: Path) -> None:
    values = np.arange(20.0).reshape(10, 2)
    targets = np.arange(10, dtype=np.uint8) % 3
    pack(tmp_path / "silos/north", values[:7], targets[:7])  # shards of two examples
    pack(tmp_path / "silos/east", values[7:], targets[7:])
    whole = sources.Packed("silos/north", test_path="silos/east")
    found = federation(whole, IID, folder=tmp_path)
    np.testing.assert_array_equal(found.inputs, values[:7].astype(np.float32))
    assert found.inputs.dtype == np.float32
    assert found.targets.dtype == np.int64
    assert found.targets.tolist() == targets[:7].tolist()
    assert found.test_targets.tolist() == targets[7:].tolist()
    assert sorted(np.concatenate(found.parts).tolist()) == list(range(7))
    every = sources.Packed("silos/*", test_fraction=0.0)
    found = federation(every, partitioners.Column(column="folder"), folder=tmp_path)
    assert found.names == ("east", "north")
    np.testing.assert_array_equal(found.examples(0)[0], values[7:])
    np.testing.assert_array_equal(found.examples(1)[0], values[:7])
    np.save(tmp_path / "who.npy", [7, 7, 5] + [7] * 7)  # in the order of the folders' names
    found = federation(every, partitioners.Column(column="who.npy"), folder=tmp_path)
    assert found.names == ("5", "7")
    np.testing.assert_array_equal(found.examples(0)[0], values[9:])
    pack(tmp_path / "bytes", np.full((4, 1, 2), 51, np.uint8), [0, 1, 0, 1])
    scaled = federation(sources.Packed("bytes", scale="unit", test_fraction=0.5), IID, folder=tmp_path)
    assert scaled.test_inputs.shape == (2, 1, 2)
    np.testing.assert_allclose(scaled.inputs, 0.2)


def test_mistakes_in_packed_folders(tmp_path: Path) -> None:
    pack(tmp_path / "a/one", [[1.0, np.nan, 3.0]], [1])
    pack(tmp_path / "a/two", [[1.0, 2.0]], [1])
    pack(tmp_path / "b/two", [[1.0, 2.0]], [0])
    pack(tmp_path / "b/three", [[1.0, 2.0], [np.inf, 1.0]], [0, 1])
    np.save(tmp_path / "who.npy", np.arange(5))
    by_folder, by_file = partitioners.Column(column="folder"), partitioners.Column(column="who.npy")
    for source, partition, words in (
        (sources.Packed("none"), IID, "there is no folder .*none; expected one that fedplat data pack wrote, or wild"),
        (sources.Packed("none/*"), IID, r"there is no folder .*none/\*; expected one"),
        (sources.Packed("a"), IID, "a is not a packed dataset: it has no file index.json"),
        (sources.Packed("a/one"), IID, r"one, row 1: a missing value \(NaN\) in inputs"),
        (sources.Packed("b/*"), IID, r"three, row 2: an infinite value in inputs"),
        (
            sources.Packed("a/*"),
            IID,
            r"a/two has inputs float64\[2\] and targets int64\[\], and .*one has float64\[3\]",
        ),
        (sources.Packed("a/two", test_path="a/one"), IID, "missing value"),
        (sources.Packed("*/two"), by_folder, "there are two folders named 'two'; expected different names"),
        (sources.Packed("*/two"), by_file, r"the column 'who.npy' has 5 values, but there are 2 examples"),
        (sources.Packed("b/two"), partitioners.Column(column="user"), "user cannot be read as an .npy file"),
        (sources.Packed("b/two"), None, r"the data is not partitioned: add a table \[simulation.partition\]"),
    ):
        with pytest.raises(DataError, match=words):
            federation(source, partition, folder=tmp_path)
    edit_index(tmp_path / "b/two", lambda index: index["inputs"].update(shape=[64]))
    edit_index(tmp_path / "b/two", lambda index: index["shards"][0].update(rows=2**40, size_bytes=2**50))
    with pytest.raises(DataError, match=r"b/two: 1,099,511,627,776 examples of 512 bytes do not fit into memory"):
        federation(sources.Packed("b/two"), IID, folder=tmp_path)
