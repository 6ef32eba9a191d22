"""What intervenes in a job from outside: the orders of operators, and a restart of the server. Pure functions.

A rollback commits a new version with the bytes of the older one: versions stay dense, and those in between stay on
record. Round numbers continue. The open attempt, and all work of clients for the job, is abandoned, because it began
with a model that was discarded.

The rule continues with its state at the older version, or without state if that was not kept. In a private job it
continues with its *current* state: a rollback only repeats an earlier release, so it is not charged. The noise of a
tree of rounds (`privacy.tree`) is that of all rounds in order, whatever model they begin with. Going back in the tree
would use the noise of its nodes a second time, for other updates.

The same rules pause a job whose job file another release can read, and this one not (`fedplat/job/spec.py`).

A job keeps the versions of its plugins. Its driver states with the events `ServerRestarted` and `OperatorCommand` which
of them it has. Pure functions.

The store returns the attempt as last saved, with its deadlines on the new clock. The accepted updates are in the spool
(`durability = "spool"`): all of them are folded again in the order of acceptance, so that the result is the same bit
for bit. With `durability = "memory"` they are lost, and so is the attempt; but an attempt that fills a buffer continues
with the clients that work for it. A secure aggregation continues with the same roster and the same survivors; its steps
get their whole time again, because clients have to reconnect. A warm start has no updates: it continues from its own
checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec import structs

from fedplat.config.loaded_plugins import PluginVersion, describe_versions
from fedplat.job import is_unreadable
from fedplat.rounds import attempts, closing, commands, events, privacy_rules, states
from fedplat.rounds.commands import Command, Commit, Context, Transition, Verdict
from fedplat.rounds.events import JobAction, OperatorCommand, RollbackOrdered, SpecChanged
from fedplat.rounds.privacy_rules import disclosure_of
from fedplat.rounds.protocols.base import protocol_of, training_of
from fedplat.rounds.records import NO_FUTILE, ApprovalCount, Assignment, AssignmentSet, Attempt, JobState, ModelVersion


def on_operator(job: JobState, event: OperatorCommand, context: Context) -> Transition:
    """Apply an operator's command, or refuse it with the commands that are possible."""
    status, reason = _ACTIONS[event.action]
    if job.status is status:
        return Transition(job)  # a repeated request: it is done already
    if status not in states.JOB_TRANSITIONS[job.status] or (event.action, job.status) in _WRONG_ACTION:
        possible = [a.value for a in JobAction if _ACTIONS[a][0] in states.JOB_TRANSITIONS[job.status]]
        possible = [a for a in possible if (JobAction(a), job.status) not in _WRONG_ACTION]
        hint = f"it can {' or '.join(possible)}" if possible else "it has ended for good"
        return Transition(job, verdict=Verdict(None, f"cannot {event.action} a job that is {job.status}; {hint}"))
    if event.action is JobAction.RESUME and (spent := privacy_rules.describe_spent_budget(job)):
        return Transition(job, verdict=Verdict(None, f"cannot resume: {spent}"))
    if reason is None:
        if missing := describe_missing(job, event.plugins, event.problem):
            return Transition(job, verdict=Verdict(None, f"cannot {event.action}: {missing}"))
        running = closing.set_status(job, status, "")
        return Transition(structs.replace(running, failures=0, futile=NO_FUTILE, resume_at=None, plugins=event.plugins))
    attempt = job.open_attempt
    # A pause lets a version that is being written become durable; a cancellation does not. A warm start may take
    # hours: it is stopped, and resumes from its checkpoint.
    is_committing = attempt is not None and attempt.phase is states.AttemptPhase.COMMITTING
    finishes = attempt is not None and is_committing and protocol_of(job, attempt.kind).finishes
    if attempt is None or (status is states.JobStatus.PAUSED and finishes):
        ended, commands = closing.drop_carried_over(job, reason)
    else:
        ended, commands = closing.abandon_all(job, reason, states.REASON_TEXTS[reason], context)
    return Transition(closing.set_status(ended, status, states.REASON_TEXTS[reason]), commands)


def on_changed(job: JobState, event: SpecChanged, context: Context) -> Transition:
    """Continue with other options of the job, which decide only when it gives up, and which files are kept."""
    if job.status in states.ENDED_JOBS:
        return Transition(job, verdict=Verdict(None, f"cannot change a job that is {job.status}"))
    return Transition(structs.replace(job, spec=event.spec, digest=event.digest, approvals=ApprovalCount()))


_ACTIONS: Mapping[JobAction, tuple[states.JobStatus, states.Reason | None]] = {
    JobAction.START: (states.JobStatus.RUNNING, None),
    JobAction.RESUME: (states.JobStatus.RUNNING, None),
    JobAction.PAUSE: (states.JobStatus.PAUSED, states.Reason.JOB_PAUSED),
    JobAction.CANCEL: (states.JobStatus.CANCELLED, states.Reason.JOB_CANCELLED),
}
_WRONG_ACTION = frozenset({(JobAction.START, states.JobStatus.PAUSED), (JobAction.RESUME, states.JobStatus.DRAFT)})


def on_rollback(job: JobState, event: RollbackOrdered, context: Context) -> Transition:
    """Commit the older version again, as the latest. Repeating the rollback at once changes nothing."""
    number = event.version.version
    if job.latest.restored_from == number and job.status in states.MAY_ROLL_BACK:
        return Transition(job)
    if why := _refusal(job, number):
        return Transition(job, verdict=Verdict(None, why))
    reason, text = states.Reason.ATTEMPT_ABANDONED, f"the job was rolled back to version {number}"
    if job.open_attempt is None:
        ended, commands = closing.drop_carried_over(job, reason)
    else:
        ended, commands = closing.abandon_all(job, reason, text, context)
    after = structs.replace(
        ended, latest=make_version(job, event.version), failures=0, futile=NO_FUTILE, resume_at=None
    )
    return Transition(after, commands)


def make_version(job: JobState, version: ModelVersion) -> ModelVersion:
    """Return the version of a rollback: it belongs to no round, and has no delta."""
    state_digest = (version if disclosure_of(job.spec).keeps_states else job.latest).state_digest
    return ModelVersion(
        version=job.latest.version + 1,
        round=0,
        attempt=0,
        digest=version.digest,
        size_bytes=version.size_bytes,
        state_digest=state_digest,
        restored_from=version.version,
    )


def _refusal(job: JobState, number: int) -> str:
    """Return why the job cannot return to a version; empty if it can."""
    if job.status not in states.MAY_ROLL_BACK:
        hint = "it has no rounds yet: start it" if not job.latest.version else "it has ended for good"
        hint += f"; export version {number} and submit a new job that begins with it" if job.latest.version else ""
        return f"cannot roll back a job that is {job.status}; {hint}"
    if text := training_of(job).refuse_rollback(job):
        return text
    if number >= job.latest.version:
        return f"cannot roll back to version {number}: expected an older version than the latest, {job.latest.version}"
    return ""


MAX_PROBLEM = 500
"""Maximum length of the mistakes of a job file in a job's reason."""


def describe_missing(job: JobState, loaded: tuple[PluginVersion, ...], problem: str) -> str:
    """Return why the job cannot run with the loaded plugins; empty if it can, with the same code or with other code.

    `problem` is the first mistake in its job file with these plugins.
    """
    labels = {version.label for version in loaded}
    for version in job.plugins:
        if version.label not in labels:
            return (
                f"the server has no plugin {version.label} (the job has {version.short}); start it with --plugin "
                f"{version.label}=..., then resume the job"
            )
    if problem and is_unreadable(job.spec):
        return (
            f"this server cannot read the job file: {problem[:MAX_PROBLEM]}; another version of fedplat made the job. "
            "If it is newer, update the server, then resume the job; if it is older, cancel the job and submit a "
            "corrected job file, which may start from the model of this job"
        )
    if problem:
        return (
            f"the job cannot use the server's plugins: {problem[:MAX_PROBLEM]}; start the server with "
            f"{describe_versions(job.plugins)}, then resume the job"
        )
    return ""


def describe_changed(job: JobState, loaded: tuple[PluginVersion, ...]) -> str:
    """Return which plugins of the job have other code than before; empty if none has."""
    found = {version.label: version for version in loaded}
    changed = [version for version in job.plugins if found.get(version.label, version) != version]
    if not changed:
        return ""
    now = describe_versions(found[version.label] for version in changed)
    return (
        f"the job has {describe_versions(changed)}, but the server has {now}; start the server with the former plugin, "
        "then resume the job, or resume it now to continue with the other code"
    )


def pause_for_plugins(job: JobState, text: str, context: Context) -> Transition:
    """Pause a job whose plugins are missing or have changed; its open attempt is abandoned, even while it commits."""
    if job.status is states.JobStatus.DRAFT or job.status in states.ENDED_JOBS:
        return Transition(job)
    if job.open_attempt is None:
        ended, commands = closing.drop_carried_over(job, states.Reason.JOB_PAUSED)
    else:
        ended, commands = closing.abandon_all(job, states.Reason.JOB_PAUSED, text, context)
    if job.status is not states.JobStatus.PAUSED:
        ended = closing.set_status(ended, states.JobStatus.PAUSED, text)
    elif job.reason != text:
        ended = structs.replace(ended, reason=text)
    return Transition(ended, commands)


_Set = TypeVar("_Set", bound=AssignmentSet)


def on_restart(job: JobState, event: events.ServerRestarted, context: Context) -> Transition:
    """Resume the open attempt, or abandon it; a back-off ends early. A job whose plugins are not the same is paused.

    A job that does not change keeps its revision, so that it is not written: servers keep thousands of ended jobs.
    """
    missing = describe_missing(job, event.plugins, event.problem)
    if text := missing or describe_changed(job, event.plugins):
        return pause_for_plugins(job, text, context)
    fresh = structs.replace(job, resume_at=None) if job.resume_at is not None else job
    fresh = training_of(job).membership.expect(fresh, context)
    attempt = job.open_attempt
    if attempt is None:
        return Transition(fresh)
    return protocol_of(job, attempt.kind).resume(fresh, attempt, context)


def resume_attempt(job: JobState, attempt: Attempt, context: Context) -> Transition:
    """Continue an attempt with the deadlines of its clients, at most."""
    return refold_updates(bound_deadlines(job, context.now), attempt, context)


def refold_updates(job: JobState, attempt: Attempt, context: Context) -> Transition:
    """Fold the accepted updates again, and continue; without a spool the attempt is lost."""
    if job.spec.durability == "memory":
        return lose_attempt(job, context)
    commands = closing.fold_commands(attempt, attempt.reported)
    if attempt.phase is states.AttemptPhase.COMMITTING and protocol_of(job, attempt.kind).folds:
        commands += (Commit(attempt.key, attempt.base_version, attempt.num_reported),)
    return go_on(job, commands, context)


def lose_attempt(job: JobState, context: Context) -> Transition:
    """Abandon an attempt whose updates were in memory."""
    text = "the server was restarted"
    return Transition(*closing.abandon(forget_updates(job), states.Reason.ATTEMPT_ABANDONED, text, context))


def forget_updates(job: JobState) -> JobState:
    """Drop the accepted updates, which a job with `durability = "memory"` loses in a crash. Busy clients continue."""

    def drop(group: _Set) -> _Set:
        return group.with_assignments(
            [
                commands.end_assignment(each, states.AssignmentState.DROPPED, states.Reason.ATTEMPT_ABANDONED)
                for each in group.reported
            ]
        )

    attempt, carried = job.attempt, job.carried_over
    return structs.replace(
        job,
        attempt=drop(attempt) if attempt is not None and attempt.num_reported else attempt,
        carried_over=drop(carried) if carried.num_reported else carried,
    )


def go_on(job: JobState, commands: tuple[Command, ...], context: Context) -> Transition:
    """Wait for the other reports in the remaining time, or again for clients; end what is overdue."""
    attempt = job.open_attempt
    assert attempt is not None
    closes_at = protocol_of(job, attempt.kind).closes_at(job, context.now)
    if attempt.phase is states.AttemptPhase.COLLECTING and closes_at is not None:
        # The attempt gets its full time again, whichever clients were drawn: the time that was left is stored only with
        # assignments, and so depends on the sample.
        attempt = structs.replace(attempt, closes_at=closes_at)
        job = structs.replace(job, attempt=attempt)
    late = closing.drop_late(closing.await_clients(job, context) if attempts.selects(job) else job, context)
    return structs.replace(late, commands=commands + late.commands)


def bound_deadlines(job: JobState, now: float) -> JobState:
    """Bound the deadlines: if the wall clock was set back meanwhile, no client gets more time."""
    groups: dict[str, Any] = {}
    for name, group in (("attempt", job.attempt), ("carried_over", job.carried_over)):
        busy = group.busy if group is not None else []
        moved = [after for each in busy if (after := _bound_deadline(job, each, now)) != each]
        if group is not None and moved:
            groups[name] = group.with_assignments(moved)
    return structs.replace(job, **groups) if groups else job


def _bound_deadline(job: JobState, assignment: Assignment, now: float) -> Assignment:
    if assignment.state is states.AssignmentState.UPLOADING:
        longest = job.spec.deadlines.upload_s
    else:
        longest = protocol_of(job, assignment.kind).longest_s(job, assignment)
    return structs.replace(
        assignment, assigned_at=min(assignment.assigned_at, now), deadline_at=min(assignment.deadline_at, now + longest)
    )
