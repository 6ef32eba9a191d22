"""The privacy losses of private jobs and populations, for scrapes.

Computing an epsilon may take seconds, so a scrape returns the results of the last computation. The accountant's thread
computes them after each change, and spends at most a twentieth of the time on that.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

from fedplat.rounds import JobState
from fedplat.rounds.disclosure import disclosure_of
from fedplat_server import logs
from fedplat_server.coordination import accountant
from fedplat_server.coordination.accountant import Accountant
from fedplat_server.database.ledger import Population
from fedplat_server.database.sql_ledger import LedgerStore
from fedplat_server.errors import LeadershipLostError, StoreError

MIN_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0
"""A budget that an operator has changed is read after this time."""
PAUSE_FACTOR = 19.0
"""The pause after a computation, as a multiple of its duration."""


@dataclasses.dataclass(frozen=True)
class PrivacyLosses:
    """Epsilons: what jobs have spent and planned, and what counts against budgets, by job and by population."""

    spent: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    planned: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    committed: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    budgets: dict[str, float] = dataclasses.field(default_factory=dict[str, float])


def compute(jobs: Sequence[JobState], populations: Sequence[Population]) -> PrivacyLosses:
    """Compute the losses of the private ones of some jobs, and of populations with a budget."""
    losses = PrivacyLosses()
    accounts = {account.job_id: account for population in populations for account in population.accounts}
    for job in jobs:
        account, options = accounts.get(job.job_id), job.spec.privacy
        if account is None or account.planned is None or options is None:
            continue
        losses.spent[job.job_id] = accountant.epsilon(account.released, options.delta)
        losses.planned[job.job_id] = accountant.epsilon((account.planned,), options.delta)
    for population in populations:
        if population.budget is not None:
            losses.committed[population.name] = accountant.epsilon(population.charges, population.budget.delta)
            losses.budgets[population.name] = population.budget.epsilon
    return losses


class PrivacyCosts:
    """The task that keeps `losses` up to date while this daemon leads. `jobs` returns the jobs to compute."""

    def __init__(self, ledger: LedgerStore, thread: Accountant, jobs: Callable[[], Sequence[JobState]]) -> None:
        self.losses = PrivacyLosses()
        self._ledger = ledger
        self._thread = thread
        self._jobs = jobs
        self._changed = asyncio.Event()

    def refresh(self) -> None:
        """Compute again soon: a private job has released something, or a job has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Compute the losses after each change and once a minute, until cancelled."""
        while True:
            self._changed.clear()
            started = time.monotonic()
            try:
                populations = await self._ledger.load_populations()
                jobs = [job for job in self._jobs() if disclosure_of(job.spec).is_charged]
                if jobs or any(population.budget is not None for population in populations):
                    self.losses = await self._thread.run(compute, jobs, populations)
                else:
                    self.losses = PrivacyLosses()
            except LeadershipLostError:
                return
            except StoreError as exc:
                logs.get().warning("the privacy budgets could not be read for the metrics", error=str(exc))
            await asyncio.sleep(max(MIN_PAUSE_S, PAUSE_FACTOR * (time.monotonic() - started)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), MAX_PAUSE_S)
