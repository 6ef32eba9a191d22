"""Run a program of fedplat, and count its syncs, file operations, transactions, hashed bytes, threads and memory.

    python benchmarks/metered.py FILE PROGRAM [ARGUMENT ...]

PROGRAM is a command of an installed package, such as `fedplat-server`. The counts are in FILE while the program runs:
another process reads them with `read_counts`. The program is otherwise unchanged, but needs more CPU seconds. The
memory of a client that trains with `noop.py` is counted from one task to the next.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import hashlib
import io
import mmap
import os
import stat
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
from fedplat_client import commands

NAMES = (
    "syncs",
    "update syncs",
    "unlinks",
    "renames",
    "hashed",
    "read back",
    "writes",
    "empty writes",
    "database syncs",
    "peak",
    "hand-overs",
)
"""The counts: calls of fsync and fdatasync by Python, those of them for files of updates; removed and renamed files;
bytes hashed; bytes read from the files of updates, or mapped; transactions that write, those of them that changed
nothing, the syncs of the others; the most memory of Python and NumPy in bytes; and calls that were handed over to a
thread."""
_UPDATES = ("/uploads/", "/segments/", "/memfd:", "/proc/self/fd/")
"""What the path of a file of an update contains, in the folder of a server or in memory."""
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


def _is_of_update(file: Any) -> bool:
    """Return whether a file or a descriptor is a regular file of an update."""
    descriptor = file if isinstance(file, int) else file.fileno()
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    return any(part in path for part in _UPDATES) and stat.S_ISREG(os.fstat(descriptor).st_mode)


def count_calls(counts: Counts) -> None:
    """Count the calls of functions of `os`."""

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*arguments: Any, **options: Any) -> Any:
            counts.add(name)
            if name == "syncs" and _is_of_update(arguments[0]):
                counts.add("update syncs")
            return call(*arguments, **options)

        return counted

    for name, calls in _CALLS.items():
        for call in calls:
            setattr(os, call, counting(name, getattr(os, call)))


def count_hashes(counts: Counts) -> None:
    """Count the bytes of SHA-256, and of BLAKE3 if it is installed."""
    real, real_new = hashlib.sha256, hashlib.new

    class Counted:
        def __init__(self, hash: Any, data: Any = b"") -> None:
            self._hash = hash
            self.update(data)

        def update(self, data: Any) -> None:
            counts.add("hashed", memoryview(data).nbytes)
            self._hash.update(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._hash, name)

    def sha256(data: Any = b"", **_: Any) -> Any:
        return Counted(real(), data)

    def new(name: str, data: Any = b"", **options: Any) -> Any:
        return sha256(data) if name == "sha256" else real_new(name, data, **options)

    hashlib.sha256, hashlib.new = sha256, new  # pyright: ignore[reportAttributeAccessIssue]
    with contextlib.suppress(ImportError):
        import blake3

        blake3_of = blake3.blake3
        blake3.blake3 = lambda data=b"": Counted(blake3_of(), data)  # pyright: ignore[reportAttributeAccessIssue]


def count_reads(counts: Counts) -> None:
    """Count the bytes that are read from files of updates, which the server has received before."""
    real_open, real_preadv = io.open, os.preadv

    class Reader(io.FileIO):
        def _count(self, data: Any) -> Any:
            counts.add("read back", len(data or b""))
            return data

        def read(self, size: int | None = -1, /) -> Any:
            return self._count(super().read(-1 if size is None else size))

        def readall(self) -> Any:
            return self._count(super().readall())

        def readinto(self, buffer: Any, /) -> int | None:
            size = super().readinto(buffer)
            counts.add("read back", size or 0)
            return size

    def counted_open(file: Any, mode: str = "r", buffering: int = -1, *arguments: Any, **options: Any) -> Any:
        if mode != "rb" or not any(part in os.path.abspath(str(file)) for part in _UPDATES):
            return real_open(file, mode, buffering, *arguments, **options)
        reader = Reader(file)
        return reader if buffering == 0 else io.BufferedReader(reader)

    def counted_preadv(descriptor: int, *arguments: Any) -> int:
        size = real_preadv(descriptor, *arguments)
        if _is_of_update(descriptor):
            counts.add("read back", size)
        return size

    io.open = builtins.open = counted_open  # pyright: ignore[reportAttributeAccessIssue]
    os.preadv = counted_preadv  # pyright: ignore[reportAttributeAccessIssue]


def count_maps(counts: Counts) -> None:
    """Count the bytes of files of updates that are mapped, as if they were read."""

    class Map(mmap.mmap):
        def __new__(cls, descriptor: int, length: int, *arguments: Any, **options: Any) -> Map:
            if descriptor >= 0 and _is_of_update(descriptor):
                counts.add("read back", length or os.stat(descriptor).st_size)
            return super().__new__(cls, descriptor, length, *arguments, **options)

    mmap.mmap = Map  # pyright: ignore[reportAttributeAccessIssue]


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
        count_reads(counts)
        count_maps(counts)
        count_transactions(counts)
    else:
        assert commands  # its modules are there already, and no memory of a round
        tracemalloc.start()
        noop.on_task = counts.note_peak
    (entry,) = metadata.entry_points(group="console_scripts", name=program)
    sys.argv = [program, *arguments]
    sys.exit(entry.load()())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
