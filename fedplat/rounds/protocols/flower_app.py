"""A job with a Flower app (`[flower]`), which draws the clients of each round and aggregates their replies."""

from __future__ import annotations

import dataclasses
import math
import sys

import msgspec
from msgspec import structs

from fedplat import sampling, texts
from fedplat.rounds import attempts, closing, events, selection, states
from fedplat.rounds.commands import Context, Transition
from fedplat.rounds.demand import Demand
from fedplat.rounds.protocols import averaging
from fedplat.rounds.protocols.base import AttemptSizes, Ending, RoundProtocol, register
from fedplat.rounds.records import Attempt, JobState

_NO_ROLLBACK = "cannot roll back a job with a Flower app, which would not know of it; submit a new job instead"


def cohort_of(job: JobState) -> tuple[str, ...]:
    """Return the clients that the app has drawn for its next round: none before it has begun and after its end."""
    return job.protocol if isinstance(job.protocol, tuple) else ()


def fills_cohort(attempt: Attempt) -> bool:
    """Return whether clients that the app has drawn are still to be assigned, while others work already."""
    return attempt.phase is states.AttemptPhase.COLLECTING and len(attempt.assignments) < attempt.target


def _begin(job: JobState, context: Context) -> Transition:
    """End the job when the app has drawn no one."""
    if not cohort_of(job):
        return Transition(closing.set_status(job, states.JobStatus.COMPLETED, ""))
    return averaging.begin(job, context)


def _size(job: JobState) -> AttemptSizes:
    """Return the size of the cohort that the app has drawn, with the shares in the job file."""
    target, options = len(cohort_of(job)), job.spec.selection
    goal = max(1, math.floor(round(target / options.over_selection, 9)))
    return AttemptSizes(goal, options.minimum_of(goal), target)


def _demand(job: JobState, attempt: Attempt) -> Demand | None:
    """Demand the clients that the app has drawn, each of which is assigned when it waits."""
    if attempt.phase is not states.AttemptPhase.SELECTING and not fills_cohort(attempt):
        return None
    demand = selection.training_demand(job, attempt, attempt.target - len(attempt.assignments), 1)
    return dataclasses.replace(demand, sampling=sampling.Uniform(), cohort=frozenset(cohort_of(job)))


def _on_drawn(job: JobState, attempt: Attempt, event: events.CandidatesDrawn, context: Context) -> Transition:
    """Assign clients as they arrive; when the time is over, do without the others."""
    if not event.client_ids and not fills_cohort(attempt):
        return attempts.assign_cohort(job, attempt, event, context)
    drawn = attempts.assign(job, attempt, event.client_ids, context)
    after = drawn.job.attempt
    if not event.final or after is None:
        return drawn
    complete = structs.replace(drawn.job, attempt=structs.replace(after, target=len(after.assignments)))
    return closing.close_if_due(complete, drawn.commands, context)


def _judge_end(job: JobState, attempt: Attempt, context: Context) -> Ending:
    """Wait for the rest of the cohort, unless the goal is reached before."""
    if not fills_cohort(attempt):
        return averaging.judge_end(job, attempt, context)
    waits_for_all = job.spec.selection.close == "deadline"
    return Ending.WAIT if attempt.num_reported < attempt.goal or waits_for_all else Ending.CLOSE


def _describe_start(num_waiting: int) -> str:
    found = texts.format_count(num_waiting, "client")
    return f"the ServerApp starts, and may wait until it has the clients that it needs: it has {found} so far"


def _list_deadlines(job: JobState, attempt: Attempt) -> tuple[float | None, ...]:
    moments = averaging.list_deadlines(job, attempt)
    return (*moments, attempt.selection_ends_at) if fills_cohort(attempt) else moments


FLOWER_APP = register(
    RoundProtocol(
        name="flower_app",
        draws=False,
        has_rule=False,
        list_needs=lambda spec: [],  # the app draws the clients that there are
        column="cohort",  # release 0.1.0 reads it there
        write_state=lambda job: list(cohort_of(job)) or None,
        read_state=lambda stored, spec: msgspec.convert(stored or (), tuple[str, ...]),
        begin=_begin,
        sizes=_size,
        demand=_demand,
        num_needed=lambda job: sys.maxsize,  # the app draws particular clients, before they wait
        selects=lambda job, attempt: attempt.awaits_clients or fills_cohort(attempt),
        on_drawn=_on_drawn,
        judge_end=_judge_end,
        on_committed=lambda job, event: Transition(structs.replace(job, protocol=event.cohort)),
        deadlines=_list_deadlines,
        describe_start=_describe_start,
        refuse_rollback=lambda job: _NO_ROLLBACK,
    )
)
