"""What operating systems do not have in common, with a portable substitute for each: cores, locks, files, processes.

The other modules of the core and of the client do not use these parts of `os`, `fcntl`, `ctypes` and `socket`, which
`make check` verifies. Each function looks for what it needs when it is called. The server runs on Linux alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

fcntl: Any
msvcrt: Any
try:
    import fcntl
except ModuleNotFoundError:  # on Windows
    import msvcrt

    fcntl = None

O_BINARY: int = getattr(os, "O_BINARY", 0)
"""For each file that is opened by `os.open`: without it, Windows replaces line ends."""
O_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
O_NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)
SIGKILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)
"""Ends a process at once; on Windows each signal does."""
_O_DIRECTORY: int = getattr(os, "O_DIRECTORY", 0)
"""0 on Windows, where folders cannot be opened."""
_LOCK_NAME = ".lock"
_LOCK_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_seeking = threading.Lock()


def num_cores() -> int:
    """Return the number of cores that this process may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    count: Callable[[], int | None] = getattr(os, "process_cpu_count", os.cpu_count)  # from Python 3.13
    return count() or 1


def user_id() -> int:
    """Return the number of this process's user in `os.stat` results: 0 for all users of Windows."""
    return os.getuid() if hasattr(os, "getuid") else 0


def signal_group(process: subprocess.Popen[Any], number: int) -> None:
    """Send a signal to a process that was started with a session of its own, and to its group; on Windows to it alone.

    Raises `ProcessLookupError`.
    """
    if hasattr(os, "killpg"):
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)


def has_forked_workers() -> bool:
    """Return whether worker processes can share memory and sockets with this one, as those of Linux do."""
    return hasattr(os, "fork") and hasattr(os, "memfd_create")


def find_c_function(name: str) -> Callable[..., Any] | None:
    """Return a function of the C library, or None if it does not have that."""
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # on Windows a library has a name
        return None


def kill_with_parent() -> bool:
    """Make the kernel kill this process when its parent ends, whatever the cause; return False if it cannot."""
    prctl = find_c_function("prctl")
    if prctl is None:
        return False
    parent = os.getppid()
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    return True


def lock(descriptor: int, *, wait: bool = True) -> None:
    """Lock an open file until its descriptor is closed, also against other descriptors of this process.

    Raises `BlockingIOError` if it is locked and `wait` is False, `OSError` on a file system without locks.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return
    while not _lock_byte(descriptor):
        if not wait:
            raise BlockingIOError(errno.EWOULDBLOCK, "another process has locked the file")
        time.sleep(_LOCK_POLL_S)


def _lock_byte(descriptor: int) -> bool:
    """Lock the first byte of a file, as Windows does; return False if another descriptor has locked it."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # LK_LOCK waits, but for ten seconds only
    except PermissionError:
        return False
    return True


def open_folder_to_lock(folder: Path, flags: int = 0) -> int:
    """Return a descriptor that stands for a folder in `lock`: of itself, or on Windows of a file in it.

    Raises `OSError`, also if the path is no folder.
    """
    if _O_DIRECTORY:
        return os.open(folder, os.O_RDONLY | _O_DIRECTORY | flags)
    return os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | O_BINARY, 0o600)


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to disk; not the latter on Windows. Raises `OSError`."""
    if _O_DIRECTORY:
        descriptor = os.open(path, os.O_RDONLY)
    elif path.is_dir():
        return
    else:
        descriptor = os.open(path, os.O_RDWR | O_BINARY)  # Windows flushes only what may be written
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_nonblocking(pipe: int) -> None:
    """Make writes to a full pipe fail with `BlockingIOError`; on Windows before Python 3.12 they wait."""
    if hasattr(os, "set_blocking"):
        os.set_blocking(pipe, False)


def pread_into(descriptor: int, buffer: memoryview, position: int) -> int:
    """Read bytes at a position into a buffer; return their number, which is 0 only at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], position)
    content = pread(descriptor, len(buffer), position)
    buffer[: len(content)] = content
    return len(content)


def pread(descriptor: int, size: int, position: int) -> bytes:
    """Return at most `size` bytes at a position of a file."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, position)
    with _at(descriptor, position):
        return os.read(descriptor, size)


def pwrite(descriptor: int, data: bytes | memoryview, position: int) -> int:
    """Write bytes at a position of a file; return the number of those that were written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, position)
    with _at(descriptor, position):
        return os.write(descriptor, data)


@contextlib.contextmanager
def _at(descriptor: int, position: int) -> Generator[None]:
    """Move a file to a position within the block; only one thread at a time does."""
    with _seeking:
        before = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, position, os.SEEK_SET)
        try:
            yield
        finally:
            os.lseek(descriptor, before, os.SEEK_SET)


def delete(path: Path) -> bool:
    """Delete a file, also one in use; return False where Windows allows that only later. Raises `OSError`."""
    try:
        path.unlink()
    except PermissionError:
        if _O_DIRECTORY:
            raise
        return False
    return True
