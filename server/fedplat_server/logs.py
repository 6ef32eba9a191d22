"""The log: a sentence for people, fields for machines. Lines of JSON, or coloured text on a terminal.

A line about a job, an attempt or a client has the fields `job` (the id), `round`, `attempt` and `client` (the id).
Tracebacks are logged without local variables, which include tokens, credentials and the database's password.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO, cast

import structlog

if TYPE_CHECKING:
    from fedplat.rounds import AssignmentId, AttemptKey

MAX_LINES = 10_000


class Sink(io.TextIOBase):
    """A stream that a thread writes to a file descriptor: a log whose reader is stuck must not stop a round.

    If `max_lines` are waiting, further lines are dropped; a line with their number follows when writes succeed again.
    """

    def __init__(self, descriptor: int, max_lines: int = MAX_LINES) -> None:
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._dropped = 0
        self.num_dropped = 0
        """The number of lines that were dropped since the start."""
        # A daemon thread: the process can end while the thread is stuck in a write.
        self._thread = threading.Thread(target=self._drain, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str, /) -> int:
        """Queue text for writing; never blocks and never fails."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self._drop()
        return len(text)

    def finish(self, timeout_s: float) -> None:
        """Wait until the queued text is written, for up to `timeout_s`."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _drain(self) -> None:
        text: str | None = ""
        while text is not None:
            text = self._lines.get()
            if not self._put(text or ""):
                self._drop()
            if self._dropped and (text is None or self._lines.empty()):
                dropped, self._dropped = self._dropped, 0
                if not self._put(f"{dropped} lines of the log were dropped: they were not read in time\n"):
                    self._dropped += dropped

    def _put(self, text: str) -> bool:
        """Write a text; return False for a closed pipe or a full disk, which cannot be reported anywhere."""
        rest = memoryview(text.encode(errors="backslashreplace"))
        try:
            # Not through sys.stderr: a thread that is stuck in it would keep the interpreter from ending.
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            return False
        return True

    def _drop(self) -> None:
        self._dropped += 1
        self.num_dropped += 1


def configure(
    level: str = "INFO", *, json: bool | None = None, processors: Sequence[structlog.typing.Processor] = ()
) -> Sink:
    """Set up the log of the process; return its sink, to be finished at the end. `json` defaults to text on a terminal.

    `processors` change the fields of each line.
    Messages of libraries (asyncio, gRPC, SQLAlchemy) of level WARNING or above become lines of the same kind.
    """
    terminal = sys.stderr.isatty()
    as_json = not terminal if json is None else json
    sink = Sink(sys.stderr.fileno())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *processors,
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
    handler = logging.StreamHandler(sink)
    drop_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processors=[drop_meta, *last], foreign_pre_chain=[*shared, _name_logger])
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    return sink


def get() -> structlog.typing.FilteringBoundLogger:
    """Return the logger of the daemon."""
    return structlog.get_logger()


def bind(**fields: object) -> None:
    """Add fields to all later lines of this task; each call of a client or operator is a task."""
    structlog.contextvars.bind_contextvars(**fields)


def attempt_fields(key: AttemptKey) -> dict[str, object]:
    """Return the fields of a line about an attempt."""
    return {"job": key.job_id, "round": key.round, "attempt": key.number}


def assignment_fields(assignment: AssignmentId) -> dict[str, object]:
    """Return the fields of a line about an assignment."""
    return attempt_fields(assignment.attempt) | {"client": assignment.client_id}


def _name_logger(logger: object, method: str, fields: structlog.typing.EventDict, /) -> structlog.typing.EventDict:
    record: logging.LogRecord | None = fields.get("_record")
    return {**fields, "logger": record.name} if record is not None else fields
