"""The catalogue of what a caller may be told: code, gRPC status, public sentence. Details go to the log only."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import grpc

from fedplat.rounds.commands import RetryWindow
from fedplat_server.errors import ServerError


class Code(StrEnum):
    """A machine-readable refusal; sent as trailing metadata `fedplat-code`."""

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
    NO_SUCH_ENROLMENT = "NO_SUCH_ENROLMENT"
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


_S = grpc.StatusCode
CATALOGUE: Mapping[Code, tuple[grpc.StatusCode, str]] = {
    Code.NO_OPERATOR: (
        _S.UNAUTHENTICATED,
        "this needs an operator's token, which is in an operator's profile (an admin makes one: fedplat operator add "
        "NAME --out FILE; on the server's machine: fedplat-server operator add NAME --out FILE)",
    ),
    Code.ROLE_TOO_LOW: (_S.PERMISSION_DENIED, "the operator may not do this"),
    Code.TOO_MANY_LOGINS: (_S.RESOURCE_EXHAUSTED, "too many calls of this caller were refused; wait a moment"),
    Code.NAME_TAKEN: (_S.ALREADY_EXISTS, "the name is taken"),
    Code.NO_SUCH_OPERATOR: (_S.NOT_FOUND, "there is no such operator"),
    Code.LAST_ADMIN: (
        _S.FAILED_PRECONDITION,
        "this is the last operator with the role admin; add another one before you remove it",
    ),
    Code.UNAUTHENTICATED: (_S.UNAUTHENTICATED, "the call does not say who makes it; enrol first, then open a session"),
    Code.BAD_SIGNATURE: (_S.UNAUTHENTICATED, "the signature is not that of the client's key over this call"),
    Code.REPLAYED: (_S.UNAUTHENTICATED, "the call was made before"),
    Code.SESSION_UNKNOWN: (_S.UNAUTHENTICATED, "the session is not known here; open another one"),
    Code.CHALLENGE_EXPIRED: (_S.UNAUTHENTICATED, "the nonce has expired or was used before; get another one"),
    Code.CLIENT_UNKNOWN: (_S.UNAUTHENTICATED, "this server knows no such client; enrol with a ticket"),
    Code.FENCED: (_S.PERMISSION_DENIED, "another process has opened a newer session as this client"),
    Code.REVOKED: (_S.PERMISSION_DENIED, "an operator has revoked this client"),
    Code.CERTIFICATE_UNKNOWN: (_S.UNAUTHENTICATED, "the certificate names no client of this server"),
    Code.CERTIFICATE_EXPIRED: (_S.UNAUTHENTICATED, "the client's certificate has expired; renew it"),
    Code.NO_CERTIFICATES: (
        _S.FAILED_PRECONDITION,
        "this server gives no certificates to clients, having no authority or no --mtls-listen; sign the calls",
    ),
    Code.TOKEN_UNKNOWN: (_S.UNAUTHENTICATED, "the enrolment token is not known; ask the operator for a ticket"),
    Code.TOKEN_REFUSED: (_S.PERMISSION_DENIED, "nobody enrols with this token any more; ask for another ticket"),
    Code.UNSUPPORTED_VERSION: (_S.FAILED_PRECONDITION, "this server speaks other protocol versions"),
    Code.INVALID_REQUEST: (_S.INVALID_ARGUMENT, "the request cannot be used"),
    Code.INVALID_JOB_FILE: (_S.INVALID_ARGUMENT, "the job file cannot be used"),
    Code.INVALID_MODEL: (_S.INVALID_ARGUMENT, "the model cannot be used"),
    Code.NO_SUCH_CLIENT: (_S.NOT_FOUND, "there is no such client"),
    Code.NO_SUCH_ENROLMENT: (_S.NOT_FOUND, "there is no such enrolment token"),
    Code.NO_SUCH_JOB: (_S.NOT_FOUND, "there is no such job"),
    Code.AMBIGUOUS_JOB: (_S.INVALID_ARGUMENT, "several jobs have this name; use the job id"),
    Code.NO_SUCH_VERSION: (_S.NOT_FOUND, "there is no such model version"),
    Code.VERSION_REMOVED: (_S.NOT_FOUND, "the model file of this version is not kept any more"),
    Code.NO_SUCH_MODEL: (_S.NOT_FOUND, "there is no such model for this client"),
    Code.NO_SUCH_EVALUATOR: (_S.FAILED_PRECONDITION, "the server has no such evaluator"),
    Code.NO_SUCH_TRAINER: (_S.FAILED_PRECONDITION, "the server has no such trainer of its own"),
    Code.ILLEGAL_ACTION: (_S.FAILED_PRECONDITION, "the job's status does not allow this"),
    Code.OVER_BUDGET: (_S.FAILED_PRECONDITION, "the population's privacy budget does not allow this"),
    Code.STALE_ASSIGNMENT: (_S.NOT_FOUND, "the assignment is not open any more"),
    Code.WRONG_OFFSET: (_S.OUT_OF_RANGE, "the upload does not go on where it stopped"),
    Code.TOO_LARGE: (_S.INVALID_ARGUMENT, "more bytes than are accepted here"),
    Code.UPLOAD_INCOMPLETE: (_S.ABORTED, "the update has not arrived completely"),
    Code.TOO_SLOW: (_S.DEADLINE_EXCEEDED, "the stream has made no progress"),
    Code.TOO_MANY_CALLS: (_S.RESOURCE_EXHAUSTED, "the caller has too many calls open"),
    Code.TOO_MANY_STREAMS: (_S.RESOURCE_EXHAUSTED, "this client has too many transfers open"),
    Code.TOO_MANY_REQUESTS: (_S.RESOURCE_EXHAUSTED, "too many requests; try again later"),
    Code.TOO_MANY_BYTES: (_S.RESOURCE_EXHAUSTED, "too many bytes were sent for this attempt, which is over now"),
    Code.TOO_MANY_UPLOADS: (
        _S.RESOURCE_EXHAUSTED,
        "the server receives as many updates at this moment as its memory allows; try again",
    ),
    Code.DRAINING: (_S.UNAVAILABLE, "the server is stopping; try again"),
    Code.NO_LEADER: (_S.UNAVAILABLE, "no server leads the jobs at this moment; try again in some seconds"),
    Code.STORE_UNAVAILABLE: (_S.UNAVAILABLE, "the server's database does not answer; try again"),
    Code.STORAGE_FULL: (_S.RESOURCE_EXHAUSTED, "the server's disk is full; try again later"),
    Code.INTERNAL: (_S.INTERNAL, "the server failed; its log has the details under this number"),
}
"""Every code with its status and what everybody may read."""

RETRY: Mapping[Code, RetryWindow] = {
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
"""When to come back, for what may be otherwise then: every code whose status is UNAVAILABLE or RESOURCE_EXHAUSTED."""


class RefusedError(ServerError):
    """A caller is refused; `detail` is public too. `retry` is when to come back, if that helps."""

    def __init__(self, code: Code, detail: str = "", retry: RetryWindow | None = None) -> None:
        self.code = code
        self.retry = retry or RETRY.get(code)
        self.status, sentence = CATALOGUE[code]
        super().__init__(f"{sentence}: {detail}" if detail else sentence)
