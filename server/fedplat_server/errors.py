"""The errors of the server, as one tree below `fedplat.errors.FedplatError`.

```
ServerError
├── ConfigError            the daemon cannot start as it was told to; says what to change
├── StoreError
│   ├── StoreUnavailableError   the database does not answer; worth trying again
│   │   └── StoreFullError          it has no room; worth trying again when there is
│   ├── EnrolmentError          a client that is enrolled already, in another way
│   ├── TokenRefusedError       an enrolment token that is unknown, foreign or of no use any more
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
└── RefusedError           what a caller is told: a code of the catalogue in `rpc.errors`, and why
```
"""

from __future__ import annotations

from fedplat.errors import FedplatError


class ServerError(FedplatError):
    """The base of the server's errors."""


class ConfigError(ServerError):
    """The daemon cannot start as it was told to."""


class StoreError(ServerError):
    """The store could not do what it was asked for."""


class StoreUnavailableError(StoreError):
    """The database does not answer."""


class StoreFullError(StoreUnavailableError):
    """The database has no room to write."""


class EnrolmentError(StoreError):
    """A client that is enrolled already enrols in another population or with another key."""


class TokenRefusedError(StoreError):
    """An enrolment token that is unknown, of another population, or of no use any more; says which."""

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
