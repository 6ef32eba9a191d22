"""benchmarks/round_overhead.py: which stage of a round ends with which event."""

from __future__ import annotations

from collections import Counter

import round_overhead
from fedplat.wire.v1 import admin_pb2


def test_each_stage_of_a_round_ends_once() -> None:
    states = [
        ("attempt", "SELECTING"),
        ("assignment", "TRAINING"),
        ("attempt", "COLLECTING"),
        ("assignment", "REPORTED"),
        ("assignment", "REPORTED"),
        ("attempt", "COMMITTING"),
        ("version", "1"),
        ("attempt", "COMMITTED"),
    ]
    reported: Counter[int] = Counter()
    events = [admin_pb2.JobEvent(entity=entity, to_state=state, round=1) for entity, state in states]
    ended = [stage for event in events if (stage := round_overhead.stage_ended_by(event, reported))]
    assert tuple(ended) == round_overhead.STAGES
