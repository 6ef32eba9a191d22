"""The attempts of a watched job, reconstructed from its events. No input, no output, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fedplat.admin import funnel
from fedplat.wire.v1 import admin_pb2

_WITHOUT_PROGRESS = frozenset({admin_pb2.ATTEMPT_PHASE_SELECTING, admin_pb2.ATTEMPT_PHASE_COMMITTING, *funnel.ENDED})
"""Phases in which no client works for an attempt."""
_ENDED_JOB = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
_COUNTED = {
    "late": ("LATE",),
    "failed": ("FAILED",),
    "rejected": ("REJECTED",),
    "surplus": ("SURPLUS",),
    "dropped": ("DROPPED",),
}


class AttemptTable:
    """The attempts of a job, oldest first, as the server's ListRounds returns them.

    The server's moments are only compared with each other: the seconds of an open attempt are those until its last
    event. In a job with a buffer, an update may be merged by a later attempt than that of its assignment; so the
    number of reports of an attempt is known only when it is committed, from the updates merged then.
    """

    def __init__(self) -> None:
        self.attempts: list[admin_pb2.Round] = []
        self.committed_rounds = 0
        self.job_status = ""
        self._states: list[Counter[str]] = []
        self._positions: dict[tuple[int, int], int] = {}
        self._merged: list[admin_pb2.JobEvent] = []

    @property
    def has_ended(self) -> bool:
        """True if the job will have no more events."""
        return self.job_status in _ENDED_JOB

    def latest(self, count: int) -> Sequence[admin_pb2.Round]:
        """Return the last `count` attempts."""
        return self.attempts[-count:] if count > 0 else []

    def add(self, event: admin_pb2.JobEvent) -> admin_pb2.Round | None:
        """Add an event; return the attempt that it ended, or whose version it scored, if any."""
        match event.entity:
            case "job":
                self.job_status = event.to_state
            case "version":
                return self._add_version(event)
            case "assignment":
                self._add_assignment(event)
            case "attempt":
                return self._add_attempt(event)
            case "progress":
                attempt = self.attempts[self._position(event)]
                attempt.progress.CopyFrom(event.progress)
                attempt.reason = event.reason
                attempt.seconds = event.unix_s - attempt.opened_unix_s
            case _:  # from a newer server
                pass
        return None

    def _position(self, event: admin_pb2.JobEvent) -> int:
        key = (event.round, event.attempt)
        if key not in self._positions:
            self._positions[key] = len(self.attempts)
            self._states.append(Counter())
            self.attempts.append(
                admin_pb2.Round(
                    round=event.round,
                    attempt=event.attempt,
                    kind=admin_pb2.ATTEMPT_KIND_TRAIN,
                    phase=admin_pb2.ATTEMPT_PHASE_SELECTING,
                    opened_unix_s=event.unix_s,
                )
            )
        return self._positions[key]

    def _add_assignment(self, event: admin_pb2.JobEvent) -> None:
        position = self._position(event)
        attempt, states = self.attempts[position], self._states[position]
        if event.from_state:
            states[event.from_state] -= 1
        else:
            attempt.assigned += 1
        states[event.to_state] += 1
        for field, names in _COUNTED.items():
            setattr(attempt, field, max(0, sum(states[name] for name in names)))
        if event.to_state == "MERGED":
            self._merged.append(event)
        if attempt.phase not in funnel.ENDED:
            attempt.reported = max(0, states["REPORTED"] + states["MERGED"])
            attempt.update_bytes += event.update_bytes if event.to_state == "REPORTED" else 0
            attempt.seconds = event.unix_s - attempt.opened_unix_s

    def _add_attempt(self, event: admin_pb2.JobEvent) -> admin_pb2.Round | None:
        attempt = self.attempts[self._position(event)]
        phase = admin_pb2.AttemptPhase.DESCRIPTOR.values_by_name.get(f"ATTEMPT_PHASE_{event.to_state}")
        attempt.phase = admin_pb2.AttemptPhase.ValueType(phase.number if phase is not None else 0)
        if attempt.phase in _WITHOUT_PROGRESS:
            attempt.ClearField("progress")
        attempt.reason = event.reason
        attempt.seconds = event.unix_s - attempt.opened_unix_s
        attempt.kind = event.kind or attempt.kind
        attempt.client_metrics.update(event.metrics)
        if attempt.phase == admin_pb2.ATTEMPT_PHASE_COMMITTED and self._merged:
            attempt.reported = len(self._merged)
            attempt.update_bytes = sum(merged.update_bytes for merged in self._merged)
            self._merged.clear()
        return attempt if attempt.phase in funnel.ENDED else None

    def _add_version(self, event: admin_pb2.JobEvent) -> admin_pb2.Round | None:
        self.committed_rounds = max(self.committed_rounds, event.round)
        position = self._positions.get((event.round, event.attempt))
        if not event.metrics or position is None:
            return None
        self.attempts[position].server_metrics.update(event.metrics)
        return self.attempts[position]
