"""A stale synchronous parallel job (`[mode] kind = "ssp"`): a buffer of one with clocks (`fedplat.rounds.ssp`)."""

from __future__ import annotations

import dataclasses

from fedplat.rounds import attempts, selection, ssp
from fedplat.rounds.events import CandidatesDrawn, JobEvent, RollCalled
from fedplat.rounds.protocols import buffered
from fedplat.rounds.protocols.base import Roll, register
from fedplat.rounds.protocols.record import Membership
from fedplat.rounds.records import Attempt, JobState
from fedplat.rounds.states import AttemptKind, JobStatus
from fedplat.rounds.transition import Context, Transition


def _demand(job: JobState, attempt: Attempt) -> selection.Demand | None:
    """Demand whom the clocks admit; an empty clock set begins with several clients."""
    needed = max(job.spec.selection.wait_for, 1) if not job.clocks.clocks else 1
    demand = buffered.demand(job, attempt, needed)
    return dataclasses.replace(demand, gate=ssp.make_gate(job)) if demand is not None else None


def _on_drawn(job: JobState, attempt: Attempt, event: CandidatesDrawn, context: Context) -> Transition:
    if not event.client_ids:
        return buffered.on_drawn(job, attempt, event, context)
    return attempts.assign(job, attempt, ssp.admit(job, event.client_ids), context)


def _event_of_revocation(job: JobState, client_id: str) -> JobEvent | None:
    return RollCalled(job.job_id, revoked=frozenset({client_id})) if client_id in job.clocks.clocks else None


def _roll(job: JobState, context: Context) -> Roll | None:
    """Call all members when the time of one of them is over, or that of all: no client came in time."""
    if not job.clocks.clocks or job.status is not JobStatus.RUNNING:
        return None
    attempt, moment = job.open_attempt, job.clocks.next_expected
    is_over = attempt is not None and attempts.selects(job) and attempt.selection_ends_at <= context.now
    is_last = is_over and attempt is not None and attempt.kind is AttemptKind.TRAIN
    is_time = is_last or (moment is not None and moment <= context.now)
    return Roll(job.clocks.clocks, is_last) if is_time else None


SSP = register(
    dataclasses.replace(
        buffered.BUFFERED,
        name="ssp",
        handlers={RollCalled: ssp.on_roll_call},
        demand=_demand,
        on_drawn=_on_drawn,
        membership=Membership(
            awaits=lambda job, client_id: client_id in job.clocks.clocks,
            revoked=_event_of_revocation,
            roll=_roll,
            follow=ssp.follow,
            expect=ssp.expect_members,
            next_moment=lambda job: job.clocks.next_expected,
        ),
    )
)
