"""What the coordinator wants done. Whoever drives it stores the change first, and then does these in order."""

from __future__ import annotations

import dataclasses

from fedplat.aggregate import Contribution
from fedplat.rounds.records import AssignmentId, AttemptKey
from fedplat.rounds.states import AttemptKind, Reason


@dataclasses.dataclass(frozen=True, slots=True)
class RetryWindow:
    """When to come back: a uniformly drawn moment, in seconds from now."""

    min_s: float
    max_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Assign:
    """Tell a waiting client what to do. `token` is the secret whose hash the assignment holds."""

    key: AttemptKey
    client_id: str
    kind: AttemptKind
    base_version: int
    token: str = dataclasses.field(repr=False)
    training_timeout_s: float
    upload_timeout_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """Tell a waiting client that there is nothing for it now."""

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
    """Add an accepted update to the sum of the attempt `key`, with the weight that it has there.

    `assignment` names the update; it may have been assigned in an earlier attempt. `base_version` is the version that
    the client began with.
    """

    key: AttemptKey
    assignment: AssignmentId
    digest: str
    contribution: Contribution
    base_version: int


@dataclasses.dataclass(frozen=True, slots=True)
class Restart:
    """Throw away what the attempt's updates were added up to: those that count are folded anew, in their order."""

    key: AttemptKey


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """Aggregate, make the new version's bytes durable, and answer with `AttemptAggregated`."""

    key: AttemptKey
    base_version: int
    num_updates: int


@dataclasses.dataclass(frozen=True, slots=True)
class RunWarmStart:
    """Train the base version on the server's own data, and answer as to `Commit`. It goes on where an earlier try was.

    `AttemptAggregated` with a version of no updates, or `AggregationFailed`.
    """

    key: AttemptKey
    base_version: int


@dataclasses.dataclass(frozen=True, slots=True)
class Abandon:
    """Throw away what was received for the attempt."""

    key: AttemptKey


Command = Assign | Refuse | Abort | Fold | Restart | Commit | RunWarmStart | Abandon
