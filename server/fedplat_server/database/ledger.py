"""Records of private releases, and of what the budget of a population allows."""

from __future__ import annotations

import dataclasses

import msgspec

from fedplat.privacy import Charge, Mechanism
from fedplat.rounds.states import ENDED_JOBS, JobStatus


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerRow:
    """A release: a committed version of a private job. It does not contain the number of clients that took part."""

    version: int
    round: int
    mechanism: Mechanism
    unix_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """The privacy loss that all private jobs of a population may have together."""

    epsilon: float
    delta: float


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """The releases of a job so far, and all that it may make (`planned`; None: the job is not private)."""

    job_id: str
    status: JobStatus
    planned: Charge | None
    released: tuple[Charge, ...] = ()

    @property
    def is_private(self) -> bool:
        """Whether the job publishes private releases."""
        return self.planned is not None

    @property
    def has_ended(self) -> bool:
        """Whether the job will make no more releases."""
        return self.status in ENDED_JOBS

    @property
    def charges(self) -> tuple[Charge, ...]:
        """What counts against a budget: all planned releases, or of a job that has ended those that it made."""
        return self.released if self.planned is None or self.has_ended else (self.planned,)


@dataclasses.dataclass(frozen=True, slots=True)
class Population:
    """A population's budget, if it has one, and the accounts of its jobs in the order of their creation.

    `revision` grows with each new job and each change of the budget; it begins at 0.
    """

    name: str
    revision: int
    budget: Budget | None
    accounts: tuple[Account, ...]

    @property
    def charges(self) -> tuple[Charge, ...]:
        """What its jobs charge to the budget."""
        return tuple(charge for account in self.accounts for charge in account.charges)


def encode_mechanism(mechanism: Mechanism) -> str:
    """Return a mechanism as JSON for the ledger; equal mechanisms have equal texts."""
    return msgspec.json.encode(mechanism).decode()


def decode_mechanism(text: str) -> Mechanism:
    """Return a mechanism of the ledger. Raises `msgspec.ValidationError`."""
    return msgspec.json.decode(text, type=Mechanism)
