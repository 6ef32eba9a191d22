"""The coordinator's output. Its driver first stores the change, and then executes these commands in order."""

from __future__ import annotations

import dataclasses

from fedplat.aggregate import Contribution
from fedplat.rounds.records import AssignmentId, AttemptKey
from fedplat.rounds.states import AttemptKind, AttemptPhase, Reason


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
    contribution: Contribution
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
