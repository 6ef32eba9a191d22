"""Packed examples are those that were packed, in any order of reading."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc

from fedplat.errors import DataError
from fedplat.packed import PackedReader, PackedWriter, reader
from support.packed import examples, write_packed


def test_random_access_over_shards(packed: Path, rng: np.random.Generator) -> None:
    inputs, targets = examples(300)
    data = PackedReader(packed)
    assert [shard.rows for shard in data.index.shards] == [100, 100, 100]
    assert len(data) == 300
    for indices in (rng.integers(-300, 300, 64), np.array([299, 0, 100, 100]), np.arange(300), np.array([], int)):
        found = data.read(indices)
        np.testing.assert_array_equal(found[0], inputs[indices])
        np.testing.assert_array_equal(found[1], targets[indices])
        assert found[0].dtype == np.float32
        assert found[0].flags.writeable


@pytest.mark.parametrize("index", [300, -301])
def test_an_index_outside(packed: Path, index: int) -> None:
    with pytest.raises(IndexError, match="not all in a dataset of 300"):
        PackedReader(packed).read([0, index])


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint16", "uint32", "uint64"])
def test_types_of_numbers(tmp_path: Path, rng: np.random.Generator, dtype: str) -> None:
    inputs, targets = rng.integers(0, 100, (7, 2)).astype(dtype), rng.normal(size=(7, 1, 5))
    with PackedWriter(tmp_path / "data", 200) as writer:
        for part in (slice(0, 1), slice(1, 6), slice(6, 7)):
            writer.add(inputs[part], targets[part])
    data = PackedReader(tmp_path / "data")
    for found, expected in zip(data.read(np.arange(7)), (inputs, targets), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_only_the_shards_in_use_are_mapped(packed: Path) -> None:
    data = PackedReader(packed)
    data.read([150])
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert [line.rsplit("/", 1)[1] for line in lines if str(packed) in line] == ["shard-00001.arrow"]
    before = pa.total_allocated_bytes()
    data.read([0, 299])
    assert pa.total_allocated_bytes() == before


def test_few_shards_stay_mapped(packed: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_MAPPED", 2)
    data = PackedReader(packed)
    for _ in range(5):
        indices = rng.permutation(300)
        np.testing.assert_array_equal(data.read(indices)[0], examples(300)[0][indices])
    assert sum(str(packed) in line for line in Path("/proc/self/maps").read_text().splitlines()) == 2


def test_other_programs_read_the_shards(packed: Path) -> None:
    table = ipc.open_file(str(packed / "shard-00002.arrow")).read_all()
    np.testing.assert_array_equal(table.column("inputs").chunk(0).to_numpy_ndarray(), examples(300)[0][200:])
    np.testing.assert_array_equal(table.column("targets").to_numpy(), examples(300)[1][200:])


def test_a_pickled_reader_has_no_data(packed: Path, tmp_path: Path) -> None:
    text = pickle.dumps(PackedReader(packed))
    assert len(text) < 500
    np.testing.assert_array_equal(pickle.loads(text).read([250])[0][0], examples(300)[0][250])
    packed.rename(tmp_path / "old")
    write_packed(packed, 300, rows=100)
    with pytest.raises(DataError, match="another dataset than before"):
        pickle.loads(text)


def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent(packed: Path) -> None:
    """Else a worker that is forked while a batch is read ahead would never read."""
    data = PackedReader(packed)
    data.read([0])
    mapped: Any = data._mapped  # pyright: ignore[reportPrivateUsage]
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with mapped._lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    receiver, sender = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=lambda: os.write(sender, data.read([123])[0].tobytes())
    )
    process.start()
    process.join(60)
    release.set()
    thread.join()
    assert process.exitcode == 0
    assert os.read(receiver, 1000) == examples(300)[0][123].tobytes()
    os.close(receiver)
    os.close(sender)
