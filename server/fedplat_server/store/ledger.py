"""The part of the store's port about what private jobs have released, and what their populations allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import msgspec

from fedplat.privacy import Charge, Mechanism
from fedplat.rounds.states import ENDED_JOBS, JobStatus
from fedplat_server.audit import AuditEntry


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerRow:
    """A release: a committed version of a private job. How many clients took part is no part of it."""

    version: int
    round: int
    mechanism: Mechanism
    unix_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """What all private jobs of a population may cost together."""

    epsilon: float
    delta: float


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """A job as an accountant sees it: what it has released, and what it may release in all (None: not private)."""

    job_id: str
    status: JobStatus
    planned: Charge | None
    released: tuple[Charge, ...] = ()

    @property
    def is_private(self) -> bool:
        """Whether what it publishes are private releases."""
        return self.planned is not None

    @property
    def has_ended(self) -> bool:
        """Whether it will never release anything again."""
        return self.status in ENDED_JOBS

    @property
    def charges(self) -> tuple[Charge, ...]:
        """What is taken of a budget: all that is planned, and of a job that has ended, what came of it."""
        return self.released if self.planned is None or self.has_ended else (self.planned,)


@dataclasses.dataclass(frozen=True, slots=True)
class Population:
    """A population's budget, if it has one, and the accounts of its jobs in the order of their creation.

    `revision` grows with each new job and each change of the budget; 0 where there was none.
    """

    name: str
    revision: int
    budget: Budget | None
    accounts: tuple[Account, ...]

    @property
    def charges(self) -> tuple[Charge, ...]:
        """What its jobs take of the budget."""
        return tuple(charge for account in self.accounts for charge in account.charges)


class LedgerStore(Protocol):
    """Releases and budgets. The ledger has no method that writes: `Store.save` adds each version's row to it."""

    async def ledger(self, job_id: str) -> list[LedgerRow]:
        """The releases of a job, oldest first."""
        ...

    async def population(self, name: str) -> Population:
        """A population, on one snapshot; one that nobody has named is empty."""
        ...

    async def populations(self) -> list[Population]:
        """All populations with jobs or a budget, by name, on one snapshot."""
        ...

    async def set_budget(
        self, population: str, budget: Budget | None, expected_revision: int, audit: Sequence[AuditEntry] = ()
    ) -> None:
        """Gives a population a budget, or takes it away.

        Raises `PopulationChangedError` if the population is not at the expected revision.
        """
        ...


def spelled(mechanism: Mechanism) -> str:
    """A mechanism as the ledger has it: JSON, one spelling for each."""
    return msgspec.json.encode(mechanism).decode()


def read(mechanism: str) -> Mechanism:
    """A mechanism of the ledger. Raises `msgspec.ValidationError`."""
    return msgspec.json.decode(mechanism, type=Mechanism)
