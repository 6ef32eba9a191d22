"""The log of the command `fedplat-client`."""

from __future__ import annotations

import logging
from typing import Any, TextIO

from typing_extensions import override

from fedplat import texts

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_MAX_LINE = 4000
"""Longest log line in characters; servers choose some of the logged text."""


def make_printable(text: str) -> str:
    """Escape control characters, so that a line is safe for a terminal, and cut a long line."""
    if len(text) > _MAX_LINE:
        text = f"{text[:_MAX_LINE]} ... ({len(text) - _MAX_LINE} more characters)"
    return texts.printable(text)


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes to the stderr that the process began with, and drops what it cannot write.

    A trainer may have closed the stream, and logging's own handler would then raise an error while it reports one.
    """

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        pass


class FieldFormatter(logging.Formatter):
    """Formats a sentence for people, then the fields for machines as key=value, both without control characters."""

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        text = super().formatMessage(record)
        return make_printable(" ".join((text, *(f"{name}={value}" for name, value in fields.items()))))

    @override
    def formatException(self, ei: Any) -> str:
        return "\n".join(make_printable(line) for line in super().formatException(ei).split("\n"))


def set_up(level: str) -> None:
    """Write what the process logs to stderr, from `level` on."""
    handler = LogHandler()
    handler.setFormatter(FieldFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
