"""Commands on a real terminal: a pseudo-terminal of a given size."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
PATIENCE_S = 60.0


class Terminal:
    """A process on a pseudo-terminal; `text` is all that it wrote so far."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        columns: int = 80,
        rows: int = 24,
    ) -> None:
        self.text = ""
        self._descriptor, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        plain = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**plain, "TERM": "xterm-256color", **(environment or {})},
            start_new_session=True,
            close_fds=True,
        )
        os.close(slave)

    def read_until(self, found: Callable[[str], bool]) -> str:
        """Read until the text fulfils a condition, and return it. Raises `AssertionError` at the end of the process."""
        while not found(self.text):
            if not (data := self._read()):
                raise AssertionError(f"the process ended before that; it wrote {self.text!r}")
            self.text += data
        return self.text

    def write(self, text: str) -> None:
        """Type a text."""
        os.write(self._descriptor, text.encode())

    def interrupt(self) -> None:
        """Send what Ctrl-C sends."""
        self.process.send_signal(signal.SIGINT)

    def finish(self) -> int:
        """Read to the end, and return the exit status."""
        while data := self._read():
            self.text += data
        return self.process.wait(PATIENCE_S)

    def _read(self) -> str:
        try:
            return os.read(self._descriptor, 65_536).decode(errors="replace")
        except OSError:  # the process has closed its side
            return ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_S)
        os.close(self._descriptor)


def plain(text: str) -> str:
    """Return a text without control sequences, with plain line feeds."""
    return _CONTROL.sub("", text).replace("\r\n", "\n")


def screen_lines(text: str) -> list[str]:
    """Return the lines of a text that was only written downwards."""
    return plain(text).split("\n")
