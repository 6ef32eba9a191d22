"""Releases and budgets in memory."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from fedplat.job import plan_charge
from fedplat.privacy import Charge
from fedplat.rounds import JobState
from fedplat_server.audit import AuditEntry
from fedplat_server.errors import PopulationChangedError
from fedplat_server.store.ledger import Account, Budget, LedgerRow, Population
from fedplat_server.store.memory_fleet import MemoryFleet


@dataclasses.dataclass
class _Terms:
    revision: int = 0
    budget: Budget | None = None


class MemoryLedger(MemoryFleet):
    """What `MemoryStore` does of `ledger.LedgerStore`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._terms: dict[str, _Terms] = {}
        self._ledger: dict[str, list[LedgerRow]] = {}

    @abstractmethod
    def _states(self) -> Iterable[JobState]:
        """All jobs in the order of their creation."""

    async def ledger(self, job_id: str) -> list[LedgerRow]:
        """The releases of a job, oldest first."""
        return list(self._ledger.get(job_id, ()))

    async def population(self, name: str) -> Population:
        """A population; see the port."""
        terms = self._terms.get(name, _Terms())
        mine = [state for state in self._states() if state.spec.population == name]
        return Population(name, terms.revision, terms.budget, tuple(map(self._account, mine)))

    async def populations(self) -> list[Population]:
        """All populations with jobs or a budget, by name."""
        names = {state.spec.population for state in self._states()} | self._terms.keys()
        return [await self.population(name) for name in sorted(names)]

    async def set_budget(
        self, population: str, budget: Budget | None, expected_revision: int, audit: Sequence[AuditEntry] = ()
    ) -> None:
        """Gives a population a budget, or takes it away; see the port."""
        self._advance(population, expected_revision)
        self._terms[population].budget = budget
        await self.append_audit(audit)

    def _advance(self, population: str, expected: int | None) -> None:
        terms = self._terms.setdefault(population, _Terms())
        if expected is not None and terms.revision != expected:
            raise PopulationChangedError(f"population {population} is not at revision {expected} any more")
        terms.revision += 1

    def _account(self, state: JobState) -> Account:
        counts = Counter(row.mechanism for row in self._ledger.get(state.job_id, ()))
        released = tuple(Charge(mechanism, count) for mechanism, count in counts.items())
        return Account(state.job_id, state.status, plan_charge(state.spec), released)
