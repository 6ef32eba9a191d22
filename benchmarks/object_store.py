"""Measure models in an object store: the server's blobs, in turns with bare calls of its library.

    python benchmarks/object_store.py [--model-bytes 67108864] [--repeat 15]

The store is a real S3 server, SeaweedFS, on this machine. A put through the server's blobs also writes and hashes the
local copy; a get writes a local copy, and hashes it before it is used. A bare call moves the same bytes from and to
memory, a bare call with a file from and to a file.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import obstore
import typer

import report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fedplat_server.storage.blob_stores import BlobPlace
from support.seaweedfs import SeaweedFS, s3_server

PART_BYTES = 1 << 20


@dataclasses.dataclass
class Host:
    """A host with the server's blobs, and the library alone. Each put has new content."""

    folder: Path
    url: str
    model: bytearray

    def __post_init__(self) -> None:
        self.bare = obstore.store.from_url(f"{self.url}/bare", client_options={"allow_http": True})
        self.blobs = BlobPlace(self.folder, f"{self.url}/blobs").open()
        self._count = 0
        self._digest = ""

    def next_model(self) -> bytes:
        """Return a model that was not stored yet."""
        self._count += 1
        self.model[:8] = self._count.to_bytes(8, "little")
        return bytes(self.model)

    def put_blob(self, model: bytes) -> float:
        """Store a model; return the seconds."""
        parts = [memoryview(model)[start : start + PART_BYTES] for start in range(0, len(model), PART_BYTES)]
        began = time.perf_counter()
        self._digest = self.blobs.put_chunks(parts).digest
        return time.perf_counter() - began

    def get_blob(self) -> float:
        """Read the last model as a host does that has no copy of it; return the seconds."""
        blobs = BlobPlace(self.folder / f"host-{self._count}", f"{self.url}/blobs").open()
        began = time.perf_counter()
        path = blobs.fetch(self._digest)
        took_s = time.perf_counter() - began
        path.unlink()
        self.blobs.path(self._digest).unlink()
        return took_s

    def put_bare(self, model: bytes) -> float:
        """Store a model from memory; return the seconds."""
        return _time(lambda: self.bare.put("model", model))

    def get_bare(self) -> float:
        """Read it into memory; return the seconds."""
        return _time(lambda: self.bare.get("model").bytes())

    def put_bare_file(self, model: bytes) -> float:
        """Store a model from a file; return the seconds, with those of writing the file."""
        path = self.folder / "model"

        def put() -> None:
            path.write_bytes(model)
            self.bare.put("model", path)

        return _time(put)

    def get_bare_file(self) -> float:
        """Read it into a file; return the seconds."""

        def get() -> None:
            with (self.folder / "received").open("wb") as file:
                for part in self.bare.get("model"):
                    file.write(part)

        return _time(get)


def _time(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(server: SeaweedFS, size_bytes: int, repeat: int) -> list[tuple[report.Cell, ...]]:
    """Return a row for each operation and side, measured in turns after one round that does not count."""
    os.environ.update(server.environment)
    runs: list[Sequence[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        host = Host(Path(folder), server.url(), bytearray(os.urandom(size_bytes)))
        for _ in range(repeat + 1):
            model = host.next_model()
            bare = host.put_bare(model), host.get_bare()
            blob = host.put_blob(model), host.get_blob()
            file = host.put_bare_file(model), host.get_bare_file()
            runs.append((*blob, *bare, *file))
    put, get, bare_put, bare_get, file_put, file_get = map(statistics.median, zip(*runs[1:], strict=True))
    rows: list[tuple[report.Cell, ...]] = []
    for what, limit_s, sides in (
        ("put", bare_put, (("fedplat", put), ("obstore", bare_put), ("obstore, file", file_put))),
        ("get", bare_get, (("fedplat", get), ("obstore", bare_get), ("obstore, file", file_get))),
    ):
        rows += [(what, name, 1e3 * took_s, size_bytes / took_s / 1e9, took_s / limit_s) for name, took_s in sides]
    return rows


def main(
    model_bytes: Annotated[int, typer.Option(min=1, help="Size of the model.")] = 64 << 20,
    repeat: Annotated[int, typer.Option(min=1, help="Number of measurements; the median is shown.")] = 15,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure puts and gets of a model in an object store, compared with those of the bare library."""
    with s3_server() as server:
        rows = measure(server, model_bytes, repeat)
    columns = ("what", "by", "ms", "GB/s", "x obstore")
    title = f"A model of {model_bytes / 2**20:g} MiB in an object store on this machine"
    report.finish(report.Report(name="object_store", title=title, columns=columns, rows=tuple(rows)), as_json, save)


if __name__ == "__main__":
    typer.run(main)
