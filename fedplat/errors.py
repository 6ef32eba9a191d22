"""The errors of the core, as one tree.

```
FedplatError
├── JobFileError      a job file that cannot be used: names the key, the value and what was expected
├── ModelError        bytes that are no model, or a model that does not fit its schema
├── CodecError        a compressed vector that cannot be read, or a vector that cannot be compressed
├── UserCodeError     a function of the user's own that is not found, or raised an exception
├── LabelError        an expression over client labels that cannot be read
├── DataError         data for a simulation that is missing, or does not fit what shall be done with it
├── JournalError      a simulation that cannot go on from what was written of it
├── EngineError       local training in a simulation that failed, or an engine that cannot do what is asked
├── TrainingError     training on the server's own data that cannot be done as its trainer is
├── TicketError       a line that is no ticket, or a damaged one
├── MissingExtraError an optional package is needed and not installed
├── PrivacyLimitError a training that would cost more privacy than the owner of the data allows
├── ProfileError      an operator's profile or certificates that are missing or cannot be used
└── ServerUnreachableError, ServerRefusedError   of calls of an operator (fedplat.admin)
```
Each distribution above the core has one base error of its own below `FedplatError`: `fedplat_server.errors`
and `fedplat_client.errors` draw theirs.
"""

from __future__ import annotations


class FedplatError(Exception):
    """The base of every error that fedplat raises on purpose."""


class JobFileError(FedplatError):
    """A job file that cannot be used; the message lists every mistake that was found."""


class ModelError(FedplatError):
    """Bytes that are no model, or a model that does not fit its schema."""


class UserCodeError(FedplatError):
    """User code (a function that a file or an option names) that is not found, or raised an exception."""


class CodecError(FedplatError):
    """A compressed vector that cannot be read, or a vector that cannot be compressed."""


class LabelError(FedplatError):
    """An expression over client labels that cannot be read."""


class DataError(FedplatError):
    """Data for a simulation that is missing, or does not fit what shall be done with it."""


class JournalError(FedplatError):
    """A simulation that cannot go on from what was written of it."""


class EngineError(FedplatError):
    """Local training in a simulation that failed, or that an engine cannot do."""


class TrainingError(FedplatError):
    """Training on the server's own data that cannot be done as its trainer, or its data, are; the same on all ranks."""


class TicketError(FedplatError):
    """A line that is no ticket of an operator; the message does not show it."""


class MissingExtraError(FedplatError):
    """An optional package is needed; the message says what to install."""


class PrivacyLimitError(FedplatError):
    """A training that would cost more privacy than the owner of the data allows: nothing of it is done."""


class ProfileError(FedplatError):
    """An operator's profile, or the certificates that it trusts, are missing or cannot be used."""


class ServerUnreachableError(FedplatError):
    """No server answers at the address.

    `reason` is the short form for a sentence. `is_lasting`: trying again does not help, as with a wrong certificate.
    """

    def __init__(self, message: str, *, reason: str = "", is_lasting: bool = False) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.is_lasting = is_lasting


class ServerRefusedError(FedplatError):
    """The server answered, and said no; the message is the server's reason."""
