"""The errors of the server, as one tree below `fedplat.errors.FedplatError`.

```
ServerError
├── ConfigError                   the daemon cannot start with these options; the message names what to change
├── StoreError
│   ├── StoreUnavailableError     the database does not answer; retry
│   │   ├── StoreFullError        the database has no room; retry when it has
│   │   └── ConflictError         the database rolled a transaction back because of another one; retry at once
│   ├── EnrollmentConflictError   the client is already enrolled with other properties
│   ├── TokenRefusedError         the enrollment token is unknown, of another population or no longer valid
│   ├── OperatorError             the operator's name is taken, or there is no such operator
│   │   └── LastAdminError        the last admin may not be removed
│   ├── WebhookError              there are too many webhooks, or there is no such webhook
│   ├── LeadershipLostError       another daemon leads the jobs, or may lead them
│   ├── BudgetUnknownError        what is spent of a privacy budget cannot be computed; the message names the job
│   ├── ParticipationError        the assignment would exceed a client's participations in a private job
│   ├── PopulationChangedError    the jobs or the budget of a population changed since they were read
│   ├── StaleRevisionError        the job changed since it was read
│   └── SchemaVersionError        the schema is not that of this code; the message names the command to run
├── BlobError                     bytes are missing or damaged, or cannot be written
│   ├── BlobFullError             the disk or the object store is full; retry when it has room
│   ├── BlobMissingError          there is no such blob in the object store
│   ├── BlobUnavailableError      the object store does not answer; retry
│   └── SpoolError                the updates received for an attempt can no longer be trusted
├── PoolError                     the worker pool cannot do a task
│   ├── PoolUnavailableError      there is no pool
│   ├── PoolBrokenError           a rank died or the pool was stopped before the task was done; retry
│   └── PoolWorkError             the task failed on the ranks; the message is theirs or that of user code
│       └── PoolMemoryError       the task needs more memory than an accelerator has
├── FlowerRunError                a Flower app failed, or its process ended; the message is that of the app
├── UploadError                   the upload cannot continue (wrong offset, too many bytes, wrong digest)
└── RefusedError                  a request is refused: a `Code`, its public message and a public detail
```

`LostRankError` (`workers/broadcast.py`) is no part of the tree: it is a `ConnectionError` between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from fedplat.errors import FedplatError, SecureAggregationError
from fedplat.rounds.commands import RetryWindow


class ServerError(FedplatError):
    """The base of the server's errors."""


class ConfigError(ServerError):
    """The daemon cannot start with these options."""


class StoreError(ServerError):
    """The base of the database's errors."""


class StoreUnavailableError(StoreError):
    """The database does not answer."""


class StoreFullError(StoreUnavailableError):
    """The database has no room to write."""


class ConflictError(StoreUnavailableError):
    """The database rolled a transaction back because of another one: it may be repeated at once."""


class EnrollmentConflictError(StoreError):
    """An enrollment of a client that is already enrolled, in another population or with another key."""


class TokenRefusedError(StoreError):
    """An enrollment token that is unknown, of another population, or no longer valid; the message names the reason."""

    def __init__(self, text: str, *, is_known: bool = True) -> None:
        super().__init__(text)
        self.is_known = is_known


class OperatorError(StoreError):
    """The operator's name is taken, or there is no such operator."""


class LastAdminError(OperatorError):
    """The last admin, the only operator that can add others, may not be removed."""


class WebhookError(StoreError):
    """There are too many webhooks, or there is no such webhook."""


class LeadershipLostError(StoreError):
    """Another daemon leads the jobs of this database, or may lead them: writes of this daemon are rejected."""


class BudgetUnknownError(StoreError):
    """What is spent of a privacy budget cannot be computed, because a job's file is unreadable."""


class ParticipationError(StoreError):
    """The assignment would exceed the participations of a client that a private job's guarantee assumes."""


class StaleRevisionError(StoreError):
    """The job was changed by another process since it was read."""


class PopulationChangedError(StoreError):
    """The jobs or the budget of a population were changed by another process since they were read."""


class SchemaVersionError(StoreError):
    """The database's schema is older or newer than this code."""


class BlobError(ServerError):
    """Bytes are missing or damaged, or cannot be written."""


class BlobFullError(BlobError):
    """The disk or the object store is full."""


class BlobMissingError(BlobError):
    """There is no such blob in the object store."""


class BlobUnavailableError(BlobError):
    """The object store does not answer."""


class SpoolError(BlobError):
    """The updates received for an attempt can no longer be trusted: it is abandoned and repeated."""


class UploadError(ServerError):
    """The upload cannot continue."""


class PoolError(ServerError):
    """The worker pool cannot do a task."""


class FlowerRunError(ServerError):
    """A Flower app failed, or its process ended."""


class PoolUnavailableError(PoolError):
    """There is no pool for this data folder, or it does not answer."""


class PoolBrokenError(PoolError):
    """A rank died or the pool was stopped before the task was done."""


class PoolWorkError(PoolError):
    """The task failed on the ranks; the message is theirs."""


class PoolMemoryError(PoolWorkError):
    """The task needs more memory than a rank's accelerator has; a CPU may have enough."""


class Code(StrEnum):
    """The reason that a request is refused for, as a code; callers receive it as trailing metadata `fedplat-code`."""

    UNAUTHENTICATED = "UNAUTHENTICATED"
    NO_OPERATOR = "NO_OPERATOR"
    ROLE_TOO_LOW = "ROLE_TOO_LOW"
    TOO_MANY_LOGINS = "TOO_MANY_LOGINS"
    NAME_TAKEN = "NAME_TAKEN"
    NO_SUCH_OPERATOR = "NO_SUCH_OPERATOR"
    LAST_ADMIN = "LAST_ADMIN"
    NO_SUCH_WEBHOOK = "NO_SUCH_WEBHOOK"
    TOO_MANY_WEBHOOKS = "TOO_MANY_WEBHOOKS"
    BAD_SIGNATURE = "BAD_SIGNATURE"
    REPLAYED = "REPLAYED"
    SESSION_UNKNOWN = "SESSION_UNKNOWN"
    CHALLENGE_EXPIRED = "CHALLENGE_EXPIRED"
    CLIENT_UNKNOWN = "CLIENT_UNKNOWN"
    FENCED = "FENCED"
    REVOKED = "REVOKED"
    CERTIFICATE_UNKNOWN = "CERTIFICATE_UNKNOWN"
    CERTIFICATE_EXPIRED = "CERTIFICATE_EXPIRED"
    NO_CERTIFICATES = "NO_CERTIFICATES"
    TOKEN_UNKNOWN = "TOKEN_UNKNOWN"
    TOKEN_REFUSED = "TOKEN_REFUSED"
    UNSUPPORTED_VERSION = "UNSUPPORTED_VERSION"
    INVALID_REQUEST = "INVALID_REQUEST"
    INVALID_JOB_FILE = "INVALID_JOB_FILE"
    INVALID_MODEL = "INVALID_MODEL"
    NO_SUCH_CLIENT = "NO_SUCH_CLIENT"
    NO_SUCH_ENROLLMENT = "NO_SUCH_ENROLLMENT"
    NO_SUCH_JOB = "NO_SUCH_JOB"
    AMBIGUOUS_JOB = "AMBIGUOUS_JOB"
    NO_SUCH_ROUND = "NO_SUCH_ROUND"
    NO_SUCH_VERSION = "NO_SUCH_VERSION"
    VERSION_REMOVED = "VERSION_REMOVED"
    HELD_BY_CLIENTS = "HELD_BY_CLIENTS"
    NO_SUCH_MODEL = "NO_SUCH_MODEL"
    NO_SUCH_EVALUATOR = "NO_SUCH_EVALUATOR"
    NO_SUCH_TRAINER = "NO_SUCH_TRAINER"
    ILLEGAL_ACTION = "ILLEGAL_ACTION"
    OVER_BUDGET = "OVER_BUDGET"
    STALE_ASSIGNMENT = "STALE_ASSIGNMENT"
    WRONG_OFFSET = "WRONG_OFFSET"
    TOO_LARGE = "TOO_LARGE"
    UPLOAD_INCOMPLETE = "UPLOAD_INCOMPLETE"
    NOT_SENT_YET = "NOT_SENT_YET"
    TOO_SLOW = "TOO_SLOW"
    TOO_MANY_CALLS = "TOO_MANY_CALLS"
    TOO_MANY_STREAMS = "TOO_MANY_STREAMS"
    TOO_MANY_REQUESTS = "TOO_MANY_REQUESTS"
    TOO_MANY_BYTES = "TOO_MANY_BYTES"
    TOO_MANY_UPLOADS = "TOO_MANY_UPLOADS"
    DRAINING = "DRAINING"
    NO_LEADER = "NO_LEADER"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    STORAGE_FULL = "STORAGE_FULL"
    INTERNAL = "INTERNAL"


PUBLIC_MESSAGES: Mapping[Code, str] = {
    Code.NO_OPERATOR: (
        "this call needs an operator's token, which is in an operator's profile (an admin creates one with fedplat "
        "operator add NAME --out FILE, or on the server's host with fedplat-server operator add NAME --out FILE)"
    ),
    Code.ROLE_TOO_LOW: "the operator's role does not allow this",
    Code.TOO_MANY_LOGINS: "too many calls of this caller were refused; try again later",
    Code.NAME_TAKEN: "the name is taken",
    Code.NO_SUCH_OPERATOR: "there is no such operator",
    Code.LAST_ADMIN: ("this is the last operator with the role admin; add another one before you remove it"),
    Code.NO_SUCH_WEBHOOK: "there is no such webhook",
    Code.TOO_MANY_WEBHOOKS: "the server has as many webhooks as it allows; remove one first",
    Code.UNAUTHENTICATED: "the call names no client; enroll first, then open a session",
    Code.BAD_SIGNATURE: "the signature is not that of the client's key over this call",
    Code.REPLAYED: "the call was made before",
    Code.SESSION_UNKNOWN: "the session is unknown; open another one",
    Code.CHALLENGE_EXPIRED: "the nonce has expired or was used before; request another one",
    Code.CLIENT_UNKNOWN: "this server has no such client; enroll with a ticket",
    Code.FENCED: "another process has opened a newer session as this client",
    Code.REVOKED: "an operator has revoked this client",
    Code.CERTIFICATE_UNKNOWN: "the certificate does not belong to a client of this server",
    Code.CERTIFICATE_EXPIRED: "the client's certificate has expired; renew it",
    Code.NO_CERTIFICATES: (
        "this server issues no client certificates: it has no authority or no --mtls-listen; sign "
        "the calls instead, and open no port for other clients"
    ),
    Code.TOKEN_UNKNOWN: "the enrollment token is unknown; ask the operator for a ticket",
    Code.TOKEN_REFUSED: "the enrollment token is no longer valid; ask the operator for another ticket",
    Code.UNSUPPORTED_VERSION: "this server does not support the protocol version",
    Code.INVALID_REQUEST: "the request cannot be used",
    Code.INVALID_JOB_FILE: "the job file cannot be used",
    Code.INVALID_MODEL: "the model cannot be used",
    Code.NO_SUCH_CLIENT: "there is no such client",
    Code.NO_SUCH_ENROLLMENT: "there is no such enrollment token",
    Code.NO_SUCH_JOB: "there is no such job",
    Code.AMBIGUOUS_JOB: "several jobs have this name; use the job id",
    Code.NO_SUCH_ROUND: "there is no such round or attempt",
    Code.NO_SUCH_VERSION: "there is no such model version",
    Code.VERSION_REMOVED: "the model file of this version was removed",
    Code.HELD_BY_CLIENTS: (
        "the server does not have this model: it is the mean of a decentralised job, which each of its clients stores "
        "as exports/JOB_ID.safetensors in its data folder"
    ),
    Code.NO_SUCH_MODEL: "there is no such model for this client",
    Code.NO_SUCH_EVALUATOR: "the server has no such evaluator",
    Code.NO_SUCH_TRAINER: "there is no such server trainer",
    Code.ILLEGAL_ACTION: "the job's status does not allow this",
    Code.OVER_BUDGET: "the population's privacy budget does not allow this",
    Code.STALE_ASSIGNMENT: "the assignment is no longer open",
    Code.WRONG_OFFSET: "the upload does not continue at the offset where it stopped",
    Code.TOO_LARGE: "more bytes than are accepted here",
    Code.UPLOAD_INCOMPLETE: "the update has not arrived completely",
    Code.NOT_SENT_YET: "the other client has not sent the file yet; try again",
    Code.TOO_SLOW: "the stream has made no progress",
    Code.TOO_MANY_CALLS: "the caller has too many calls open",
    Code.TOO_MANY_STREAMS: "this client has too many transfers open",
    Code.TOO_MANY_REQUESTS: "too many requests; try again later",
    Code.TOO_MANY_BYTES: "too many bytes were sent for this attempt; the assignment has ended",
    Code.TOO_MANY_UPLOADS: "the server is receiving as many updates as its memory allows; try again",
    Code.DRAINING: "the server is stopping; try again",
    Code.NO_LEADER: "no server leads the jobs at the moment; try again in a few seconds",
    Code.STORE_UNAVAILABLE: "the server's database or object store does not answer; try again",
    Code.STORAGE_FULL: "the server's disk is full; try again later",
    Code.INTERNAL: "internal error; the server's log has the details under this number",
}
"""The public message of each code. All other details of errors are only logged."""

RETRY_WINDOWS: Mapping[Code, RetryWindow] = {
    Code.UPLOAD_INCOMPLETE: RetryWindow(0.0, 1.0),
    Code.NOT_SENT_YET: RetryWindow(0.0, 1.0),
    Code.TOO_SLOW: RetryWindow(1.0, 10.0),
    Code.TOO_MANY_CALLS: RetryWindow(1.0, 5.0),
    Code.TOO_MANY_STREAMS: RetryWindow(1.0, 5.0),
    Code.TOO_MANY_REQUESTS: RetryWindow(1.0, 10.0),
    Code.TOO_MANY_BYTES: RetryWindow(10.0, 60.0),
    Code.TOO_MANY_UPLOADS: RetryWindow(1.0, 10.0),
    Code.TOO_MANY_LOGINS: RetryWindow(1.0, 10.0),
    Code.DRAINING: RetryWindow(1.0, 5.0),
    Code.NO_LEADER: RetryWindow(0.5, 3.0),
    Code.STORE_UNAVAILABLE: RetryWindow(1.0, 5.0),
    Code.STORAGE_FULL: RetryWindow(5.0, 30.0),
}
"""The retry windows of codes with a temporary cause."""


def is_lasting(exc: Exception) -> bool:
    """Return whether an attempt that failed with this error would fail with it again.

    What a disk, an object store, a database or a pool of workers prevents, another try may do.
    """
    if isinstance(exc, FlowerRunError | PoolWorkError):
        return not isinstance(exc, PoolMemoryError)
    if isinstance(exc, SecureAggregationError):
        return not exc.clients  # they are not drawn again
    return not isinstance(exc, ServerError | OSError | MemoryError)


class RefusedError(ServerError):
    """A request is refused. `detail` is public too; `retry` is the window for a retry that may succeed, else None."""

    def __init__(self, code: Code, detail: str = "", retry: RetryWindow | None = None) -> None:
        self.code = code
        self.retry = retry or RETRY_WINDOWS.get(code)
        message = PUBLIC_MESSAGES[code]
        super().__init__(f"{message}: {detail}" if detail else message)
