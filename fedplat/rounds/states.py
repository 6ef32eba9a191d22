"""The lifecycles of jobs, attempts and assignments, as tables without behaviour.

Code that changes a state calls `require` first, so that only transitions in the tables can happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar


class JobStatus(StrEnum):
    """The status of a job."""

    DRAFT = "DRAFT"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class AttemptKind(StrEnum):
    """The work of an attempt's cohort. A warm start has no cohort: the server itself trains."""

    TRAIN = "TRAIN"
    EVALUATE = "EVALUATE"
    WARM_START = "WARM_START"


class AttemptPhase(StrEnum):
    """The progress of an attempt.

    With secure aggregation: while ADVERTISING, clients train and then send their keys; while SHARING, the shares of
    their secrets. COLLECTING is for the masked updates; while CONFIRMING clients confirm who survives (only with
    `secure_aggregation.confirm`), and while UNMASKING they answer the shares with which the masks are removed.

    In a decentralised job: while COLLECTING, silos train and announce their models; while EXCHANGING, they get those of
    their neighbours, and while REDUCING the mean of all, in a ring.
    """

    SELECTING = "SELECTING"
    ADVERTISING = "ADVERTISING"
    SHARING = "SHARING"
    COLLECTING = "COLLECTING"
    CONFIRMING = "CONFIRMING"
    UNMASKING = "UNMASKING"
    EXCHANGING = "EXCHANGING"
    REDUCING = "REDUCING"
    COMMITTING = "COMMITTING"
    COMMITTED = "COMMITTED"
    ABANDONED = "ABANDONED"


class AssignmentState(StrEnum):
    """The progress of an assignment.

    With secure aggregation: ADVERTISED clients have trained and sent their keys, SHARED ones the shares of their
    secrets; both still work for the attempt. In a decentralised job ADVERTISED silos have announced their model. LATE:
    its deadline passed, its base version became too old, or the client became silent. REJECTED:
    the update (or a message of secure aggregation) is not acceptable, which may show only in comparison with others.
    DROPPED: the assignment ended for a reason other than the client's own behaviour, such as an abandoned attempt.
    """

    TRAINING = "TRAINING"
    ADVERTISED = "ADVERTISED"
    SHARED = "SHARED"
    UPLOADING = "UPLOADING"
    REPORTED = "REPORTED"
    MERGED = "MERGED"
    LATE = "LATE"
    FAILED = "FAILED"
    REJECTED = "REJECTED"
    SURPLUS = "SURPLUS"
    DROPPED = "DROPPED"


class Reason(StrEnum):
    """The reason why a request was refused or an assignment ended; `wire.v1.Reason` has the same names."""

    NO_WORK = "NO_WORK"
    NOT_SELECTED = "NOT_SELECTED"
    NOT_ELIGIBLE = "NOT_ELIGIBLE"
    DRAINING = "DRAINING"
    OVERLOADED = "OVERLOADED"
    LIMIT_REACHED = "LIMIT_REACHED"
    TRAIN_TIMEOUT = "TRAIN_TIMEOUT"
    UPLOAD_TIMEOUT = "UPLOAD_TIMEOUT"
    STEP_TIMEOUT = "STEP_TIMEOUT"
    SURPLUS = "SURPLUS"
    ATTEMPT_ABANDONED = "ATTEMPT_ABANDONED"
    JOB_PAUSED = "JOB_PAUSED"
    JOB_CANCELLED = "JOB_CANCELLED"
    STALE = "STALE"
    TOO_STALE = "TOO_STALE"
    TRAINER_ERROR = "TRAINER_ERROR"
    UNKNOWN_TRAINER = "UNKNOWN_TRAINER"
    CLIENT_STOPPED = "CLIENT_STOPPED"
    TRANSFER_FAILED = "TRANSFER_FAILED"
    UNKNOWN_CODEC = "UNKNOWN_CODEC"
    PRIVACY_LIMIT = "PRIVACY_LIMIT"
    UNSAFE_AGGREGATION = "UNSAFE_AGGREGATION"
    KEYS_LOST = "KEYS_LOST"
    NOT_APPROVED = "NOT_APPROVED"
    UNREACHABLE = "UNREACHABLE"
    REVOKED = "REVOKED"
    REJECTED_SCHEMA = "REJECTED_SCHEMA"
    REJECTED_NONFINITE = "REJECTED_NONFINITE"
    REJECTED_WEIGHT = "REJECTED_WEIGHT"
    REJECTED_DIGEST = "REJECTED_DIGEST"
    REJECTED_CONFLICT = "REJECTED_CONFLICT"
    REJECTED_METRICS = "REJECTED_METRICS"
    REJECTED_NORM = "REJECTED_NORM"
    REJECTED_OUTLIER = "REJECTED_OUTLIER"
    REJECTED_MESSAGE = "REJECTED_MESSAGE"


REASON_TEXTS: Mapping[Reason, str] = {
    Reason.NO_WORK: "no running job of this population needs clients now",
    Reason.NOT_SELECTED: "enough other clients were selected, or this one took part recently",
    Reason.NOT_ELIGIBLE: "no running job accepts this client's labels, trainers, evaluators, codecs or algorithms, "
    "or its owner has not approved it",
    Reason.DRAINING: "the server is stopping",
    Reason.OVERLOADED: "the server has reached its limit of waiting clients",
    Reason.LIMIT_REACHED: "this client took part in as many rounds as the job's privacy.max_participations allows",
    Reason.TRAIN_TIMEOUT: "the deadline passed while the client was training",
    Reason.UPLOAD_TIMEOUT: "the deadline passed while the client was uploading",
    Reason.STEP_TIMEOUT: "the deadline passed before the client sent its message of a step of secure aggregation",
    Reason.SURPLUS: "the attempt reached its goal without this client",
    Reason.ATTEMPT_ABANDONED: "the attempt was abandoned",
    Reason.JOB_PAUSED: "the job was paused",
    Reason.JOB_CANCELLED: "the job was cancelled",
    Reason.STALE: "the token names no open assignment",
    Reason.TOO_STALE: "more versions were committed since the client began than the job's max_staleness",
    Reason.TRAINER_ERROR: "the trainer raised an error",
    Reason.UNKNOWN_TRAINER: "the client has no trainer of that name",
    Reason.CLIENT_STOPPED: "the client was stopped by its owner",
    Reason.TRANSFER_FAILED: "the model or the update could not be transferred",
    Reason.UNKNOWN_CODEC: "the client does not support the job's codec or one of its options",
    Reason.PRIVACY_LIMIT: "the training would cost more privacy than the owner of the client's data allows",
    Reason.UNSAFE_AGGREGATION: "the owner of the client does not allow this secure aggregation or exchange of models",
    Reason.KEYS_LOST: "the client was restarted after it had sent its keys, which are in its memory only",
    Reason.NOT_APPROVED: "the owner of the client has not approved this job, or not what the assignment says of it",
    Reason.UNREACHABLE: "the server received nothing from the client for three heartbeats",
    Reason.REVOKED: "an operator revoked the client",
    Reason.REJECTED_SCHEMA: "the update's tensors are not those of the base version",
    Reason.REJECTED_NONFINITE: "the update holds NaN or infinite values",
    Reason.REJECTED_WEIGHT: "the number of examples must be from 1e-6 to 1e15",
    Reason.REJECTED_DIGEST: "the bytes received are not those that the report names",
    Reason.REJECTED_CONFLICT: "the assignment was reported before with other content; the first report is kept",
    Reason.REJECTED_METRICS: "a metric is not finite, there are too many, or the job's rule needs one that is missing",
    Reason.REJECTED_NORM: "the update's norm is above the job's limit, or the limit of a sum of updates",
    Reason.REJECTED_OUTLIER: "the update's norm is far above those of the other clients",
    Reason.REJECTED_MESSAGE: "the message of secure aggregation is invalid",
}
"""A description of each reason."""

FAILURES = frozenset(
    {
        Reason.TRAINER_ERROR,
        Reason.UNKNOWN_TRAINER,
        Reason.CLIENT_STOPPED,
        Reason.TRANSFER_FAILED,
        Reason.UNKNOWN_CODEC,
        Reason.PRIVACY_LIMIT,
        Reason.UNSAFE_AGGREGATION,
        Reason.KEYS_LOST,
        Reason.NOT_APPROVED,
    }
)
"""Reasons that a client may state when it gives up an assignment."""

DECLINES = frozenset({Reason.PRIVACY_LIMIT, Reason.UNSAFE_AGGREGATION})
"""Those of them by which the owner of the client does not allow the job: the client is not asked again."""

JOB_TRANSITIONS: Mapping[JobStatus, frozenset[JobStatus]] = {
    JobStatus.DRAFT: frozenset({JobStatus.RUNNING, JobStatus.CANCELLED}),
    JobStatus.RUNNING: frozenset({JobStatus.PAUSED, JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED}),
    JobStatus.PAUSED: frozenset({JobStatus.RUNNING, JobStatus.CANCELLED}),
    JobStatus.COMPLETED: frozenset(),
    JobStatus.FAILED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
}

ATTEMPT_TRANSITIONS: Mapping[AttemptPhase, frozenset[AttemptPhase]] = {
    AttemptPhase.SELECTING: frozenset({AttemptPhase.COLLECTING, AttemptPhase.ADVERTISING, AttemptPhase.ABANDONED}),
    AttemptPhase.ADVERTISING: frozenset({AttemptPhase.SHARING, AttemptPhase.ABANDONED}),
    AttemptPhase.SHARING: frozenset({AttemptPhase.COLLECTING, AttemptPhase.ABANDONED}),
    AttemptPhase.COLLECTING: frozenset(
        {
            AttemptPhase.CONFIRMING,
            AttemptPhase.UNMASKING,
            AttemptPhase.EXCHANGING,
            AttemptPhase.REDUCING,
            AttemptPhase.COMMITTING,
            AttemptPhase.COMMITTED,  # of silos between which the topology has no edge
            AttemptPhase.ABANDONED,
        }
    ),
    AttemptPhase.CONFIRMING: frozenset({AttemptPhase.UNMASKING, AttemptPhase.ABANDONED}),
    AttemptPhase.UNMASKING: frozenset({AttemptPhase.COMMITTING, AttemptPhase.ABANDONED}),
    AttemptPhase.EXCHANGING: frozenset({AttemptPhase.REDUCING, AttemptPhase.COMMITTED, AttemptPhase.ABANDONED}),
    AttemptPhase.REDUCING: frozenset({AttemptPhase.COMMITTED, AttemptPhase.ABANDONED}),
    AttemptPhase.COMMITTING: frozenset({AttemptPhase.COMMITTED, AttemptPhase.ABANDONED}),
    AttemptPhase.COMMITTED: frozenset(),
    AttemptPhase.ABANDONED: frozenset(),
}

FIRST_PHASES: Mapping[AttemptKind, AttemptPhase] = {
    AttemptKind.TRAIN: AttemptPhase.SELECTING,
    AttemptKind.EVALUATE: AttemptPhase.SELECTING,
    AttemptKind.WARM_START: AttemptPhase.COMMITTING,
}
"""The first phase of an attempt: one without a cohort has no clients to select and no reports to collect."""

MAKE_VERSIONS = frozenset({AttemptKind.TRAIN, AttemptKind.WARM_START})
"""Kinds of attempts that commit a model version."""

HAVE_CLIENTS = frozenset({AttemptKind.TRAIN, AttemptKind.EVALUATE})
"""Kinds of attempts with a cohort; the others are the server's alone, and come before round 1."""

HAVE_UPDATES = frozenset({AttemptKind.TRAIN})
"""Kinds of attempts whose clients report an update, which counts as a participation (`RoundProtocol.folds`)."""

_S = AssignmentState
_ENDED_OPEN = frozenset({_S.LATE, _S.FAILED, _S.REJECTED, _S.SURPLUS, _S.DROPPED})
ASSIGNMENT_TRANSITIONS: Mapping[AssignmentState, frozenset[AssignmentState]] = {
    _S.TRAINING: frozenset({_S.ADVERTISED, _S.UPLOADING, _S.REPORTED}) | _ENDED_OPEN,
    _S.ADVERTISED: frozenset({_S.SHARED, _S.MERGED}) | _ENDED_OPEN,
    _S.SHARED: frozenset({_S.UPLOADING, _S.REPORTED}) | _ENDED_OPEN,
    _S.UPLOADING: frozenset({_S.REPORTED}) | _ENDED_OPEN,
    _S.REPORTED: frozenset({_S.MERGED, _S.DROPPED, _S.REJECTED}),
    _S.MERGED: frozenset(),
    _S.LATE: frozenset(),
    _S.FAILED: frozenset(),
    _S.REJECTED: frozenset(),
    _S.SURPLUS: frozenset(),
    _S.DROPPED: frozenset(),
}

OPEN_PHASES = frozenset(AttemptPhase) - {AttemptPhase.COMMITTED, AttemptPhase.ABANDONED}
"""Phases of an attempt that has not ended."""

WORKING_PHASES = frozenset(
    {
        AttemptPhase.ADVERTISING,
        AttemptPhase.SHARING,
        AttemptPhase.COLLECTING,
        AttemptPhase.EXCHANGING,
        AttemptPhase.REDUCING,
    }
)
"""Phases of an attempt in which clients may be busy."""

BUSY_STATES = frozenset({_S.TRAINING, _S.ADVERTISED, _S.SHARED, _S.UPLOADING})
"""States in which the client still works for the attempt."""

OPEN_STATES = BUSY_STATES | {_S.REPORTED}
"""States of an assignment that has not ended."""

ENDED_JOBS = frozenset({JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED})
"""Final statuses of a job."""

MAY_ROLL_BACK = frozenset({JobStatus.RUNNING, JobStatus.PAUSED})
"""Statuses in which a job can be rolled back: it has been started, and has not ended."""

_State = TypeVar("_State", JobStatus, AttemptPhase, AssignmentState)


def require(table: Mapping[_State, frozenset[_State]], current: _State, wanted: _State) -> _State:
    """Return `wanted`; assert that the table allows it after `current`."""
    assert wanted in table[current], f"{type(current).__name__} {current} cannot become {wanted}"
    return wanted
