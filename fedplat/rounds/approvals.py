"""The quorum of a job with `[approval]`: nothing of it begins until enough owners of clients have approved it.

Once it has begun, each attempt draws only clients whose owners approve it (`demand`), and waits for no quorum again.
"""

from __future__ import annotations

from msgspec import structs

from fedplat.rounds.commands import Context, Transition
from fedplat.rounds.events import ApprovalsCounted
from fedplat.rounds.records import ApprovalCount, JobState
from fedplat.rounds.states import ENDED_JOBS, JobStatus
from fedplat.texts import format_count


def is_awaiting(job: JobState) -> bool:
    """Return whether a job has not begun, and needs approvals before it does."""
    return job.spec.needs_approval and job.round == 0 and job.attempt is None and job.status not in ENDED_JOBS


def has_quorum(job: JobState) -> bool:
    """Return whether enough owners have approved a job that needs it."""
    assert job.spec.approval is not None
    found = job.approvals
    return found.num_approved >= job.spec.approval.needed_of(found.num_clients)


def on_counted(job: JobState, event: ApprovalsCounted, context: Context) -> Transition:
    """Take over the number of approvals of a job that awaits them, and state how many it has."""
    counted = ApprovalCount(event.num_approved, event.num_clients)
    if not is_awaiting(job) or counted == job.approvals:
        return Transition(job)
    job = structs.replace(job, approvals=counted)
    if job.status is not JobStatus.RUNNING:
        return Transition(job)
    return Transition(structs.replace(job, reason="" if has_quorum(job) else _describe(job)))


def _describe(job: JobState) -> str:
    assert job.spec.approval is not None
    found, clients = job.approvals, format_count(job.approvals.num_clients, "enrolled client")
    needed = job.spec.approval.needed_of(found.num_clients)
    return f"waits for approvals: {found.num_approved:,} of {clients} so far, {needed:,} needed"
