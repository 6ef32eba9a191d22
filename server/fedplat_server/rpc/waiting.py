"""What an open attempt waits for: until when, and for whom."""

from __future__ import annotations

import time
from collections.abc import Mapping

from fedplat.rounds import Attempt
from fedplat.rounds.states import OPEN_PHASES, AttemptPhase
from fedplat.wire.v1 import admin_pb2

MAX_NAMED = 5
SILENT_S = 45.0
_WORKING = OPEN_PHASES - {AttemptPhase.SELECTING, AttemptPhase.COMMITTING}


def find(attempt: Attempt, now: float, last_seen_unix_s: Mapping[str, float]) -> admin_pb2.AttemptWait | None:
    """Return what an attempt waits for; None if it waits for no client. `now` is on the coordinator's clock."""
    if attempt.phase is AttemptPhase.SELECTING:
        return admin_pb2.AttemptWait(until_unix_s=_to_unix_s(attempt.selection_ends_at, now))
    busy = sorted(attempt.busy, key=lambda each: (each.assigned_at, each.client_id))
    if attempt.phase not in _WORKING or not busy:
        return None
    ends_at = max(each.deadline_at for each in busy)
    if attempt.closes_at is not None:
        ends_at = min(ends_at, attempt.closes_at)
    named = [each.client_id for each in busy[:MAX_NAMED]]
    earliest = time.time() - SILENT_S
    silent = [client_id for client_id in named if last_seen_unix_s.get(client_id, earliest) < earliest]
    return admin_pb2.AttemptWait(until_unix_s=_to_unix_s(ends_at, now), client_ids=named, silent_client_ids=silent)


def _to_unix_s(moment: float, now: float) -> float:
    """Convert a moment of the coordinator to whole seconds of the calendar: the two clocks never agree exactly."""
    return float(round(time.time() + moment - now))
