"""Missing, damaged and hostile files: an error names the file."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc

from fedplat.errors import DataError
from fedplat.packed import PackedReader
from support.packed import edit_index, examples, write_packed

SHARD = "shard-00001.arrow"


def test_a_missing_shard(packed: Path) -> None:
    data = PackedReader(packed)
    (packed / SHARD).unlink()
    data.read([0])
    with pytest.raises(DataError, match=f"{packed / SHARD} is missing; expected every file that the index names"):
        data.read([0, 150])


def test_a_truncated_shard(packed: Path) -> None:
    content = (packed / SHARD).read_bytes()
    (packed / SHARD).write_bytes(content[:-100])
    with pytest.raises(DataError, match=rf"{SHARD} has [\d,]+ bytes; expected [\d,]+, as in the index: .* truncated"):
        PackedReader(packed).read([150])


READ_EDITED = """
import contextlib, json, sys
from pathlib import Path
from fedplat.errors import DataError
from fedplat.packed import PackedReader

shard = Path(sys.argv[1])
original = shard.read_bytes()
for edits in json.load(sys.stdin):
    content = bytearray(original)
    for place, value in edits:
        content[place] = value
    shard.write_bytes(content)
    print(edits, flush=True)
    with contextlib.suppress(DataError):
        PackedReader(shard.parent).read([0])
"""


def test_edited_messages_end_no_process(packed: Path) -> None:
    """A message of an unknown type would make pyarrow crash, and so would others, perhaps: these are from a seed."""
    edits = [[(28, 0), (349, 1)]]
    drawn = random.Random(34)
    edits += [[(drawn.randrange(8, 512), drawn.randrange(256)) for _ in range(2)] for _ in range(200)]
    command = [sys.executable, "-c", READ_EDITED, str(packed / "shard-00000.arrow")]
    done = subprocess.run(command, input=json.dumps(edits), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-100:] + done.stderr[-2000:]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):  # such a path must be short
        listener.bind(path.name)


SPECIAL_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder": (Path.mkdir, "is not a regular file; expected a file of a packed dataset"),
    "FIFO": (os.mkfifo, "is not a regular file; expected a file of a packed dataset"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is not a regular file; expected a file of a packed dataset"),
    "socket": (make_socket, "cannot be read"),
}


@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_special_files_are_refused_and_not_waited_for(packed: Path, kind: str) -> None:
    make, message = SPECIAL_FILES[kind]
    data = PackedReader(packed)
    (packed / SHARD).unlink()
    make(packed / SHARD)
    for read in (lambda: data.read([150]), data.verify):
        with pytest.raises(DataError, match=f"{packed / SHARD} {message}"):
            read()
    (packed / "index.json").unlink()
    make(packed / "index.json")
    with pytest.raises(DataError, match=f"{packed / 'index.json'} {message}"):
        PackedReader(packed)


def test_a_changed_number_is_found_by_its_digest(packed: Path) -> None:
    content = bytearray((packed / SHARD).read_bytes())
    content[len(content) // 2] ^= 1
    (packed / SHARD).write_bytes(content)
    data = PackedReader(packed)
    data.read([150])
    with pytest.raises(DataError, match=f"{packed / SHARD} is damaged: its SHA-256 is not that of the index"):
        data.verify()


def test_a_shard_of_another_dataset(packed: Path, tmp_path: Path) -> None:
    other = write_packed(tmp_path / "other", 300, rows=100, seed=1)
    shutil.copy(other / SHARD, packed / SHARD)
    with pytest.raises(DataError, match=f"{packed / SHARD} is not a shard of this dataset: it is shard 1 of "):
        PackedReader(packed).read([150])


def test_swapped_shards(packed: Path) -> None:
    (packed / SHARD).rename(packed / "old")
    shutil.copy(packed / "shard-00000.arrow", packed / SHARD)
    with pytest.raises(DataError, match=f"{SHARD} is not a shard of this dataset: it is shard 0 of "):
        PackedReader(packed).read([150])


def test_not_a_packed_dataset(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{tmp_path} is not a packed dataset: it has no file index.json"):
        PackedReader(tmp_path)


Edit: TypeAlias = Callable[[dict[str, Any]], object]


def shard(**changes: Any) -> Edit:
    return lambda index: index["shards"][1].update(changes)


EDITS: list[tuple[Edit, str]] = [
    (shard(file="../../secret.arrow"), "matching regex"),
    (shard(file="/etc/passwd"), "matching regex"),
    (shard(file="shard-00000.arrow"), "names a shard twice"),
    (shard(rows=10**9), "has 1,000,000,000 examples of 56 bytes in"),
    (shard(rows=0), "shards"),
    (shard(rows=-5), "shards"),
    (shard(sha256="x"), "sha256"),
    (shard(note="?"), "unknown field"),
    (lambda index: index.update(version=2), "version"),
    (lambda index: index.update(format="other"), "format"),
    (lambda index: index.update(dataset="x"), "dataset"),
    (lambda index: index.update(shards=[]), "shards"),
    (lambda index: index["inputs"].update(dtype="object"), "dtype"),
    (lambda index: index["inputs"].update(shape=[0]), "shape"),
    (lambda index: index["inputs"].update(shape=[2**30, 2**30]), "expected at most 1,073,741,824 bytes"),
    (lambda index: index["inputs"].update(shape=[1] * 17), "shape"),
    (lambda index: index.pop("targets"), "targets"),
]


@pytest.mark.parametrize(("edit", "message"), EDITS)
def test_a_hostile_index(packed: Path, edit: Edit, message: str) -> None:
    edit_index(packed, edit)
    with pytest.raises(DataError, match=message) as found:
        PackedReader(packed)
    assert str(packed / "index.json") in str(found.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null"])
def test_an_index_that_is_no_json(packed: Path, text: bytes) -> None:
    (packed / "index.json").write_bytes(text)
    with pytest.raises(DataError, match=r"index\.json is not the index of a packed dataset: .*; pack the data again"):
        PackedReader(packed)


INPUTS, TARGETS = examples(100)
TENSOR = pa.fixed_shape_tensor(pa.float32(), (3, 4))


def tensors(values: Any, rows: int = 100) -> Any:
    return pa.ExtensionArray.from_storage(TENSOR, pa.FixedSizeListArray.from_arrays(values, 12))


def nested_missing() -> Any:
    flat = INPUTS.reshape(-1).tolist()
    return tensors(pa.array([None, *flat[1:]], pa.float32()))


def columns(inputs: Any = None, targets: Any = None) -> dict[str, Any]:
    return {
        "inputs": tensors(pa.array(INPUTS.reshape(-1))) if inputs is None else inputs,
        "targets": pa.array(TARGETS) if targets is None else targets,
    }


@pytest.mark.parametrize(
    ("arrays", "options", "batches", "message"),
    [
        (columns(), {}, 1, ""),
        (
            columns(targets=pa.array(TARGETS.astype(np.int32))),
            {},
            1,
            "has the columns inputs: .*; expected inputs",
        ),
        (columns(inputs=pa.array(["x" * 48] * 100)), {}, 1, "has the columns inputs: string"),
        ({"targets": columns()["targets"], "inputs": columns()["inputs"]}, {}, 1, "has the columns targets: int64"),
        ({**columns(), "more": pa.array(TARGETS)}, {}, 1, "has the columns"),
        (columns(targets=pa.array([None, *TARGETS[1:].tolist()])), {}, 1, "has 1 missing values; expected none"),
        (columns(inputs=nested_missing()), {}, 1, "has 1 missing values; expected none"),
        (columns(), {"compression": "zstd"}, 1, "is compressed, .*; expected a shard as fedplat data pack writes it"),
        (columns(), {"metadata_version": ipc.MetadataVersion.V4}, 1, "is compressed, or of an old version of Arrow"),
        (columns(), {}, 2, "has more than one record batch; expected a schema and one record batch"),
    ],
)
def test_a_hostile_shard(
    packed: Path, arrays: dict[str, Any], options: dict[str, Any], batches: int, message: str
) -> None:
    """Of the right size and with the right names, but with other contents."""
    metadata = ipc.open_file(str(packed / SHARD)).schema.metadata
    fields = [pa.field(name, array.type, nullable=False) for name, array in arrays.items()]
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), schema=pa.schema(fields, metadata=metadata))
    with ipc.new_file(str(packed / SHARD), batch.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        for part in range(batches):
            writer.write_batch(batch.slice(part * 100 // batches, 100 // batches))
    edit_index(packed, shard(size_bytes=(packed / SHARD).stat().st_size))
    if not message:
        np.testing.assert_array_equal(PackedReader(packed).read([105])[0][0], INPUTS[5])
        return
    with pytest.raises(DataError, match=message) as found:
        PackedReader(packed).read([150])
    assert str(packed / SHARD) in str(found.value)


READ_HOSTILE = """
import sys
import pyarrow as pa
from fedplat.errors import DataError
from fedplat.packed import PackedReader

try:
    PackedReader(sys.argv[1]).read([100])
except DataError as exc:
    print(pa.default_memory_pool().max_memory(), exc)
"""


@pytest.mark.parametrize("honest_first", [False, True])
def test_a_compressed_shard_takes_no_memory(packed: Path, honest_first: bool) -> None:
    """58 MB of zeros in a few kB, of which the index promises one example; also as a second record batch."""
    rows = 2**20
    zeros = [tensors(pa.array(np.zeros(12 * rows, np.float32))), pa.array(np.zeros(rows, np.int64))]
    honest = ipc.open_file((packed / SHARD).read_bytes())
    with ipc.new_file(str(packed / SHARD), honest.schema, options=ipc.IpcWriteOptions(compression="zstd")) as writer:
        if honest_first:
            writer.write_batch(honest.get_batch(0))
        writer.write_batch(pa.RecordBatch.from_arrays(zeros, schema=honest.schema))
    size = (packed / SHARD).stat().st_size
    assert size < 100_000
    edit_index(packed, shard(size_bytes=size, rows=1))
    # Another process: Arrow only knows the most memory that a process ever had.
    child = subprocess.run([sys.executable, "-c", READ_HOSTILE, packed], capture_output=True, text=True, check=True)
    most, _, error = child.stdout.partition(" ")
    assert str(packed / SHARD) in error
    assert int(most) < 1_000_000


def test_more_rows_than_the_index_says(packed: Path) -> None:
    edit_index(packed, shard(rows=90))
    with pytest.raises(DataError, match=f"{SHARD} has 100 examples; expected 90, as in the index"):
        PackedReader(packed).read([120])


def test_any_damage_is_an_error_or_wrong_numbers_and_never_a_crash(packed: Path, rng: np.random.Generator) -> None:
    original = (packed / SHARD).read_bytes()
    errors = list[str]()
    for _ in range(300):
        content = bytearray(original)
        start = int(rng.choice([rng.integers(0, 1200), len(content) - rng.integers(1, 900)]))
        content[start : start + 4] = rng.bytes(len(content[start : start + 4]))
        (packed / SHARD).write_bytes(content)
        try:
            inputs, targets = PackedReader(packed).read(np.arange(100, 200))
            assert inputs.shape == (100, 3, 4)
            assert targets.shape == (100,)
        except DataError as exc:
            errors.append(str(exc))
    assert len(errors) > 50
    assert all(str(packed / SHARD) in error for error in errors)
