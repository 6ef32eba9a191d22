"""The log of the command `fedplat-client`."""

from __future__ import annotations

import datetime
import json
import logging
from typing import Any, TextIO

from typing_extensions import override

from fedplat import texts

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_MAX_LINE = 4000
"""Longest log line in characters; servers choose some of the logged text."""


def make_printable(text: str) -> str:
    """Escape control characters, so that a line is safe for a terminal, and cut a long line."""
    return texts.printable(_cut(text))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]} ... ({len(text) - _MAX_LINE} more characters)"


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


class JsonFormatter(logging.Formatter):
    """Formats a line of JSON: `timestamp`, `level`, `event` (the sentence), `logger`, and the fields."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "timestamp": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(),
            "level": record.levelname.lower(),
            "event": _cut(record.getMessage()),
            "logger": record.name,
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        if record.exc_info:
            line["exception"] = _cut(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


def set_up(level: str, *, as_json: bool = False) -> None:
    """Write what the process logs to stderr, from `level` on, as text or as lines of JSON."""
    handler = LogHandler()
    handler.setFormatter(JsonFormatter() if as_json else FieldFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
