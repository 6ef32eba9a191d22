"""The ids of traces and spans, which follow from what they describe.

So each daemon that leads, before and after a crash, computes the same ids. The trace of an attempt has the first 16
bytes of a SHA-256 as its id, and the next 8 bytes as the id of its first span. All other ids of spans are the first 8
bytes of a SHA-256 of the same text and their own name.
"""

from __future__ import annotations

import hashlib

from structlog.typing import EventDict

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.rounds.states import AttemptPhase

MAX_ASSIGNMENTS = 100
"""Maximum number of spans of assignments in the trace of an attempt."""


def trace_id(key: AttemptKey) -> int:
    """Return the id of an attempt's trace."""
    return int.from_bytes(_hash(_text(key))[:16])


def attempt_span_id(key: AttemptKey) -> int:
    """Return the id of the span of a whole attempt."""
    return int.from_bytes(_hash(_text(key))[16:24])


def phase_span_id(key: AttemptKey, phase: AttemptPhase) -> int:
    """Return the id of the span of a phase of an attempt."""
    return int.from_bytes(_hash(f"{_text(key)}//{phase}")[:8])


def assignment_span_id(assignment: AssignmentId) -> int:
    """Return the id of the span of an assignment."""
    return int.from_bytes(_hash(f"{_text(assignment.attempt)}/{assignment.client_id}")[:8])


def format_trace_id(number: int) -> str:
    """Return an id of a trace in hexadecimal digits, as logs and tools show it."""
    return f"{number:032x}"


def format_span_id(number: int) -> str:
    """Return an id of a span in hexadecimal digits."""
    return f"{number:016x}"


def traceparent(assignment: AssignmentId, num_wanted: int) -> str:
    """Return the span of an assignment as a W3C `traceparent`, which its client continues.

    `num_wanted` is the number of clients that the attempt wants. If it is above `MAX_ASSIGNMENTS`, only about so many
    clients are told to record spans, so that a large fleet does not flood the receiver.
    """
    span_id = assignment_span_id(assignment)
    sampled = span_id % max(num_wanted, 1) < MAX_ASSIGNMENTS
    return f"00-{format_trace_id(trace_id(assignment.attempt))}-{format_span_id(span_id)}-{int(sampled):02x}"


def add_ids(logger: object, method: str, fields: EventDict, /) -> EventDict:
    """Add `trace_id` and `span_id` to a log line about an attempt or an assignment (a processor of structlog).

    They replace those of the call in which the line was logged.
    """
    job_id, round_, number = fields.get("job"), fields.get("round"), fields.get("attempt")
    if not isinstance(job_id, str) or not isinstance(round_, int) or not isinstance(number, int):
        return fields
    key, client_id = AttemptKey(job_id, round_, number), fields.get("client")
    span_id = assignment_span_id(AssignmentId(key, client_id)) if isinstance(client_id, str) else attempt_span_id(key)
    return {**fields, "trace_id": format_trace_id(trace_id(key)), "span_id": format_span_id(span_id)}


def _text(key: AttemptKey) -> str:
    return f"{key.job_id}/{key.round}/{key.number}"


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
