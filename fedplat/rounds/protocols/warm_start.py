"""Warm start: the server trains the initial model before round 1 (`fedplat.rounds.warm_start`)."""

from __future__ import annotations

from fedplat.rounds import warm_start
from fedplat.rounds.protocols.base import AttemptSizes, Ending, register
from fedplat.rounds.protocols.record import RoundProtocol
from fedplat.rounds.transition import Transition

WARM_START = register(
    RoundProtocol(
        name="warm_start",
        folds=False,
        finishes=False,
        begin=lambda job, context: warm_start.begin(job, context) if warm_start.is_due(job) else None,
        sizes=lambda job: AttemptSizes(0, 0, 0),
        describe=warm_start.describe,
        demand=lambda job, attempt: None,
        judge_end=lambda job, attempt, context: Ending.WAIT,
        on_aggregation_failed=lambda job, attempt, event: (job, event.text),
        resume=lambda job, attempt, context: Transition(job, (warm_start.make_command(attempt),)),
    )
)
