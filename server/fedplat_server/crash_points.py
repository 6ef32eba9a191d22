"""Named crash points before and after every durable step, where tests kill the process as a power cut would.

`FEDPLAT_CRASH_AT=<point>` kills this process with SIGKILL when it first reaches the point,
`FEDPLAT_CRASH_AT=<point>:<n>` when it does so for the n-th time. Without the variable a point costs one comparison.
The crash tests find the points in the source text, so a name must be a literal.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Generator

VARIABLE = "FEDPLAT_CRASH_AT"


class _Trap:
    """The armed crash point, with a count of the passes that are left until it kills the process."""

    def __init__(self, setting: str) -> None:
        self.name, _, count = setting.partition(":")
        self.left = int(count or 1)

    def reach(self, name: str) -> None:
        if name == self.name:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


_trap: _Trap | None = None


def arm(setting: str) -> None:
    """Set the crash point of this process, in the format of the variable: `<point>` or `<point>:<n>`."""
    global _trap
    _trap = _Trap(setting)


if os.environ.get(VARIABLE):
    arm(os.environ[VARIABLE])


def point(name: str) -> None:
    """Kill the process here, if this is the armed point."""
    if _trap is not None:
        _trap.reach(name)


@contextlib.contextmanager
def step(name: str) -> Generator[None]:
    """Surround a durable step with the points `<name>.before` and `<name>.after`."""
    point(f"{name}.before")
    yield
    point(f"{name}.after")
