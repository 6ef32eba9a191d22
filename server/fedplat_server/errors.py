"""The errors of the server, as one tree below `fedplat.errors.FedplatError`.

```
ServerError
├── ConfigError            the daemon cannot start with these options; the message names what to change
├── StoreError
│   ├── StoreUnavailableError   the database does not answer; worth trying again
│   │   └── StoreFullError          it has no room; worth trying again when there is
│   ├── EnrollmentError          a client that is enrolled already, in another way
│   ├── TokenRefusedError       an enrollment token that is unknown, foreign or of no use any more
│   ├── LeadershipLostError     another daemon leads the jobs by now, or may do so
│   ├── ParticipationError      an assignment with which a client of a private job would take part too often
│   ├── PopulationChangedError  jobs or the budget of a population are others than those that were looked at
│   ├── StaleRevisionError      somebody else changed the job: our view of it is out of date
│   └── SchemaVersionError      the database's schema is not this code's; names the command that mends it
├── BlobError              bytes that are missing or damaged, or cannot be written
│   ├── BlobFullError           there is no room on the disk; worth trying again when there is
│   └── SpoolError              what was received for an attempt can be trusted no longer
├── PoolError              work that the pool of ranks cannot do
│   ├── PoolUnavailableError    there is no pool
│   ├── PoolBrokenError         a rank died, or the pool was stopped, before the work was done; worth trying again
│   └── PoolWorkError           the ranks say why they cannot do it, or what their foreign code raised
│       └── PoolMemoryError         it needs more memory than an accelerator has
├── UploadError            an upload that cannot go on (wrong offset, too many bytes, wrong digest)
└── RefusedError           a request is refused: a `Code`, its public message, and a public detail
```
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from fedplat.errors import FedplatError
from fedplat.rounds.commands import RetryWindow


class ServerError(FedplatError):
    """The base of the server's errors."""


class ConfigError(ServerError):
    """The daemon cannot start with these options."""


class StoreError(ServerError):
    """The store could not do what it was asked for."""


class StoreUnavailableError(StoreError):
    """The database does not answer."""


class StoreFullError(StoreUnavailableError):
    """The database has no room to write."""


class EnrollmentConflictError(StoreError):
    """A client that is enrolled already enrolls in another population or with another key."""


class TokenRefusedError(StoreError):
    """An enrollment token that is unknown, of another population, or no longer valid; the message names the reason."""

    def __init__(self, text: str, *, is_known: bool = True) -> None:
        super().__init__(text)
        self.is_known = is_known


class OperatorError(StoreError):
    """An operator whose name is taken, or who is not there."""


class LastAdminError(OperatorError):
    """The only operator that can make others, who may not be removed."""


class LeadershipLostError(StoreError):
    """Another daemon leads the jobs of this database by now, or may do so: what this one writes is rejected."""


class ParticipationError(StoreError):
    """An assignment with which a client would take part in more of a private job than the job's promise rests on."""


class StaleRevisionError(StoreError):
    """A job was changed by somebody else since it was read."""


class PopulationChangedError(StoreError):
    """A population's jobs, or its budget, were changed by somebody else since they were read."""


class SchemaVersionError(StoreError):
    """The database's schema is older or newer than this code."""


class BlobError(ServerError):
    """Bytes that are missing or damaged, or cannot be written."""


class BlobFullError(BlobError):
    """There is no room on the disk."""


class SpoolError(BlobError):
    """What was received for an attempt can be trusted no longer: it has to be abandoned and tried again."""


class UploadError(ServerError):
    """An upload that cannot go on."""


class PoolError(ServerError):
    """Work that the pool of ranks cannot do."""


class PoolUnavailableError(PoolError):
    """There is no pool at this data folder, or it does not answer."""


class PoolBrokenError(PoolError):
    """The pool broke off: a rank died, or the pool was stopped, before the work was done."""


class PoolWorkError(PoolError):
    """The ranks could not do the work; the message is theirs."""


class PoolMemoryError(PoolWorkError):
    """The work needs more memory than a rank's accelerator has; a CPU may have it."""


class Code(StrEnum):
    """Why a request is refused, for programs; callers get it as trailing metadata `fedplat-code`."""

    UNAUTHENTICATED = "UNAUTHENTICATED"
    NO_OPERATOR = "NO_OPERATOR"
    ROLE_TOO_LOW = "ROLE_TOO_LOW"
    TOO_MANY_LOGINS = "TOO_MANY_LOGINS"
    NAME_TAKEN = "NAME_TAKEN"
    NO_SUCH_OPERATOR = "NO_SUCH_OPERATOR"
    LAST_ADMIN = "LAST_ADMIN"
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
    NO_SUCH_VERSION = "NO_SUCH_VERSION"
    VERSION_REMOVED = "VERSION_REMOVED"
    NO_SUCH_MODEL = "NO_SUCH_MODEL"
    NO_SUCH_EVALUATOR = "NO_SUCH_EVALUATOR"
    NO_SUCH_TRAINER = "NO_SUCH_TRAINER"
    ILLEGAL_ACTION = "ILLEGAL_ACTION"
    OVER_BUDGET = "OVER_BUDGET"
    STALE_ASSIGNMENT = "STALE_ASSIGNMENT"
    WRONG_OFFSET = "WRONG_OFFSET"
    TOO_LARGE = "TOO_LARGE"
    UPLOAD_INCOMPLETE = "UPLOAD_INCOMPLETE"
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
        "this needs an operator's token, which is in an operator's profile (an admin makes one: fedplat operator add "
        "NAME --out FILE; on the server's machine: fedplat-server operator add NAME --out FILE)"
    ),
    Code.ROLE_TOO_LOW: "the operator may not do this",
    Code.TOO_MANY_LOGINS: "too many calls of this caller were refused; wait a moment",
    Code.NAME_TAKEN: "the name is taken",
    Code.NO_SUCH_OPERATOR: "there is no such operator",
    Code.LAST_ADMIN: ("this is the last operator with the role admin; add another one before you remove it"),
    Code.UNAUTHENTICATED: "the call names no client; enroll first, then open a session",
    Code.BAD_SIGNATURE: "the signature is not that of the client's key over this call",
    Code.REPLAYED: "the call was made before",
    Code.SESSION_UNKNOWN: "the session is not known here; open another one",
    Code.CHALLENGE_EXPIRED: "the nonce has expired or was used before; get another one",
    Code.CLIENT_UNKNOWN: "this server knows no such client; enroll with a ticket",
    Code.FENCED: "another process has opened a newer session as this client",
    Code.REVOKED: "an operator has revoked this client",
    Code.CERTIFICATE_UNKNOWN: "the certificate names no client of this server",
    Code.CERTIFICATE_EXPIRED: "the client's certificate has expired; renew it",
    Code.NO_CERTIFICATES: (
        "this server gives no certificates to clients, having no authority or no --mtls-listen; sign the calls"
    ),
    Code.TOKEN_UNKNOWN: "the enrollment token is not known; ask the operator for a ticket",
    Code.TOKEN_REFUSED: "the enrollment token is not valid any more; ask for another ticket",
    Code.UNSUPPORTED_VERSION: "this server speaks other protocol versions",
    Code.INVALID_REQUEST: "the request cannot be used",
    Code.INVALID_JOB_FILE: "the job file cannot be used",
    Code.INVALID_MODEL: "the model cannot be used",
    Code.NO_SUCH_CLIENT: "there is no such client",
    Code.NO_SUCH_ENROLLMENT: "there is no such enrollment token",
    Code.NO_SUCH_JOB: "there is no such job",
    Code.AMBIGUOUS_JOB: "several jobs have this name; use the job id",
    Code.NO_SUCH_VERSION: "there is no such model version",
    Code.VERSION_REMOVED: "the model file of this version is not kept any more",
    Code.NO_SUCH_MODEL: "there is no such model for this client",
    Code.NO_SUCH_EVALUATOR: "the server has no such evaluator",
    Code.NO_SUCH_TRAINER: "the server has no such trainer of its own",
    Code.ILLEGAL_ACTION: "the job's status does not allow this",
    Code.OVER_BUDGET: "the population's privacy budget does not allow this",
    Code.STALE_ASSIGNMENT: "the assignment is not open any more",
    Code.WRONG_OFFSET: "the upload does not go on where it stopped",
    Code.TOO_LARGE: "more bytes than are accepted here",
    Code.UPLOAD_INCOMPLETE: "the update has not arrived completely",
    Code.TOO_SLOW: "the stream has made no progress",
    Code.TOO_MANY_CALLS: "the caller has too many calls open",
    Code.TOO_MANY_STREAMS: "this client has too many transfers open",
    Code.TOO_MANY_REQUESTS: "too many requests; try again later",
    Code.TOO_MANY_BYTES: "too many bytes were sent for this attempt, which is over now",
    Code.TOO_MANY_UPLOADS: ("the server receives as many updates at this moment as its memory allows; try again"),
    Code.DRAINING: "the server is stopping; try again",
    Code.NO_LEADER: "no server leads the jobs at this moment; try again in some seconds",
    Code.STORE_UNAVAILABLE: "the server's database does not answer; try again",
    Code.STORAGE_FULL: "the server's disk is full; try again later",
    Code.INTERNAL: "the server failed; its log has the details under this number",
}
"""The public message of each code. Other details of errors go to the log only."""

RETRY_WINDOWS: Mapping[Code, RetryWindow] = {
    Code.UPLOAD_INCOMPLETE: RetryWindow(0.0, 1.0),
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
"""When to try again, for codes whose cause may pass."""


class RefusedError(ServerError):
    """A request is refused. `detail` is public too; `retry` is when to try again, if that may help."""

    def __init__(self, code: Code, detail: str = "", retry: RetryWindow | None = None) -> None:
        self.code = code
        self.retry = retry or RETRY_WINDOWS.get(code)
        message = PUBLIC_MESSAGES[code]
        super().__init__(f"{message}: {detail}" if detail else message)
