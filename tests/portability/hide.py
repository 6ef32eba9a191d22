"""Hides what other operating systems do not have, on Linux, to run the substitutes of `fedplat.system`.

As a plugin of pytest (`-p portability.hide`) it hides from `fedplat.system` alone, the one room of the product for such
calls, since servers and the libraries of tests need them. `hide_from_all` hides from everything that is imported later:
a child process then shows that no other module of the client and of the simulator needs them either. A kernel whose
names are hidden is not Windows; docs/install.md tells the two apart.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import fcntl
import importlib
import os
import signal
import socket
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

LINUX_ONLY = {
    os: ("memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate", "sched_getaffinity", "splice"),
    socket: ("SOCK_SEQPACKET",),
}
"""Hidden for macOS, besides the functions of the C library."""
POSIX_ONLY = {
    os: (
        *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "fdatasync", "fork", "getuid", "geteuid", "killpg"),
        *("mkfifo", "pread", "preadv", "pwrite", "register_at_fork", "sendfile", "setsid"),
    ),
    signal: ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2"),
    socket: ("AF_UNIX", "MSG_DONTWAIT", "SO_REUSEPORT"),
}
"""Hidden for Windows as well."""
POSIX_MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
C_FUNCTIONS = ("mallopt", "prctl", "sync_file_range")


def make_msvcrt() -> types.ModuleType:
    """Return a stand-in for Windows' module: locks of bytes that belong to a descriptor, not to a process."""
    module: Any = types.ModuleType("msvcrt")
    set_lock, kind = fcntl.fcntl, fcntl.F_OFD_SETLK  # before they are hidden

    def locking(descriptor: int, mode: int, num_bytes: int) -> None:
        start = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            set_lock(descriptor, kind, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, num_bytes, 0))
        except BlockingIOError as exc:
            raise PermissionError(errno.EACCES, "Permission denied") from exc

    module.locking, module.LK_NBLCK = locking, 2
    return module


class _Library(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name in C_FUNCTIONS:
            raise AttributeError(name)
        return super().__getattr__(name)


def hide_from_system() -> None:
    """Import `fedplat.system` as on Windows; modules that have imported it before would keep the other one."""
    assert "fedplat.system" not in sys.modules
    without: dict[str, Any] = dict.fromkeys(POSIX_MODULES)
    for module in (os, signal):
        names = {*LINUX_ONLY.get(module, ()), *POSIX_ONLY[module]}
        hidden = types.ModuleType(module.__name__)
        vars(hidden).update((name, value) for name, value in vars(module).items() if name not in names)
        without[module.__name__] = hidden
    library = types.ModuleType("ctypes")
    vars(library).update({**vars(ctypes), "CDLL": _Library})
    without |= {"ctypes": library, "msvcrt": make_msvcrt()}
    before = {name: sys.modules.get(name) for name in without}
    sys.modules.update(without)
    try:
        importlib.import_module("fedplat.system")
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def hide_from_all(system: str) -> None:
    """Hide the names of `macos` or `windows` in this process; standard modules that use them are imported before."""
    for name in (
        "asyncio",
        "concurrent.futures.process",
        "multiprocessing.util",
        "subprocess",
        "tempfile",
        "selectors",
    ):
        importlib.import_module(name)
    tables = [LINUX_ONLY, POSIX_ONLY] if system == "windows" else [LINUX_ONLY]
    msvcrt = make_msvcrt()
    for table in tables:
        for module, names in table.items():
            for name in names:
                with contextlib.suppress(AttributeError):
                    delattr(module, name)
    ctypes.CDLL = _Library  # pyright: ignore[reportAttributeAccessIssue]
    if system != "windows":
        return
    sys.modules["msvcrt"] = msvcrt
    _hide_modules()
    _forbid_what_windows_refuses()


def _hide_modules() -> None:
    """Refuse the import of modules that only POSIX has, by modules of the product."""
    import_module = builtins.__import__

    def refuse(name: str, globals: Any = None, *arguments: Any, **options: Any) -> Any:
        importer = str((globals or {}).get("__name__", ""))
        if name in POSIX_MODULES and importer.partition(".")[0] in ("fedplat", "fedplat_client"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_module(name, globals, *arguments, **options)

    builtins.__import__ = refuse


def _forbid_what_windows_refuses() -> None:
    """Refuse to open folders, and to delete or replace files that this process has mapped."""

    def is_mapped(path: Any) -> bool:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            return any(line.rstrip("\n").endswith(f" {os.path.realpath(path)}") for line in file)

    def guard(function: Callable[..., Any], refused: Callable[[Any], bool], position: int = 0) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            path = arguments[position]
            if "dir_fd" not in options and refused(path):
                raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
            return function(*arguments, **options)

        return call

    os.open = guard(os.open, os.path.isdir)
    os.unlink = guard(os.unlink, is_mapped)
    os.replace = guard(os.replace, is_mapped, 1)
    os.remove = os.unlink


if "pytest" in sys.modules:  # imported by `-p`
    hide_from_system()
