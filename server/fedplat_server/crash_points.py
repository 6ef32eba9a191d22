"""Named crash points: places before and after every durable step, where tests end the process as a power cut would.

`FEDPLAT_CRASH_AT=<point>` ends this process with SIGKILL when it comes to the point for the first time,
`FEDPLAT_CRASH_AT=<point>:<n>` when it does so for the n-th time. Without the variable a point costs one comparison.
The crash matrix of the tests finds the points in the source text, so a name must be a literal.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Generator

VARIABLE = "FEDPLAT_CRASH_AT"


class _Trap:
    """Counts how often one point is reached."""

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
    """Sets this process up to end at a point, as the variable does: `<point>` or `<point>:<n>`."""
    global _trap
    _trap = _Trap(setting)


if os.environ.get(VARIABLE):
    arm(os.environ[VARIABLE])


def point(name: str) -> None:
    """Ends the process here, if that is what the environment asks for."""
    if _trap is not None:
        _trap.reach(name)


@contextlib.contextmanager
def step(name: str) -> Generator[None]:
    """A durable step, with the points `<name>.before` and `<name>.after` around it."""
    point(f"{name}.before")
    yield
    point(f"{name}.after")
