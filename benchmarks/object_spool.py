"""Measure the spool with copies in an object store, beside the spool in a folder.

    python benchmarks/object_spool.py [--scale 1.0]

The store is a real S3 server, SeaweedFS, on this machine. For each size, updates are received and made durable by as
many threads as a daemon uses for the store. Then another leader, with an empty folder, finds the copies and fetches all
of them.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

import report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat_server import logs
from fedplat_server.storage.object_store import StoreHealth
from fedplat_server.storage.spool import Spool
from fedplat_server.storage.spool_backend import THREADS, ObjectBackend, open_backend
from support.seaweedfs import s3_server

SIZES: Sequence[tuple[str, int, int]] = (("4 KiB", 2**12, 2000), ("1 MiB", 2**20, 300), ("32 MiB", 2**25, 16))


def receive(spool: Spool, key: AssignmentId, data: bytes) -> None:
    """Receive an update as a report does, until it is durable."""
    digest = hashlib.sha256(data).hexdigest()
    upload = spool.open(key, digest, len(data), 0)
    upload.write(data)
    upload.finish()
    spool.complete(key, digest)
    spool.persist(key, digest)


def receive_all(spool: Spool, keys: Sequence[AssignmentId], size_bytes: int) -> float:
    """Receive an update of each client; return the durable ones per second."""
    spool.expect(keys)
    data = os.urandom(size_bytes)
    contents = [data[8:] + number.to_bytes(8, "big") for number in range(len(keys))]
    with ThreadPoolExecutor(THREADS) as threads:
        began = time.perf_counter()
        list(threads.map(receive, [spool] * len(keys), keys, contents))
        return len(keys) / (time.perf_counter() - began)


def open_store(url: str, term: int) -> ObjectBackend:
    """Return the backend of the leader of a term."""
    return open_backend(url, term, StoreHealth(url), 2**40)


def take_over(folder: Path, url: str, keys: Sequence[AssignmentId]) -> tuple[float, float]:
    """Return the seconds until a leader with another disk can answer calls, and until it has all updates."""
    backend = open_store(url, 2)
    spool = Spool(folder, backend=backend)
    began = time.perf_counter()
    spool.keep(keys)
    found_s = time.perf_counter() - began
    backend.threads.shutdown(wait=True)
    fetched_s = time.perf_counter() - began
    backend.delete(keys)
    return found_s, fetched_s


def measure(folder: Path, url: str, size_bytes: int, count: int) -> tuple[float, float, float, float]:
    """Return the reports per second in a folder and in the store, and the seconds of a take-over."""
    keys = [AssignmentId(AttemptKey(f"job-{size_bytes}", 1, 1), f"client-{number}") for number in range(count)]
    in_folder = receive_all(Spool(folder / "folder"), keys, size_bytes)
    backend = open_store(url, 1)
    in_store = receive_all(Spool(folder / "store", backend=backend), keys, size_bytes)
    backend.close()
    return in_folder, in_store, *take_over(folder / "other", url, keys)


def main(
    scale: Annotated[float, typer.Option(min=0.01, help="Factor for the numbers of updates.")] = 1.0,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure updates that are made durable in an object store, compared with a folder."""
    logs.configure("WARNING", json=False)
    rows: list[tuple[report.Cell, ...]] = []
    with s3_server() as server, tempfile.TemporaryDirectory() as folder:
        os.environ.update(server.environment)
        for name, size_bytes, number in SIZES:
            count = max(1, round(number * scale))
            rows.append((name, count, *measure(Path(folder) / name, server.url(), size_bytes, count)))
    columns = ("size", "updates", "folder, reports/s", "store, reports/s", "found, s", "fetched, s")
    title = "Updates that are durable in an object store on this machine, beside a folder"
    report.finish(report.Report(name="object_spool", title=title, columns=columns, rows=tuple(rows)), as_json, save)


if __name__ == "__main__":
    typer.run(main)
