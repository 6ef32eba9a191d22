"""How operators start, pause, resume and cancel a job. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from fedplat.rounds import closing, plugin_rules, privacy_rules
from fedplat.rounds.events import JobAction, OperatorCommand, SpecChanged
from fedplat.rounds.protocols.base import protocol_of
from fedplat.rounds.records import NO_FUTILE, JobState
from fedplat.rounds.states import ENDED_JOBS, JOB_TRANSITIONS, REASON_TEXTS, AttemptPhase, JobStatus, Reason
from fedplat.rounds.transition import Context, Transition, Verdict


def on_operator(job: JobState, event: OperatorCommand, context: Context) -> Transition:
    """Apply an operator's command, or refuse it with the commands that are possible."""
    status, reason = _ACTIONS[event.action]
    if job.status is status:
        return Transition(job)  # a repeated request: it is done already
    if status not in JOB_TRANSITIONS[job.status] or (event.action, job.status) in _WRONG_ACTION:
        possible = [a.value for a in JobAction if _ACTIONS[a][0] in JOB_TRANSITIONS[job.status]]
        possible = [a for a in possible if (JobAction(a), job.status) not in _WRONG_ACTION]
        hint = f"it can {' or '.join(possible)}" if possible else "it has ended for good"
        return Transition(job, verdict=Verdict(None, f"cannot {event.action} a job that is {job.status}; {hint}"))
    if event.action is JobAction.RESUME and (spent := privacy_rules.describe_spent_budget(job)):
        return Transition(job, verdict=Verdict(None, f"cannot resume: {spent}"))
    if reason is None:
        if missing := plugin_rules.describe_missing(job, event.plugins, event.problem):
            return Transition(job, verdict=Verdict(None, f"cannot {event.action}: {missing}"))
        running = closing.set_status(job, status, "")
        return Transition(structs.replace(running, failures=0, futile=NO_FUTILE, resume_at=None, plugins=event.plugins))
    attempt = job.open_attempt
    # A pause lets a version that is being written become durable; a cancellation does not. A warm start may take
    # hours: it is stopped, and resumes from its checkpoint.
    is_committing = attempt is not None and attempt.phase is AttemptPhase.COMMITTING
    finishes = attempt is not None and is_committing and protocol_of(job, attempt.kind).finishes
    if attempt is None or (status is JobStatus.PAUSED and finishes):
        ended, commands = closing.drop_carried_over(job, reason)
    else:
        ended, commands = closing.abandon_all(job, reason, REASON_TEXTS[reason], context)
    return Transition(closing.set_status(ended, status, REASON_TEXTS[reason]), commands)


def on_changed(job: JobState, event: SpecChanged, context: Context) -> Transition:
    """Continue with other options of the job, which decide only when it gives up, and which files are kept."""
    if job.status in ENDED_JOBS:
        return Transition(job, verdict=Verdict(None, f"cannot change a job that is {job.status}"))
    return Transition(structs.replace(job, spec=event.spec))


_ACTIONS: Mapping[JobAction, tuple[JobStatus, Reason | None]] = {
    JobAction.START: (JobStatus.RUNNING, None),
    JobAction.RESUME: (JobStatus.RUNNING, None),
    JobAction.PAUSE: (JobStatus.PAUSED, Reason.JOB_PAUSED),
    JobAction.CANCEL: (JobStatus.CANCELLED, Reason.JOB_CANCELLED),
}
_WRONG_ACTION = frozenset({(JobAction.START, JobStatus.PAUSED), (JobAction.RESUME, JobStatus.DRAFT)})
