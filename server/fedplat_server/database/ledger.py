"""Records of private releases, and of the budgets of populations."""

from __future__ import annotations

import dataclasses

import msgspec

from fedplat.config.decoding import prepare_type
from fedplat.privacy import Charge, Mechanism
from fedplat.rounds.states import ENDED_JOBS, JobStatus


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """The maximum privacy loss of all private jobs of a population together."""

    epsilon: float
    delta: float


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """The releases of a job so far, and all releases that it may make (`planned`; None: the job is not private)."""

    job_id: str
    status: JobStatus
    planned: Charge | None
    released: tuple[Charge, ...] = ()

    @property
    def is_private(self) -> bool:
        """True if the job publishes private releases."""
        return self.planned is not None

    @property
    def has_ended(self) -> bool:
        """True if the job has ended and will make no more releases."""
        return self.status in ENDED_JOBS

    @property
    def charges(self) -> tuple[Charge, ...]:
        """The charges to a budget: all planned releases, or those of the past if the job has ended."""
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
        """The charges of its jobs to the budget."""
        return tuple(charge for account in self.accounts for charge in account.charges)


def encode_mechanism(mechanism: Mechanism) -> str:
    """Return a mechanism as JSON for the ledger; equal mechanisms have equal texts.

    It is the text of earlier releases, except for the noise of clients, which they do not know.
    """
    fields = msgspec.structs.asdict(mechanism)
    if mechanism.kind != "skellam":
        del fields["steps"]
    return msgspec.json.encode(fields).decode()


def decode_mechanism(text: str) -> Mechanism:
    """Return a mechanism of the ledger. Raises `msgspec.ValidationError` if the text is not one."""
    return msgspec.json.decode(text, type=prepare_type(Mechanism))
