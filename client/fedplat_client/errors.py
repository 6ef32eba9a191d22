"""The errors of the client SDK, as one tree below the core's.

```
FedplatError
└── ClientError
    ├── Cancelled                  the task shall stop; `Task.progress` raises it inside the trainer
    ├── DataDirectoryError         the data directory is in use, unreadable or damaged
    ├── EnrollmentError             the server does not accept this client
    ├── TransferError              a model or an update could not be moved, or its digest is wrong
    └── ServerError                a call failed; carries `code`, the name of the gRPC status
        ├── ServerUnavailableError     no usable answer; the same call may work later
        │   ├── ServerBusyError            it has no room for this transfer at this moment
        │   ├── SessionLostError           the session is gone; the same call works in another one
    │   ├── CertificateExpiredError    the client's certificate has expired; the same call works with the next one
    │   └── UnreachableError           nobody answered at all: the connection broke, or there was none
        ├── IdentityError              the server does not accept who this client says it is
        │   ├── UnknownClientError         it knows no such client
        │   ├── FencedError                another process runs with the same identity
        │   └── RevokedError               an operator has revoked the client
        ├── IncompatibleServerError    the server speaks another version of the protocol
        └── CallRefusedError           the server understood the call and said no
```
`fedplat_client.transport` translates gRPC's errors into these; no other module sees `grpc.RpcError`.
"""

from __future__ import annotations

from fedplat.errors import FedplatError
from fedplat.wire.v1 import model_pb2


class ClientError(FedplatError):
    """The base of every error that the client SDK raises on purpose."""


class Cancelled(ClientError):
    """The task shall stop: the trainer lets it pass, and the client asks for new work.

    `reason` is the name of a reason in `model.proto` without its prefix, such as "SURPLUS" or "TRAIN_TIMEOUT";
    `text` says the same for people.
    """

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(f"{reason}: {text}" if text else reason)
        self.reason = reason
        self.text = text


class DataDirectoryError(ClientError):
    """The data directory is in use, unreadable or damaged; the message says what to do."""


class EnrollmentError(ClientError):
    """The server does not accept this client; trying again does not help."""


class TransferError(ClientError):
    """A model or an update could not be moved, or its digest is wrong."""


class CallError(ClientError):
    """A call failed; `code` is the name of the gRPC status, `retry` when the server wants to be asked again."""

    def __init__(self, code: str, text: str, retry: model_pb2.RetryWindow | None = None) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.retry = retry


class ServerUnavailableError(CallError):
    """There was no usable answer; the same call may work later."""


class ServerBusyError(ServerUnavailableError):
    """The server has no room for this transfer at this moment; the same call works in its retry window."""


class SessionLostError(ServerUnavailableError):
    """The server does not know the session, for instance because it was restarted; the client opens another one."""


class CertificateExpiredError(ServerUnavailableError):
    """The client's certificate has expired; the client gets another one."""


class UnreachableError(ServerUnavailableError):
    """The server has not answered at all: there is no connection to it, or it broke."""


class IdentityError(CallError):
    """The server does not accept who this client says it is; trying again does not help."""


class UnknownClientError(IdentityError):
    """The server knows no such client: its database is another one than when the client enrolled."""


class FencedError(IdentityError):
    """Another process runs with the same identity, and came later: this one has to stop."""


class RevokedError(IdentityError):
    """An operator has revoked this client."""


class IncompatibleServerError(CallError):
    """The server speaks another version of the protocol; the message names the versions that it supports."""


class CallRefusedError(CallError):
    """The server understood the call and said no."""
