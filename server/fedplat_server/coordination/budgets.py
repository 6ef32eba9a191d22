"""Keeps the private jobs of a population within its budget: when a job is created, and when the budget is changed.

What counts is what was planned when a job was created (`max_releases`, which never changes), and of jobs that have
ended, what the ledger says. So a job that is started or resumed takes nothing that was not counted.

The arithmetic takes seconds, so the accountant's thread does it, outside of any transaction, on what was read before;
the store refuses what was decided by it if the population's jobs or its budget are others meanwhile, and all is done
again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from msgspec import structs

from fedplat.errors import JobFileError
from fedplat.job import JobSpec, calibrate, plan_charge
from fedplat.privacy import Charge, accounting
from fedplat.rounds import JobState
from fedplat_server.coordination.accountant import Accountant, epsilon
from fedplat_server.database.jobs import JobRecord
from fedplat_server.database.ledger import Budget, Population
from fedplat_server.database.ports import Store
from fedplat_server.errors import Code, PopulationChangedError, RefusedError
from fedplat_server.records.audit import AuditEntry


class Budgets:
    """Creates jobs and changes budgets, one at a time where arithmetic is needed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.accountant = Accountant()
        self._computing = asyncio.Lock()

    async def create_job(
        self, state: JobState, job_file: str, idempotency_key: str, audit: Sequence[AuditEntry]
    ) -> JobRecord:
        """Calibrate a job and store it; a known key returns the job that has it. Raises `RefusedError`."""
        if state.spec.privacy is None:
            return await self._create(state, job_file, idempotency_key, audit)
        async with self._computing:
            if (known := await self._store.jobs.find_job(idempotency_key)) is not None:
                return known
            try:
                spec = await self.accountant.run(calibrate, state.spec)
            except JobFileError as exc:
                raise RefusedError(Code.INVALID_JOB_FILE, str(exc)) from exc
            state = structs.replace(state, spec=spec)
            return await self._create(state, job_file, idempotency_key, audit)

    async def _create(
        self, state: JobState, job_file: str, idempotency_key: str, audit: Sequence[AuditEntry]
    ) -> JobRecord:
        while True:
            if (known := await self._store.jobs.find_job(idempotency_key)) is not None:
                return known  # before the budget, which it may have used up
            population = await self._store.ledger.load_population(state.spec.population)
            if wrong := await self._why_refused(state.spec, population):
                raise RefusedError(Code.OVER_BUDGET, wrong)
            try:
                return await self._store.jobs.create_job(state, job_file, idempotency_key, audit, population.revision)
            except PopulationChangedError:
                continue

    async def _why_refused(self, spec: JobSpec, population: Population) -> str:
        if plan_charge(spec) is None or population.budget is None:
            return why_refused(spec, population)  # without arithmetic: such a job does not wait for the accountant
        return await self.accountant.run(why_refused, spec, population)

    async def set(self, name: str, budget: Budget, audit: Sequence[AuditEntry]) -> Population:
        """Set the budget of a population. Raises `RefusedError` if it is too small for what is planned there."""
        async with self._computing:
            while True:
                population = await self._store.ledger.load_population(name)
                if wrong := await self.accountant.run(why_too_small, budget, population):
                    raise RefusedError(Code.OVER_BUDGET, wrong)
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
    """Return why a calibrated job cannot be created beside those of its population; empty if it can."""
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
        "privacy.noise_multiplier), or that needless jobs are cancelled first"
    )


def _describe_remaining(planned: Charge, before: Sequence[Charge], budget: Budget) -> str:
    left = accounting.max_releases(planned.mechanism, budget.epsilon, budget.delta, planned.releases, before)
    return f"What is left is enough for {left} of its {planned.releases} releases."


def why_too_small(budget: Budget, population: Population) -> str:
    """Return why a population cannot have this budget; empty if it can."""
    others = [account.job_id for account in population.accounts if not account.is_private and not account.has_ended]
    if others:
        return (
            f"jobs without [privacy] go on in population {population.name}: {', '.join(others)}; expected that they "
            "have ended, or are cancelled"
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
