"""How an attempt resumes after its server was killed. Pure functions.

The store returns the attempt as last saved, with its deadlines on the new clock. The accepted updates are in the spool
(`durability = "spool"`): all of them are folded again in the order of acceptance, so that the result is the same bit
for bit. With `durability = "memory"` they are lost, and so is the attempt; but an attempt that fills a buffer continues
with the clients that work for it. A secure aggregation continues with the same roster and the same survivors; its steps
get their whole time again, because clients have to reconnect. A warm start has no updates: it continues from its own
checkpoints.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from fedplat.job.secure import require_secure
from fedplat.rounds import buffered, closing, exchange, plugin_rules, privacy_rules, reporting, secure, ssp, warm_start
from fedplat.rounds.commands import Command, Commit
from fedplat.rounds.events import ServerRestarted
from fedplat.rounds.records import Assignment, Attempt, JobState
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase, Reason
from fedplat.rounds.transition import Context, Transition


def on_restart(job: JobState, event: ServerRestarted, context: Context) -> Transition:
    """Resume the open attempt, or abandon it; a back-off ends early. A job whose plugins are not the same is paused.

    A job that does not change keeps its revision, so that it is not written: servers keep thousands of ended jobs.
    """
    missing = plugin_rules.describe_missing(job, event.plugins, event.problem)
    if text := missing or plugin_rules.describe_changed(job, event.plugins):
        return plugin_rules.pause(job, text, context)
    fresh = structs.replace(job, resume_at=None) if job.resume_at is not None else job
    fresh = ssp.expect_members(fresh, context)
    attempt = job.open_attempt
    if attempt is None:
        return Transition(fresh)
    if exchange.is_gossip(job):
        return exchange.restart(fresh, context)
    if warm_start.is_warm_start(attempt):
        return Transition(fresh, (warm_start.make_command(attempt),))
    fresh = _bound_deadlines(fresh, context.now)
    if job.spec.durability == "memory":
        return _resume_without_updates(fresh, attempt, context)
    commands = reporting.fold_commands(attempt, attempt.reported)
    if attempt.phase is AttemptPhase.COMMITTING and attempt.kind is AttemptKind.TRAIN:
        commands += (Commit(attempt.key, attempt.base_version, attempt.num_reported),)
    elif reporting.is_secure(job, attempt):
        fresh = secure.resume(fresh, context)
    return _resume(fresh, commands, context)


def _resume_without_updates(job: JobState, attempt: Attempt, context: Context) -> Transition:
    """Continue with the busy clients of a buffer, carried over or not; the rest of the attempt is lost."""
    without_updates = buffered.forget_updates(job) if job.spec.buffered is not None else job
    if reporting.fills_buffer(job, attempt) and attempt.phase is not AttemptPhase.COMMITTING:
        return _resume(without_updates, (), context)
    text = "the server was restarted"
    return Transition(*closing.abandon(without_updates, Reason.ATTEMPT_ABANDONED, text, context))


def _resume(job: JobState, commands: tuple[Command, ...], context: Context) -> Transition:
    """Wait for the other reports in the remaining time, or again for clients; end what is overdue."""
    attempt = job.open_attempt
    assert attempt is not None
    closes_at = privacy_rules.closes_at(job, attempt, context.now)
    if attempt.phase is AttemptPhase.COLLECTING and closes_at is not None:
        # The attempt gets its full time again, whichever clients were drawn: the time that was left is stored only with
        # assignments, and so depends on the sample.
        attempt = structs.replace(attempt, closes_at=closes_at)
        job = structs.replace(job, attempt=attempt)
    late = closing.drop_late(reporting.await_clients(job, context) if job.selects else job, context)
    return structs.replace(late, commands=commands + late.commands)


def _bound_deadlines(job: JobState, now: float) -> JobState:
    """Bound the deadlines: if the wall clock was set back meanwhile, no client gets more time."""
    groups: dict[str, Any] = {}
    for name, group in (("attempt", job.attempt), ("carried_over", job.carried_over)):
        busy = group.busy if group is not None else []
        moved = [after for each in busy if (after := _bound_deadline(job, each, now)) != each]
        if group is not None and moved:
            groups[name] = group.with_assignments(moved)
    return structs.replace(job, **groups) if groups else job


def _bound_deadline(job: JobState, assignment: Assignment, now: float) -> Assignment:
    evaluation = job.spec.evaluation.clients
    if assignment.state is AssignmentState.UPLOADING:
        longest = job.spec.deadlines.upload_s
    elif assignment.kind is AttemptKind.EVALUATE and evaluation is not None:
        longest = evaluation.timeout_s
    else:  # an adaptive deadline gave less
        longest = job.spec.deadlines.training_s
        if assignment.state is AssignmentState.ADVERTISED:
            longest += require_secure(job.spec).step_s
        longest = min(longest, assignment.deadline_at - assignment.assigned_at)
    return structs.replace(
        assignment,
        assigned_at=min(assignment.assigned_at, now),
        deadline_at=min(assignment.deadline_at, now + longest),
    )
