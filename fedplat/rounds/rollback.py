"""How an operator returns a job to an older version. Pure functions.

A rollback commits a new version with the bytes of the older one: versions stay dense, and those in between stay on
record. Round numbers continue. The open attempt, and all work of clients for the job, is abandoned, because it began
with a model that was discarded.

The rule continues with its state at the older version, or without state if that was not kept. In a private job it
continues with its *current* state: a rollback only repeats an earlier release, so it is not charged. The noise of a
tree of rounds (`privacy.tree`) is that of all rounds in order, whatever model they begin with. Going back in the tree
would use the noise of its nodes a second time, for other updates.
"""

from __future__ import annotations

from msgspec import structs

from fedplat.rounds import closing
from fedplat.rounds.disclosure import disclosure_of
from fedplat.rounds.events import RollbackOrdered
from fedplat.rounds.protocols.base import training_of
from fedplat.rounds.records import NO_FUTILE, JobState, ModelVersion
from fedplat.rounds.states import MAY_ROLL_BACK, Reason
from fedplat.rounds.transition import Context, Transition, Verdict


def on_rollback(job: JobState, event: RollbackOrdered, context: Context) -> Transition:
    """Commit the older version again, as the latest. Repeating the rollback at once changes nothing."""
    number = event.version.version
    if job.latest.restored_from == number and job.status in MAY_ROLL_BACK:
        return Transition(job)
    if why := _refusal(job, number):
        return Transition(job, verdict=Verdict(None, why))
    reason, text = Reason.ATTEMPT_ABANDONED, f"the job was rolled back to version {number}"
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
    if job.status not in MAY_ROLL_BACK:
        hint = "it has no rounds yet: start it" if not job.latest.version else "it has ended for good"
        hint += f"; export version {number} and submit a new job that begins with it" if job.latest.version else ""
        return f"cannot roll back a job that is {job.status}; {hint}"
    if text := training_of(job).refuse_rollback(job):
        return text
    if number >= job.latest.version:
        return f"cannot roll back to version {number}: expected an older version than the latest, {job.latest.version}"
    return ""
