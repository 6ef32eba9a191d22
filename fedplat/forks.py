"""What a process keeps to itself when it forks: its signal handlers, and descriptors such as the locks of files.

A forked child, such as a worker of `multiprocessing.Pool` or of a `DataLoader`, inherits both. It would write its own
SIGTERM into the pipe of its parent, which then stops, instead of ending; and it would hold its parent's locks after the
parent has been killed. It also inherits maps of files, which it may keep: the number of forks shows that there may be
such children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Generator, Iterable
from typing import Any

_handlers: dict[object, dict[int, Any]] = {}
"""The handlers that each open block has found, by number; in the order of the blocks."""
_descriptors: dict[object, int] = {}
_num_forks = 0


def count() -> int:
    """Return how often this process, and those that it was forked from, have begun to fork.

    Programs that `subprocess` starts do not count: they share no memory.
    """
    return _num_forks


@contextlib.contextmanager
def keep_signals(numbers: Iterable[int]) -> Generator[None]:
    """Keep the handlers of these signals, and the wakeup descriptor, that the block installs out of forked children.

    A child gets the handlers from before the block, and no wakeup descriptor.
    """
    key = object()
    _handlers[key] = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        _handlers.pop(key, None)


@contextlib.contextmanager
def keep_descriptor(descriptor: int) -> Generator[int]:
    """Keep a descriptor out of children that are forked within the block, and close it at the block's end.

    The end of the block in a child closes nothing.
    """
    key, owner = object(), os.getpid()
    _descriptors[key] = descriptor
    try:
        yield descriptor
    finally:
        _descriptors.pop(key, None)
        if os.getpid() == owner:
            os.close(descriptor)


def end_child(owner: int, exc: BaseException | None = None) -> None:
    """End this process if it is not the process `owner`, but a forked child that comes back to code of its parent.

    `exc` is what brings it back; `sys.exit()` keeps its status.
    """
    if os.getpid() == owner:
        return
    status = 0 if exc is None else 1
    if isinstance(exc, SystemExit):
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    elif exc is not None:
        traceback.print_exception(exc)
    os._exit(status)


def _count() -> None:
    global _num_forks
    _num_forks += 1


def _release() -> None:
    """Give up in a child what its parent keeps to itself."""
    if _handlers:
        signal.set_wakeup_fd(-1)
    for found in reversed(_handlers.values()):  # those of the outermost block last
        for number, handler in found.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    for descriptor in _descriptors.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _handlers.clear()
    _descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count, after_in_child=_release)
