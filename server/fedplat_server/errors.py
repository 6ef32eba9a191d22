"""The errors of the server, as one tree below `fedplat.errors.FedplatError`.

```
ServerError
├── ConfigError                   the daemon cannot start with these options; the message names what to change
│   └── FolderInUseError          another process uses the data folder
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

from enum import Enum, unique

from fedplat.errors import FedplatError, SecureAggregationError
from fedplat.rounds.commands import RetryWindow


class ServerError(FedplatError):
    """The base of the server's errors."""


class ConfigError(ServerError):
    """The daemon cannot start with these options."""


class FolderInUseError(ConfigError):
    """Another process uses the data folder."""


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


@unique
class Code(Enum):
    """The reason that a request is refused for; callers receive its name as trailing metadata `fedplat-code`.

    `status` is the name of the gRPC status, and `message` is public: all other details of errors are only logged. One
    with a temporary cause has the window of the next try, which callers state in their words.
    """

    def __init__(self, status: str, message: str, retry: RetryWindow | None = None) -> None:
        self.status = status
        self.message = message
        self.retry = retry

    UNAUTHENTICATED = "UNAUTHENTICATED", "the call names no client; enroll first, then open a session"
    NO_OPERATOR = (
        "UNAUTHENTICATED",
        "this call needs an operator's token, which is in an operator's profile (an admin creates one with fedplat "
        "operator add NAME --to FILE, or on the server's host with fedplat-server operator add NAME --to FILE)",
    )
    ROLE_TOO_LOW = "PERMISSION_DENIED", "the operator's role does not allow this"
    TOO_MANY_LOGINS = "RESOURCE_EXHAUSTED", "too many calls of this caller were refused", RetryWindow(1.0, 10.0)
    NAME_TAKEN = "ALREADY_EXISTS", "the name is taken"
    NO_SUCH_OPERATOR = "NOT_FOUND", "there is no such operator"
    LAST_ADMIN = (
        "FAILED_PRECONDITION",
        "this is the last operator with the role admin; add another one before you remove it",
    )
    NO_SUCH_WEBHOOK = "NOT_FOUND", "there is no such webhook"
    TOO_MANY_WEBHOOKS = "FAILED_PRECONDITION", "the server has as many webhooks as it allows; remove one first"
    BAD_SIGNATURE = "UNAUTHENTICATED", "the signature is not that of the client's key over this call"
    REPLAYED = "UNAUTHENTICATED", "the call was made before"
    SESSION_UNKNOWN = "UNAUTHENTICATED", "the session is unknown; open another one"
    CHALLENGE_EXPIRED = "UNAUTHENTICATED", "the nonce has expired or was used before; request another one"
    CLIENT_UNKNOWN = "UNAUTHENTICATED", "this server has no such client; enroll with a ticket"
    FENCED = "PERMISSION_DENIED", "another process has opened a newer session as this client"
    REVOKED = "PERMISSION_DENIED", "an operator has revoked this client"
    CERTIFICATE_UNKNOWN = "UNAUTHENTICATED", "the certificate does not belong to a client of this server"
    CERTIFICATE_EXPIRED = "UNAUTHENTICATED", "the client's certificate has expired; renew it"
    NO_CERTIFICATES = (
        "FAILED_PRECONDITION",
        "this server issues no client certificates: it has no authority or no --mtls-listen; sign the calls instead, "
        "and open no port for other clients",
    )
    TOKEN_UNKNOWN = "UNAUTHENTICATED", "the enrollment token is unknown; ask the operator for a ticket"
    TOKEN_REFUSED = "PERMISSION_DENIED", "the enrollment token is no longer valid; ask the operator for another ticket"
    UNSUPPORTED_VERSION = "FAILED_PRECONDITION", "this server does not support the protocol version"
    INVALID_REQUEST = "INVALID_ARGUMENT", "the request cannot be used"
    INVALID_JOB_FILE = "INVALID_ARGUMENT", "the job file cannot be used"
    INVALID_MODEL = "INVALID_ARGUMENT", "the model cannot be used"
    NO_SUCH_CLIENT = "NOT_FOUND", "there is no such client"
    NO_SUCH_ENROLLMENT = "NOT_FOUND", "there is no such enrollment token"
    NO_SUCH_JOB = "NOT_FOUND", "there is no such job"
    AMBIGUOUS_JOB = "INVALID_ARGUMENT", "several jobs have this name; use the job id"
    NO_SUCH_ROUND = "NOT_FOUND", "there is no such round or attempt"
    NO_SUCH_VERSION = "NOT_FOUND", "there is no such model version"
    VERSION_REMOVED = "NOT_FOUND", "the model file of this version was removed"
    HELD_BY_CLIENTS = (
        "NOT_FOUND",
        "the server does not have this model: it is the mean of a decentralised job, which each of its clients stores "
        "as exports/JOB_ID.safetensors in its data folder",
    )
    NO_SUCH_MODEL = "NOT_FOUND", "there is no such model for this client"
    NO_SUCH_EVALUATOR = "FAILED_PRECONDITION", "the server has no such evaluator"
    NO_SUCH_TRAINER = "FAILED_PRECONDITION", "there is no such server trainer"
    ILLEGAL_ACTION = "FAILED_PRECONDITION", "the job's status does not allow this"
    OVER_BUDGET = "FAILED_PRECONDITION", "the population's privacy budget does not allow this"
    STALE_ASSIGNMENT = "NOT_FOUND", "the assignment is no longer open"
    WRONG_OFFSET = "OUT_OF_RANGE", "the upload does not continue at the offset where it stopped"
    TOO_LARGE = "INVALID_ARGUMENT", "more bytes than are accepted here"
    UPLOAD_INCOMPLETE = "ABORTED", "the update has not arrived completely", RetryWindow(0.0, 1.0)
    NOT_SENT_YET = "UNAVAILABLE", "the other client has not sent the file yet", RetryWindow(0.0, 1.0)
    TOO_SLOW = "DEADLINE_EXCEEDED", "the stream has made no progress", RetryWindow(1.0, 10.0)
    TOO_MANY_CALLS = "RESOURCE_EXHAUSTED", "the caller has too many calls open", RetryWindow(1.0, 5.0)
    TOO_MANY_STREAMS = "RESOURCE_EXHAUSTED", "this client has too many transfers open", RetryWindow(1.0, 5.0)
    TOO_MANY_REQUESTS = "RESOURCE_EXHAUSTED", "too many requests", RetryWindow(1.0, 10.0)
    TOO_MANY_BYTES = (
        "RESOURCE_EXHAUSTED",
        "too many bytes were sent for this attempt; the assignment has ended",
        RetryWindow(10.0, 60.0),
    )
    TOO_MANY_UPLOADS = (
        "RESOURCE_EXHAUSTED",
        "the server is receiving as many updates as its memory allows",
        RetryWindow(1.0, 10.0),
    )
    DRAINING = "UNAVAILABLE", "the server is stopping", RetryWindow(1.0, 5.0)
    NO_LEADER = "UNAVAILABLE", "no server leads the jobs at the moment", RetryWindow(0.5, 3.0)
    STORE_UNAVAILABLE = (
        "UNAVAILABLE",
        "the server's database or object store does not answer",
        RetryWindow(1.0, 5.0),
    )
    STORAGE_FULL = "RESOURCE_EXHAUSTED", "the server's disk is full", RetryWindow(5.0, 30.0)
    INTERNAL = "INTERNAL", "internal error; the server's log has the details under this number"


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
        self.retry = retry or code.retry
        super().__init__(f"{code.message}: {detail}" if detail else code.message)
