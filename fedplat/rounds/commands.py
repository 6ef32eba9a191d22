"""A step of a job: its context, its verdict, and the coordinator's commands. A driver stores, and then executes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
from msgspec import Struct, structs

from fedplat import aggregate, texts
from fedplat.rounds.records import Assignment, AssignmentId, AttemptKey, JobState
from fedplat.rounds.states import ASSIGNMENT_TRANSITIONS, AssignmentState, AttemptKind, AttemptPhase, Reason, require


@dataclasses.dataclass(frozen=True, slots=True)
class RetryWindow:
    """When a client should retry: a uniformly drawn moment, in seconds from now."""

    min_s: float
    max_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Assign:
    """Give work to a waiting client. `token` is the secret whose hash the assignment stores."""

    key: AttemptKey
    client_id: str
    kind: AttemptKind
    base_version: int
    token: str = dataclasses.field(repr=False)
    training_timeout_s: float
    upload_timeout_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a waiting client that there is no work for it now."""

    client_id: str
    reason: Reason
    retry: RetryWindow


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    """Tell a working client to stop."""

    key: AttemptKey
    client_id: str
    reason: Reason


@dataclasses.dataclass(frozen=True, slots=True)
class Fold:
    """Add an accepted update, with its weight, to the sum of the attempt `key`.

    `assignment` identifies the update; it may have been assigned in an earlier attempt. `base_version` is the version
    that the client began with.
    """

    key: AttemptKey
    assignment: AssignmentId
    digest: str
    contribution: aggregate.Contribution
    base_version: int


@dataclasses.dataclass(frozen=True, slots=True)
class NextStep:
    """Tell the clients of a secure aggregation that the attempt has begun a phase, whose input they can have now."""

    key: AttemptKey
    phase: AttemptPhase


@dataclasses.dataclass(frozen=True, slots=True)
class Restart:
    """Discard the sum of the attempt. The updates that count are folded again, in order."""

    key: AttemptKey


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """Aggregate, make the new version durable, and answer with `AttemptAggregated` or `AggregationFailed`."""

    key: AttemptKey
    base_version: int
    num_updates: int


@dataclasses.dataclass(frozen=True, slots=True)
class RunWarmStart:
    """Train the base version on the server's own data, continuing from the checkpoint of an earlier try.

    The answer is `AttemptAggregated` with a version of no updates, or `AggregationFailed`.
    """

    key: AttemptKey
    base_version: int


@dataclasses.dataclass(frozen=True, slots=True)
class Abandon:
    """Discard what was received for the attempt."""

    key: AttemptKey


Command = Assign | Refuse | Abort | Fold | NextStep | Restart | Commit | RunWarmStart | Abandon


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """The inputs of a step from outside: the time, randomness, and new tokens (secret, hash)."""

    now: float
    rng: np.random.Generator
    new_token: Callable[[], tuple[str, bytes]]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to the sender of an event: accepted, or the reason why not."""

    reason: Reason | None = None
    text: str = ""

    @property
    def accepted(self) -> bool:
        """True if the event had its effect, now or (if it was repeated) before."""
        return self.reason is None and not self.text


ACCEPTED = Verdict()


class Transition(Struct, frozen=True):
    """The effect of an event on a job."""

    job: JobState
    commands: tuple[Command, ...] = ()
    verdict: Verdict = ACCEPTED


def put_assignment(job: JobState, assignment: Assignment) -> JobState:
    """Replace one assignment of the job, in its attempt or among those carried over."""
    if job.carried_over.find(assignment.key, assignment.client_id) is not None:
        return structs.replace(job, carried_over=job.carried_over.with_assignments([assignment]))
    assert job.attempt is not None
    return structs.replace(job, attempt=job.attempt.with_assignments([assignment]))


def end_assignment(assignment: Assignment, state: AssignmentState, reason: Reason, text: str = "") -> Assignment:
    """End an assignment for a reason. `text` may quote a client; it is shortened before it is stored."""
    ended = require(ASSIGNMENT_TRANSITIONS, assignment.state, state)
    return structs.replace(assignment, state=ended, reason=reason, text=texts.shorten(text))


def abort_commands(ended: Iterable[Assignment]) -> tuple[Command, ...]:
    """Return the commands that stop the clients of ended assignments."""
    return tuple(Abort(each.key, each.client_id, each.reason) for each in ended if each.reason is not None)
