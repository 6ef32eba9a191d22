"""The errors of the core, as one tree.

```
FedplatError
├── JobFileError      an invalid job file: names the key, the value and what was expected
├── ModelError        bytes that do not encode a model, or a model that does not fit its schema
├── CodecError        a compressed vector that cannot be read, or a vector that cannot be compressed
├── UserCodeError     a user's function that is not found or raised an exception
├── PluginError       an object that cannot be used as a plugin of its kind
├── FlowerError       a Flower app that cannot be used, or that failed
├── LabelError        an invalid expression over client labels
├── DataError         data for a simulation or a training that is missing or unsuitable
├── ReplayError       a simulation that cannot resume from its run folder
├── PausedError       a simulation that was paused after a round, as requested, and can be resumed
├── NoProgressError   a simulation that ended before its job was done, since no further round could be expected
├── EngineError       local training in a simulation failed: a worker was lost, or a cluster does not answer
│   └── UnsuitableEngineError   an engine that does not support the learner or its options
├── TrainingError     training on the server's own data failed, because of its trainer or its data
├── TicketError       a malformed or damaged ticket
├── MissingExtraError a required optional package is not installed
├── PrivacyLimitError a training that would cost more privacy than the owner of the data allows
├── SecureAggregationError   a message of secure aggregation that is invalid, or that a participant must not accept
├── GossipError       a message of a decentralised job that is invalid, or that a silo must not accept
├── ProcedureError    a procedure, a reply or a table that does not fit what was declared
├── TrackerError      an experiment tracker (MLflow, TensorBoard) that does not answer or refuses a run
├── ProfileError      an operator's profile or certificates are missing or invalid
│   └── MissingProfileError   there is neither a profile nor a token: the operator is not logged in
└── ServerUnreachableError, ServerRefusedError   from calls of an operator (fedplat.admin)
```
Each distribution above the core has one base error of its own below `FedplatError`; see `fedplat_server.errors` and
`fedplat_client.errors`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_CODE = re.compile(r"[A-Z][A-Z_]{1,40}")


class FedplatError(Exception):
    """The base of every error that fedplat raises on purpose."""


class JobFileError(FedplatError):
    """An invalid job file; the message lists every mistake that was found."""


class ModelError(FedplatError):
    """Bytes that do not encode a model, or a model that does not fit its schema."""


class UserCodeError(FedplatError):
    """User code (a function that a file or an option names) that is not found or raised an exception."""


class PluginError(FedplatError):
    """An object that cannot be used as a plugin of its kind."""


class FlowerError(FedplatError):
    """A Flower app that cannot be used, or that failed."""


class CodecError(FedplatError):
    """A compressed vector that cannot be read, or a vector that cannot be compressed."""


class LabelError(FedplatError):
    """An invalid expression over client labels."""


class DataError(FedplatError):
    """Data for a simulation or a training that is missing or unsuitable."""


class ReplayError(FedplatError):
    """A simulation that cannot resume from its run folder."""


class PausedError(FedplatError):
    """A simulation was paused after a round, as requested; its run folder has a checkpoint to resume from."""


class NoProgressError(FedplatError):
    """A simulation ended before its job was done, since the job failed or paused, or no round could be expected."""


class EngineError(FedplatError):
    """Local training in a simulation failed: a worker was lost, or a cluster does not answer."""


class UnsuitableEngineError(EngineError):
    """An engine does not support the learner or its options; the message names engines that do."""


class TrainingError(FedplatError):
    """Training on the server's own data failed, because of its trainer or its data; raised alike on all ranks."""


class TicketError(FedplatError):
    """A malformed or damaged ticket; the message does not show it."""


class MissingExtraError(FedplatError):
    """A required optional package is not installed; the message names what to install."""


class PrivacyLimitError(FedplatError):
    """A training that would cost more privacy than the owner of the data allows; it is not started."""


class SecureAggregationError(FedplatError):
    """A message of secure aggregation that is invalid, or that a participant must not accept for its own safety.

    `clients` are the ids of the clients whose messages are the cause, if the server knows them.
    """

    def __init__(self, message: str, *, clients: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.clients = tuple(clients)


class GossipError(FedplatError):
    """A message of a decentralised job that is invalid, or that a silo must not accept."""


class ProcedureError(FedplatError):
    """A procedure, a reply of a site or a table that does not fit what was declared; texts never have values of it."""


class TrackerError(FedplatError):
    """An experiment tracker that does not answer, or that refuses a run."""


class ProfileError(FedplatError):
    """An operator's profile, or the certificates that it trusts, are missing or invalid."""


class MissingProfileError(ProfileError):
    """There is neither a profile nor a token: the operator is not logged in."""


class ServerUnreachableError(FedplatError):
    """No server answers at the address.

    `reason` is a short form of the message, for use within a sentence. `is_lasting` is true if a retry does not help,
    as with a wrong certificate.
    """

    def __init__(self, message: str, *, reason: str = "", is_lasting: bool = False) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.is_lasting = is_lasting


class ServerRefusedError(FedplatError):
    """The server refused the call; the message is the server's reason.

    `code` is the server's error code, such as "ROLE_TOO_LOW"; empty if another program answered the call.
    """

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


def refer_to_docs(code: str) -> str:
    """Return the end of a message, ` (docs: E-NAME)`: the entry of a server's error code in docs/errors.md.

    Empty for a text that cannot be a code, since a server sends it.
    """
    return f" (docs: E-{code})" if _CODE.fullmatch(code) else ""


USAGE_ERRORS = (
    JobFileError,
    LabelError,
    UserCodeError,
    PluginError,
    FlowerError,
    DataError,
    ReplayError,
    UnsuitableEngineError,
    MissingExtraError,
    TrackerError,
    TicketError,
    ProfileError,
)
"""Mistakes in what the user gives a command: options, files, code and packages. It ends with the status 2 then."""
