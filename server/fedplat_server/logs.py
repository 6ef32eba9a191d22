"""The log: a sentence for people, fields for machines. Lines of JSON, or coloured text on a terminal.

No line shows local variables of a traceback: tokens, credentials and the database's password are among them.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import sys
import threading
from typing import TextIO, cast

import structlog

MAX_LINES = 10_000


class Sink(io.TextIOBase):
    """Writes lines to a descriptor in a thread of its own: a log that nobody reads must not stop a round.

    Beyond `max_lines` that wait, lines are dropped; how many is said as soon as somebody reads again.
    """

    def __init__(self, descriptor: int, max_lines: int = MAX_LINES) -> None:
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._dropped = 0
        # A daemon: the process ends also if the thread is stuck in a write.
        self._thread = threading.Thread(target=self._drain, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str, /) -> int:
        """Hands text over; never blocks and never fails."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self._dropped += 1
        return len(text)

    def finish(self, timeout_s: float) -> None:
        """Waits until what was handed over is written, but not longer than this."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _drain(self) -> None:
        text: str | None = ""
        while text is not None:
            text = self._lines.get()
            self._put(text or "")
            if self._dropped and (text is None or self._lines.empty()):
                dropped, self._dropped = self._dropped, 0
                self._put(f"{dropped} lines of the log were dropped: nobody read them in time\n")

    def _put(self, text: str) -> None:
        rest = memoryview(text.encode(errors="backslashreplace"))
        try:
            # Past sys.stderr: a thread that is stuck in it would keep the interpreter from ending.
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            self._dropped += 1  # a closed pipe, a full disk: there is nowhere to say so


def configure(level: str = "INFO", *, json: bool | None = None) -> Sink:
    """Sets the whole process up; `json` defaults to "unless stderr is a terminal". `finish` the sink at the end."""
    terminal = sys.stderr.isatty()
    as_json = not terminal if json is None else json
    sink = Sink(sys.stderr.fileno())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[structlog.typing.Processor]
    if as_json:
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        last = [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer(default=str)]
    else:
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=terminal, exception_formatter=plain)]
    structlog.configure(
        processors=shared + last,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, sink)),
        cache_logger_on_first_use=False,
    )
    # What libraries say (asyncio, gRPC, SQLAlchemy) becomes lines of the same kind.
    handler = logging.StreamHandler(sink)
    drop_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processors=[drop_meta, *last], foreign_pre_chain=[*shared, _name_logger])
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    return sink


def get() -> structlog.typing.FilteringBoundLogger:
    """The logger of the daemon."""
    return structlog.get_logger()


def _name_logger(logger: object, method: str, fields: structlog.typing.EventDict, /) -> structlog.typing.EventDict:
    """Says which library speaks."""
    record: logging.LogRecord | None = fields.get("_record")
    return {**fields, "logger": record.name} if record is not None else fields
