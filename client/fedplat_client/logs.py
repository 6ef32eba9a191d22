"""The log of the command `fedplat-client`: a line per record on stderr, safe for a terminal."""

from __future__ import annotations

import logging
from typing import Any, TextIO

from typing_extensions import override

from fedplat import texts

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
MAX_LINE = 4000
"""Longest log line in characters; servers choose some of the logged text."""


def printable(text: str) -> str:
    """Escape control characters, so that a line is safe for a terminal, and cut a long line."""
    if len(text) > MAX_LINE:
        text = f"{text[:MAX_LINE]} ... ({len(text) - MAX_LINE} more characters)"
    return texts.printable(text)


class Handler(logging.StreamHandler[TextIO]):
    """Writes to the stderr that the process began with, and drops what it cannot write.

    A trainer may have closed the stream, and logging's own handler would then raise an error while it reports one.
    """

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        pass


class Formatter(logging.Formatter):
    """Formats a sentence for people, then the fields for machines as key=value, both without control characters."""

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        text = super().formatMessage(record)
        return printable(" ".join((text, *(f"{name}={value}" for name, value in fields.items()))))

    @override
    def formatException(self, ei: Any) -> str:
        return "\n".join(printable(line) for line in super().formatException(ei).split("\n"))


def set_up(level: str) -> None:
    """Write records from this level on to stderr, unless the program has set up its log before."""
    handler = Handler()
    handler.setFormatter(Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
