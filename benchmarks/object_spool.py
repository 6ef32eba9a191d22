"""Measure the spool with copies in an object store beside the spool in a folder.

    AWS_ENDPOINT_URL=... python benchmarks/object_spool.py s3://bucket/prefix [--folder DIR]

For each size, updates are received, made durable and deleted by as many threads as a daemon uses for the store. Then
another leader, with an empty folder, finds the copies and fetches all of them. Without a URL only the folder is
measured.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat_server import logs
from fedplat_server.storage.spool import Spool
from fedplat_server.storage.spool_backend import THREADS, ObjectBackend, open_backend
from fedplat_server.storage.store_health import StoreHealth

SIZES: Sequence[tuple[str, int, int]] = (("4 KiB", 2**12, 2000), ("1 MiB", 2**20, 300), ("32 MiB", 2**25, 16))


def receive(spool: Spool, key: AssignmentId, data: bytes) -> float:
    """Receive an update as a report does; return the seconds until it is durable."""
    began, digest = time.perf_counter(), hashlib.sha256(data).hexdigest()
    upload = spool.open(key, digest, len(data), 0)
    upload.write(data)
    upload.finish()
    spool.complete(key, digest)
    spool.persist(key, digest)
    return time.perf_counter() - began


def measure(name: str, spool: Spool, keys: Sequence[AssignmentId], size: int) -> None:
    """Print how many reports per second are durable, and how long one takes."""
    spool.expect(keys)
    data = os.urandom(size)
    contents = [data[8:] + number.to_bytes(8, "big") for number in range(len(keys))]
    with ThreadPoolExecutor(THREADS) as threads:
        began = time.perf_counter()
        seconds = sorted(threads.map(receive, [spool] * len(keys), keys, contents))
        took = time.perf_counter() - began
    print(
        f"{name:28} {len(keys) / took:8.0f} reports/s {len(keys) * size / took / 2**20:8.1f} MiB/s   "
        f"median {1000 * seconds[len(seconds) // 2]:7.1f} ms, 99 % {1000 * seconds[len(seconds) * 99 // 100]:7.1f} ms"
    )


def open_store(url: str, term: int) -> ObjectBackend:
    """Return the backend of the leader of a term."""
    return open_backend(url, term, StoreHealth(url), 2**40)


def take_over(folder: Path, url: str, keys: Sequence[AssignmentId], size: int) -> None:
    """Print how long a leader with another disk needs until it can answer calls, and until it has all updates."""
    backend = open_store(url, 2)
    spool = Spool(folder, backend=backend)
    began = time.perf_counter()
    spool.keep(keys)
    found = time.perf_counter() - began
    backend.threads.shutdown(wait=True)
    took = time.perf_counter() - began
    print(
        f"  another host: found in {found:.2f} s, fetched in {took:.2f} s ({len(keys) * size / took / 2**20:.1f} MiB/s)"
    )
    began = time.perf_counter()
    backend.delete(keys)
    print(f"  deleted in {time.perf_counter() - began:.2f} s")


def main() -> None:
    """Measure each size in the folder and, with a URL, in the store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", nargs="?", help="object store for the copies, such as s3://bucket/prefix")
    parser.add_argument("--folder", type=Path, help="folder for the spools; default: a temporary one")
    options = parser.parse_args()
    logs.configure("WARNING", json=False)
    folder = Path(tempfile.mkdtemp(prefix="fedplat-spool-", dir=options.folder))
    try:
        for name, size, count in SIZES:
            keys = [AssignmentId(AttemptKey(f"job-{size}", 1, 1), f"client-{number}") for number in range(count)]
            measure(f"{name}, folder", Spool(folder / f"folder-{size}"), keys, size)
            if options.url:
                url = f"{options.url}/{secrets.token_hex(4)}"
                backend = open_store(url, 1)
                measure(f"{name}, object store", Spool(folder / f"store-{size}", backend=backend), keys, size)
                backend.close()
                take_over(folder / f"other-{size}", url, keys, size)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
