"""A job with a buffer (`[mode] kind = "buffered"`): clients work all the time (`fedplat.rounds.buffered`)."""

from __future__ import annotations

from fedplat.rounds import attempts, buffered, closing, restart, selection
from fedplat.rounds.commands import Command
from fedplat.rounds.events import CandidatesDrawn
from fedplat.rounds.protocols.base import Ending, register
from fedplat.rounds.protocols.record import RoundProtocol
from fedplat.rounds.records import Attempt, JobState
from fedplat.rounds.states import AttemptPhase, Reason
from fedplat.rounds.transition import Context, Transition


def advance(job: JobState, attempt: Attempt, context: Context) -> Transition | None:
    """Take over what was carried over, and close at once if enough reports were waiting."""
    if attempt.phase is AttemptPhase.SELECTING and buffered.has_carried_over(job):
        return buffered.take_over(job, context)
    if attempt.phase is AttemptPhase.COLLECTING and attempt.num_reported >= attempt.goal:
        return closing.close(job, (), context)
    return None


def demand(job: JobState, attempt: Attempt, min_eligible: int = 1) -> selection.Demand | None:
    """Demand clients while it collects, and take them in the order of their arrival."""
    free = attempt.target - attempt.num_busy
    if attempt.phase not in (AttemptPhase.SELECTING, AttemptPhase.COLLECTING) or free <= 0:
        return None
    return selection.training_demand(job, attempt, free, min_eligible)


def on_drawn(job: JobState, attempt: Attempt, event: CandidatesDrawn, context: Context) -> Transition:
    """Assign the drawn clients; if none was available in time, close with the reports, or fail."""
    if not event.client_ids:
        return closing.close_without_clients(job, context)
    return attempts.assign(job, attempt, event.client_ids, context)


def judge_end(job: JobState, attempt: Attempt, context: Context) -> Ending:
    """Close when the buffer is full. A client that fails is replaced by another."""
    if attempt.num_reported >= attempt.goal:
        return Ending.CLOSE
    return Ending.WAIT if attempt.num_busy else Ending.WAIT_FOR_CLIENTS


def release_busy(job: JobState, attempt: Attempt) -> tuple[JobState, Attempt, tuple[Command, ...]]:
    """Carry busy clients over into the next round; after the last they are surplus."""
    if attempt.key.round < job.spec.rounds:
        return *buffered.carry_over(job, attempt), ()
    job, commands = closing.drop_carried_over(job, Reason.SURPLUS)
    job, attempt, more = closing.release_surplus(job, attempt)
    return job, attempt, commands + more


def resume(job: JobState, attempt: Attempt, context: Context) -> Transition:
    """Continue with the busy clients although the updates in memory are lost, unless the attempt commits."""
    if job.spec.durability != "memory" or attempt.phase is AttemptPhase.COMMITTING:
        return restart.resume(job, attempt, context)
    job = restart.forget_updates(restart.bound_deadlines(job, context.now))
    return restart.go_on(job, (), context)


BUFFERED = register(
    RoundProtocol(
        name="buffered",
        advance=advance,
        demand=demand,
        on_drawn=on_drawn,
        judge_end=judge_end,
        release_busy=release_busy,
        on_committed=lambda job, event: Transition(*buffered.stop_stale(job)),
        resume=resume,
    )
)
