"""Privacy budgets of populations, enforced when a job is created, and the privacy arithmetic in its own thread.

A job counts with the releases planned at its creation (`max_releases`, which never changes); a job that has ended
counts with its releases in the ledger. So starting or resuming a job spends nothing that was not counted.

The arithmetic takes seconds, so it runs in the accountant's thread on data read before, outside of any transaction. If
the population's jobs or its budget changed meanwhile, the store refuses the decision, and it is made again.

An epsilon may take seconds. Uploads, reports and aggregation use the event loop's threads; the accountant occupies none
of them, however many operators call it. With one thread each result is also computed only once: the second call that
needs it waits for the first, and then finds it in the cache.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from msgspec import structs

from fedplat import errors, rounds
from fedplat.job import JobSpec, calibrate, plan_charge
from fedplat.privacy import Charge, accounting
from fedplat.rounds.privacy_rules import disclosure_of
from fedplat_server.database.jobs import JobRecord
from fedplat_server.database.ledger import Budget, Population
from fedplat_server.database.store import Store
from fedplat_server.errors import Code, PopulationChangedError, RefusedError
from fedplat_server.records.audit import AuditEntry


class Budgets:
    """The creation of jobs and changes of budgets, one at a time if they need the accountant."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.accountant = Accountant()
        self._computing = asyncio.Lock()

    async def create_job(
        self, state: rounds.JobState, job_file: str, idempotency_key: str, audit: Sequence[AuditEntry]
    ) -> JobRecord:
        """Calibrate a job and store it, or return the job that was created with this `idempotency_key`.

        Raises `RefusedError` if the job cannot be calibrated, or exceeds the population's budget.
        """
        if not disclosure_of(state.spec).is_charged:
            return await self._create(state, job_file, idempotency_key, audit)
        async with self._computing:
            if (known := await self._store.jobs.find_job(idempotency_key)) is not None:
                return known
            try:
                spec = await self.accountant.run(calibrate, state.spec)
            except (errors.JobFileError, errors.PluginError, errors.UserCodeError) as exc:
                raise RefusedError(Code.INVALID_JOB_FILE, str(exc)) from exc
            state = structs.replace(state, spec=spec)
            return await self._create(state, job_file, idempotency_key, audit)

    async def _create(
        self, state: rounds.JobState, job_file: str, idempotency_key: str, audit: Sequence[AuditEntry]
    ) -> JobRecord:
        while True:
            if (known := await self._store.jobs.find_job(idempotency_key)) is not None:
                return known  # before the check of the budget, which this job may have used up
            population = await self._store.ledger.load_population(state.spec.population)
            if reason := await self._why_refused(state.spec, population):
                raise RefusedError(Code.OVER_BUDGET, reason)
            try:
                return await self._store.jobs.create_job(state, job_file, idempotency_key, audit, population.revision)
            except PopulationChangedError:
                continue

    async def _why_refused(self, spec: JobSpec, population: Population) -> str:
        if plan_charge(spec) is None or population.budget is None:
            return why_refused(spec, population)  # needs no arithmetic, so it does not wait for the accountant
        return await self.accountant.run(why_refused, spec, population)

    async def set(self, name: str, budget: Budget, audit: Sequence[AuditEntry]) -> Population:
        """Set the budget of a population. Raises `RefusedError` if it is too small for the planned releases."""
        async with self._computing:
            while True:
                population = await self._store.ledger.load_population(name)
                if reason := await self.accountant.run(why_too_small, budget, population):
                    raise RefusedError(Code.OVER_BUDGET, reason)
                try:
                    await self._store.ledger.set_budget(name, budget, population.revision, audit)
                except PopulationChangedError:
                    continue
                return dataclasses.replace(population, budget=budget)

    async def remove(self, name: str, audit: Sequence[AuditEntry]) -> None:
        """Remove the budget of a population, if it has one."""
        while True:
            population = await self._store.ledger.load_population(name)
            if population.budget is None:
                return
            try:
                await self._store.ledger.set_budget(name, None, population.revision, audit)
            except PopulationChangedError:
                continue
            return


def why_refused(spec: JobSpec, population: Population) -> str:
    """Return why a calibrated job would exceed the budget of its population, or "" if it would not."""
    budget, planned = population.budget, plan_charge(spec)
    if budget is None:
        return ""
    if planned is None:
        return (
            f"population {population.name} has a budget ({_terms(budget)}), which a job without noise would exceed: "
            "expected a job with [privacy]"
        )
    before = population.charges
    needed = epsilon((*before, planned), budget.delta)
    if needed <= budget.epsilon:
        return ""
    return (
        f"population {population.name} has a budget of {_terms(budget)}, of which its other jobs have released or "
        f"planned {epsilon(before, budget.delta):.4g}; this job needs {epsilon((planned,), budget.delta):.4g} alone, "
        f"and {needed:.4g} with them. {_describe_remaining(planned, before, budget)} "
        "Expected fewer rounds, more noise (a smaller privacy.epsilon or a larger "
        "privacy.noise_multiplier), or that unneeded jobs are cancelled first"
    )


def _describe_remaining(planned: Charge, before: Sequence[Charge], budget: Budget) -> str:
    remaining = accounting.max_releases(planned.mechanism, budget.epsilon, budget.delta, planned.releases, before)
    return f"The rest is enough for {remaining} of its {planned.releases} releases."


def why_too_small(budget: Budget, population: Population) -> str:
    """Return why a population cannot have this budget, or "" if it can."""
    others = [account.job_id for account in population.accounts if not account.is_private and not account.has_ended]
    if others:
        return (
            f"population {population.name} has open jobs without [privacy]: {', '.join(others)}; wait until they end, "
            "or cancel them"
        )
    needed = epsilon(population.charges, budget.delta)
    if needed <= budget.epsilon:
        return ""
    return (
        f"{_terms(budget)} is less than what the private jobs of population {population.name} have released or "
        f"planned: {needed:.4g} at this delta; expected no less, or that jobs are cancelled first"
    )


def _terms(budget: Budget) -> str:
    return f"epsilon = {budget.epsilon:g} at delta = {budget.delta:g}"


CACHED = 1024
"""The size of each cache. A private job needs two results for each release, and two for its plan."""
_T = TypeVar("_T")


class Accountant:
    """A thread for the privacy arithmetic, which runs one function at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "accounting")

    async def run(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Return the result of a function. If the call is cancelled before the function starts, it does not start."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def close(self) -> None:
        """End the thread after the running function."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@functools.lru_cache(maxsize=CACHED)
def epsilon(charges: tuple[Charge, ...], delta: float) -> float:
    """Return `clipping.epsilon`, cached by mechanisms, numbers of releases and delta. For the accountant's thread."""
    return accounting.epsilon(charges, delta)


@functools.lru_cache(maxsize=CACHED)
def epsilon_rdp(charges: tuple[Charge, ...], delta: float) -> float:
    """Return `accounting.epsilon_rdp`, cached by mechanisms, numbers of releases and delta. For that thread too."""
    return accounting.epsilon_rdp(charges, delta)
