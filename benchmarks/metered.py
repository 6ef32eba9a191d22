"""Run a program of fedplat, and count its syncs, file operations, transactions, hashed bytes, threads and memory.

    python benchmarks/metered.py FILE PROGRAM [ARGUMENT ...]

PROGRAM is a command of an installed package, such as `fedplat-server`. The counts are in FILE while the program runs:
another process reads them with `read_counts`. The program is otherwise unchanged, but needs more CPU seconds. The
memory of a client that trains with `noop.py` is counted from one task to the next.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import struct
import sys
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import noop

NAMES = ("syncs", "unlinks", "renames", "hashed", "writes", "empty writes", "database syncs", "peak", "hand-overs")
"""The counts: calls of fsync and fdatasync by Python; removed and renamed files; bytes of SHA-256; transactions that
write, those of them that changed nothing, the syncs of the others; the most memory of Python and NumPy in bytes; and
calls that were handed over to a thread."""
_CALLS = {"syncs": ("fsync", "fdatasync"), "unlinks": ("unlink", "remove"), "renames": ("rename", "replace")}
_RECORD = struct.Struct(f"<{len(NAMES)}q")


class Counts:
    """Counts in a file that other processes may read at any time."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_RECORD.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        self._values: dict[str, int] = dict.fromkeys(NAMES, 0)
        self._lock = threading.Lock()

    def add(self, name: str, number: int = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._values[name] += number
            self._map[:] = _RECORD.pack(*self._values.values())

    def note_peak(self) -> None:
        """Raise `peak` to the most memory since the last call, if it was traced."""
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        self.add("peak", max(0, peak - self._values["peak"]))


def read_counts(path: Path) -> dict[str, int]:
    """Read the counts of a program that runs, or has ended."""
    return dict(zip(NAMES, _RECORD.unpack(path.read_bytes()), strict=True))


def count_calls(counts: Counts) -> None:
    """Count the calls of functions of `os`."""

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*arguments: Any, **options: Any) -> Any:
            counts.add(name)
            return call(*arguments, **options)

        return counted

    for name, calls in _CALLS.items():
        for call in calls:
            setattr(os, call, counting(name, getattr(os, call)))


def count_hashes(counts: Counts) -> None:
    """Count the bytes of SHA-256."""
    real = hashlib.sha256

    class Sha256:
        def __init__(self, data: Any = b"", **_: Any) -> None:
            self._hash = real()
            self.update(data)

        def update(self, data: Any) -> None:
            counts.add("hashed", memoryview(data).nbytes)
            self._hash.update(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._hash, name)

    def new(name: str, data: Any = b"", **options: Any) -> Any:
        return Sha256(data) if name == "sha256" else real_new(name, data, **options)

    real_new = hashlib.new
    hashlib.sha256, hashlib.new = Sha256, new  # pyright: ignore[reportAttributeAccessIssue]


def count_hand_overs(counts: Counts) -> None:
    """Count the calls that pools of threads get."""
    real = ThreadPoolExecutor.submit

    def submit(self: ThreadPoolExecutor, function: Any, /, *arguments: Any, **options: Any) -> Any:
        counts.add("hand-overs")
        return real(self, function, *arguments, **options)

    ThreadPoolExecutor.submit = submit  # pyright: ignore[reportAttributeAccessIssue]


def count_transactions(counts: Counts) -> None:
    """Count the transactions of SQLAlchemy that write to SQLite, with `synchronous = FULL` one sync each.

    The syncs of a checkpoint of the write-ahead log, which takes place every 1,000 pages, are not counted.
    """
    from sqlalchemy import Connection, Engine, event

    from fedplat_server.database.engine import WRITES

    before: dict[int, int] = {}

    def changes(connection: Connection) -> int:
        driver = connection.connection.dbapi_connection
        return getattr(driver, "driver_connection", driver).total_changes  # pyright: ignore

    def on_begin(connection: Connection) -> None:
        if connection.get_execution_options().get(WRITES):
            before[id(connection)] = changes(connection)

    def on_commit(connection: Connection) -> None:
        begun = before.pop(id(connection), None)
        if begun is not None:
            counts.add("writes")
            counts.add("database syncs" if changes(connection) > begun else "empty writes")

    event.listen(Engine, "begin", on_begin)
    event.listen(Engine, "commit", on_commit)


def main(path: Path, program: str, *arguments: str) -> None:
    """Run a program with counters."""
    counts = Counts(path)
    count_calls(counts)
    count_hashes(counts)
    count_hand_overs(counts)
    if program == "fedplat-server":
        count_transactions(counts)
    else:
        tracemalloc.start()
        noop.on_task = counts.note_peak
    (entry,) = metadata.entry_points(group="console_scripts", name=program)
    sys.argv = [program, *arguments]
    sys.exit(entry.load()())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
