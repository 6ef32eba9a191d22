"""Checks of a new job: its file, its initial model, and the privacy budget of its population.

All checks raise `RefusedError`.

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
import re
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from fedplat import errors, model, rounds, submission_checks
from fedplat.config import toml
from fedplat.config.plugins import BUILTIN, Plugins
from fedplat.config.toml_text import change_text
from fedplat.job import JobSpec, calibrate, digest_job, parse_job, plan_charge
from fedplat.privacy import Charge, accounting
from fedplat.rounds import states
from fedplat.rounds.privacy_rules import disclosure_of
from fedplat_server.database.records import Budget, JobRecord, Population
from fedplat_server.database.sql_jobs import JobStore
from fedplat_server.database.store import Store
from fedplat_server.errors import Code, PopulationChangedError, RefusedError
from fedplat_server.records.audit import AuditEntry
from fedplat_server.storage import spool_file


def parse_submitted(job_file: str, max_bytes: int, plugins: Plugins = BUILTIN) -> JobSpec:
    """Parse a job file of at most `max_bytes` bytes in UTF-8, which may use the names of `plugins`."""
    try:
        submission_checks.check_size(job_file, max_bytes)
        spec = parse_job(job_file, plugins)
        submission_checks.check_job(spec)
    except (errors.JobFileError, errors.PluginError, errors.UserCodeError) as exc:
        raise RefusedError(Code.INVALID_JOB_FILE, str(exc)) from exc
    return spec


CHANGEABLE = ("retention", "retry")
"""The tables of a job file that an operator may change while the job runs."""


def change_submitted(
    job_file: str, changes: Sequence[str], max_bytes: int, plugins: Plugins = BUILTIN
) -> tuple[str, JobSpec]:
    """Return a job file with other values of keys in `CHANGEABLE`, and its job. Raises `RefusedError`."""
    values: dict[str, object] = {}
    for text in changes:
        key, equals, value = (part.strip() for part in text.partition("="))
        table, dot, name = key.partition(".")
        if not equals or table not in CHANGEABLE or not re.fullmatch(r"[a-z_]+", name if dot else ""):
            raise RefusedError(
                Code.INVALID_REQUEST,
                f"{text[:100]!r}: expected KEY=VALUE with a key of [retention] or [retry], such as "
                "retention.versions=5",
            )
        try:
            values[key] = toml.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError as exc:
            raise RefusedError(Code.INVALID_REQUEST, f"{text[:100]!r}: the value is not valid TOML: {exc}") from exc
    if not values:
        raise RefusedError(Code.INVALID_REQUEST, "there are no changes; expected KEY=VALUE")
    changed = change_text(job_file, values)
    return changed, parse_submitted(changed, max_bytes, plugins)


async def digest_stored(record: JobRecord, initial_digest: str, plugins: Plugins) -> str:
    """Return the digest of a stored job (`JobState.digest`); empty if it has ended, or its file cannot be read here."""
    if record.problem or record.state.status in states.ENDED_JOBS:
        return ""
    return await asyncio.to_thread(lambda: digest_job(parse_job(record.job_file, plugins), initial_digest))


async def find_initial_digest(store: JobStore, state: rounds.JobState) -> str:
    """Return the SHA-256 of a job's initial model."""
    initial = state.latest if state.latest.version == 0 else await store.find_version(state.job_id, 0)
    assert initial is not None
    return initial.digest


def check_is_runnable(spec: JobSpec, evaluators: Sequence[str], trainers: Sequence[str]) -> None:
    """Check that the server has the job's evaluator and trainers, and supports its `durability`.

    What only one kind of job needs is checked by its half (`ServerHalf.check_job`).
    """
    evaluator = spec.evaluation.server
    if evaluator is not None and evaluator not in evaluators:
        raise RefusedError(
            Code.NO_SUCH_EVALUATOR,
            f"{evaluator!r}; {list_names(evaluators)}. Start it with --evaluator {evaluator}=module:function, "
            "or leave evaluation.server out of the job file",
        )
    for table, learning in (("warm_start", spec.warm_start), ("server_step", spec.server_step)):
        if learning is not None and learning.trainer not in trainers:
            raise RefusedError(
                Code.NO_SUCH_TRAINER,
                f"{table}.trainer = {learning.trainer!r}; {list_names(trainers)}. Start it with --trainer "
                f"{learning.trainer}=module:object, or leave [{table}] out of the job file",
            )
    if spec.durability == "memory" and not spool_file.CAN_KEEP_IN_MEMORY:
        raise RefusedError(
            Code.INVALID_JOB_FILE,
            'durability = "memory": the server\'s platform has no files in memory (memfd, Linux); use "spool"',
        )


def list_names(names: Sequence[str]) -> str:
    """Return what the server has, for a message."""
    return f"it has {', '.join(names)}" if names else "it has none"


def check_initial_model(path: Path, spec: JobSpec) -> int:
    """Check that a job can start from the model in a file; return the size of the file in bytes."""
    try:
        submission_checks.check_initial_model(model.Parameters.open(path), spec)
    except FileNotFoundError as exc:
        raise RefusedError(Code.INVALID_MODEL, "upload it first (UploadModel)") from exc
    except errors.ModelError as exc:
        raise RefusedError(Code.INVALID_MODEL, str(exc)) from exc
    except errors.JobFileError as exc:
        raise RefusedError(Code.INVALID_JOB_FILE, str(exc)) from exc
    return path.stat().st_size


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
