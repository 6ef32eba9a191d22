"""A decentralised job (`[mode] kind = "gossip"`): silos exchange models (`fedplat.rounds.exchange`)."""

from __future__ import annotations

from fedplat.gossip import steps
from fedplat.rounds import exchange, selection
from fedplat.rounds.events import JobEvent, SiloReported, SilosLost
from fedplat.rounds.protocols.base import Ending, register
from fedplat.rounds.protocols.record import Membership, RoundProtocol
from fedplat.rounds.records import Attempt, JobState
from fedplat.rounds.transition import Transition


def _demand(job: JobState, attempt: Attempt) -> selection.Demand | None:
    """Demand silos while models are announced; they are assigned as they arrive."""
    free = attempt.target - attempt.num_busy
    wants = exchange.wants_silos(attempt) and free > 0
    return selection.training_demand(job, attempt, free, 1) if wants else None


def _awaits(job: JobState, client_id: str) -> bool:
    return job.gossip is not None and client_id in job.gossip.members | job.gossip.away


def _event_of_revocation(job: JobState, client_id: str) -> JobEvent | None:
    is_member = job.gossip is not None and client_id in job.gossip.members
    return SilosLost(job.job_id, (client_id,)) if is_member else None


GOSSIP = register(
    RoundProtocol(
        name="gossip",
        keeps_updates=False,
        features=frozenset({steps.FEATURE}),
        handlers={SiloReported: exchange.on_reported, SilosLost: exchange.on_lost},
        begin=exchange.begin,
        advance=exchange.advance,
        demand=_demand,
        selects=lambda job, attempt: False,
        on_drawn=exchange.assign,
        on_reclaimed=exchange.reassign,
        on_ended=exchange.on_ended,
        judge_end=lambda job, attempt, context: Ending.WAIT,  # `exchange` ends it
        on_deadline=lambda job, context: Transition(job),  # that of the attempt: `exchange.advance`
        resume=exchange.resume,
        deadlines=lambda job, attempt: (attempt.step_ends_at,),
        membership=Membership(awaits=_awaits, revoked=_event_of_revocation),
    )
)
