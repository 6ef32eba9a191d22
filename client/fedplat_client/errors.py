"""The client SDK's errors, as one tree below `FedplatError`.

```
FedplatError
└── ClientError
    ├── Cancelled                  the task must stop; `Task.progress` raises it inside the trainer
    ├── DataDirectoryError         the data directory is in use, unreadable or damaged
    │   └── DataDirectoryInUseError    another client works in it now
    ├── EnrollmentError            the server does not accept this client
    ├── ExternalTaskError          a program outside of the client failed, or returned what cannot be used
    ├── ListenerError              the client's own port for its peers cannot be opened
    ├── TaskLeftError              the task continues outside of this process, which may end
    ├── TransferError              a model or an update could not be moved, or its digest is wrong
    │   └── PeerError                  a peer's file could not be fetched; carries `reason`
    └── CallError                  a call failed; carries `code`, the name of the gRPC status
        ├── ServerUnavailableError     no usable answer; the same call may work later
        │   ├── ServerBusyError            the server has no room for this transfer now
        │   ├── NotSentYetError            another client has not sent its file to the server yet
        │   ├── SessionLostError           the session is gone; the same call works in another one
        │   ├── CertificateExpiredError    the client's certificate expired; the call works with the next one
        │   └── UnreachableError           no answer at all: the connection broke, or there was none
        ├── IdentityError              the server does not accept this client's identity
        │   ├── UnknownClientError         the server has no such client
        │   ├── FencedError                another process runs with the same identity
        │   └── RevokedError               an operator has revoked the client
        ├── IncompatibleServerError    the server uses another version of the protocol
        └── CallRefusedError           the server understood the call and refused it
            ├── TooLargeError              more bytes than the server accepts there
            └── AssignmentEndedError       the assignment is no longer open, for example since its round has closed
```
`fedplat_client.transport` translates gRPC's errors into these; no other module sees `grpc.RpcError`.
"""

from __future__ import annotations

from fedplat.errors import FedplatError
from fedplat.wire.v1 import model_pb2

_NO_CONNECTION = ("failed to connect", "resolution failed", "lookup failed")
"""Parts of gRPC's texts for a connection that cannot be opened."""
_CUT_AFTER_S = 1.0
"""How long a call has waited at least if it counts as one that a load balancer has ended."""


class ClientError(FedplatError):
    """Base of the errors that the client SDK raises."""


class Cancelled(ClientError):
    """The task must stop: the trainer lets the error pass, and the client checks in again.

    `reason` is the name of a reason in `model.proto` without its prefix, such as "SURPLUS" or "TRAIN_TIMEOUT"; `text`
    is its explanation for people.
    """

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(f"{reason}: {text}" if text else reason)
        self.reason = reason
        self.text = text


class DataDirectoryError(ClientError):
    """The data directory is in use, unreadable or damaged; the message describes the remedy."""


class DataDirectoryInUseError(DataDirectoryError):
    """Another process runs as the same client."""


class ExternalTaskError(ClientError):
    """A program outside of the client failed, or a file that it returned cannot be used; the message names the file."""


class TaskLeftError(ClientError):
    """The task continues outside of this process, which may end; the client that gets it again reports its result."""


class EnrollmentError(ClientError):
    """The server does not accept this client; trying again does not help."""


class TransferError(ClientError):
    """A model or an update could not be moved, or its digest is wrong."""


class PeerError(TransferError):
    """A peer's file could not be fetched.

    `reason` is "TOO_LARGE", "WRONG_SIZE", "WRONG_DIGEST", "REFUSED" (the peer refuses the request for good) or
    "TIMEOUT" (the deadline passed; the text has the last error).
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class ListenerError(ClientError):
    """The client's own port for its peers cannot be opened."""


class CallError(ClientError):
    """A call failed: `code` is the name of the gRPC status, `retry` the server's retry window if it sent one.

    `error_code` is the server's own code, such as "REVOKED"; empty if another program answered the call.
    """

    error_code = ""

    def __init__(self, code: str, text: str, retry: model_pb2.RetryWindow | None = None) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text
        self.retry = retry


class ServerUnavailableError(CallError):
    """There was no usable answer; the same call may work later."""


class ServerBusyError(ServerUnavailableError):
    """The server has no room for this transfer now; the same call works in its retry window."""


class NotSentYetError(ServerUnavailableError):
    """Another client has not sent its file to the server yet; the same call may work later."""


class SessionLostError(ServerUnavailableError):
    """The server does not have the session, for example after a restart; the client opens another one."""


class CertificateExpiredError(ServerUnavailableError):
    """The client's certificate has expired; the client requests another one."""


class UnreachableError(ServerUnavailableError):
    """The server did not answer: there is no connection to it, or the connection broke."""

    def was_cut(self, lasted_s: float) -> bool:
        """Return whether the connection of a call that has lasted some time was there, and broke while it waited."""
        text = str(self).casefold()
        return lasted_s >= _CUT_AFTER_S and not any(part in text for part in _NO_CONNECTION)


class IdentityError(CallError):
    """The server does not accept this client's identity; trying again does not help."""


class UnknownClientError(IdentityError):
    """The server has no such client: its database is not the one that this client enrolled in."""


class FencedError(IdentityError):
    """Another process started later with the same identity; this one must stop."""


class RevokedError(IdentityError):
    """An operator has revoked this client: its key is never accepted again."""

    def __init__(self, code: str, text: str, retry: model_pb2.RetryWindow | None = None) -> None:
        advice = "to take part again, enroll as another client, with a new ticket and another data directory"
        super().__init__(code, f"{text}; {advice}", retry)


class IncompatibleServerError(CallError):
    """The server uses another version of the protocol; the message lists the versions that it supports."""


class CallRefusedError(CallError):
    """The server understood the call and refused it."""


class TooLargeError(CallRefusedError):
    """More bytes were announced than the server accepts there; the text has both numbers."""


class AssignmentEndedError(CallRefusedError):
    """The assignment that the call names is no longer open at the server; the text ends with the reason."""
