"""What an open attempt waits for: until when, and for whom."""

from __future__ import annotations

import time

from fedplat.rounds import Attempt
from fedplat.rounds.states import OPEN_PHASES, AttemptPhase
from fedplat.wire.v1 import admin_pb2
from fedplat_server.rpc.services import Services

MAX_NAMED = 5
SILENT_S = 45.0
_WORKING = OPEN_PHASES - {AttemptPhase.SELECTING, AttemptPhase.COMMITTING}


def find(services: Services, attempt: Attempt) -> admin_pb2.AttemptWait | None:
    """Return what an attempt waits for; None if it waits for no client."""
    if attempt.phase is AttemptPhase.SELECTING:
        return admin_pb2.AttemptWait(until_unix_s=_to_unix_s(services, attempt.selection_ends_at))
    busy = sorted(attempt.busy, key=lambda each: (each.assigned_at, each.client_id))
    if attempt.phase not in _WORKING or not busy:
        return None
    ends_at = max(each.deadline_at for each in busy)
    if attempt.closes_at is not None:
        ends_at = min(ends_at, attempt.closes_at)
    named, seen = [each.client_id for each in busy[:MAX_NAMED]], services.clients.last_seen_unix_s
    earliest = time.time() - SILENT_S
    silent = [client_id for client_id in named if seen.get(client_id, earliest) < earliest]
    return admin_pb2.AttemptWait(until_unix_s=_to_unix_s(services, ends_at), client_ids=named, silent_client_ids=silent)


def _to_unix_s(services: Services, moment: float) -> float:
    """Convert a moment of the coordinator to whole seconds of the calendar: the two clocks never agree exactly."""
    return float(round(time.time() + moment - services.runner.now))
