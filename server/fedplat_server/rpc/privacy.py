"""The service `Privacy`: the releases of private jobs, their costs, and the budgets of populations."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from typing_extensions import override

from fedplat.job import JobSpec
from fedplat.privacy import Charge
from fedplat.privacy.options import adjacency, describe_not_covered, describe_participation, describe_sampling
from fedplat.rounds.privacy_rules import disclosure_of
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc
from fedplat_server.coordination import job_checks
from fedplat_server.coordination.job_checks import Budgets
from fedplat_server.database import records, sql_ledger
from fedplat_server.database.records import JobRecord
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import convert, validation
from fedplat_server.records.audit import AuditAction, AuditEntry
from fedplat_server.rpc import interceptor, job_registry, pages
from fedplat_server.rpc.operator_access import current_operator

MAX_EPSILON = 1e6
_TOKEN = re.compile(rf"job:{pages.ID.pattern}|population:{pages.NAME.pattern}")


class PrivacyService(admin_pb2_grpc.PrivacyServicer):
    """The handlers of the service."""

    def __init__(self, jobs: job_registry.JobRegistry, store: sql_ledger.LedgerStore, budgets: Budgets) -> None:
        self._jobs = jobs
        self._store = store
        self._budgets = budgets

    @override
    async def ShowPrivacy(
        self, request: admin_pb2.ShowPrivacyRequest, context: interceptor.Context
    ) -> admin_pb2.ShowPrivacyResponse:
        if request.job:
            record = self._jobs.find(request.job)
            records, populations = [record], [await self._store.load_population(record.state.spec.population)]
        else:
            records, populations = self._jobs.all(), await self._store.load_populations()
            records = [record for record in records if disclosure_of(record.state.spec).is_charged]
        token = pages.token(request.page_token, _TOKEN)
        size = pages.size(request.page_size)
        return await self._budgets.accountant.run(_page, records, populations, token, size)

    @override
    async def SetPrivacyBudget(
        self, request: admin_pb2.SetPrivacyBudgetRequest, context: interceptor.Context
    ) -> admin_pb2.PopulationPrivacy:
        name = validation.name(request.population, "population")
        if not 0.0 < request.epsilon <= MAX_EPSILON:
            text = f"epsilon is {request.epsilon:g}; expected a number above 0, {MAX_EPSILON:g} at most"
            raise RefusedError(Code.INVALID_REQUEST, text)
        if not 0.0 < request.delta < 1.0:
            text = f"delta is {request.delta:g}; expected a number between 0 and 1, such as 1e-6"
            raise RefusedError(Code.INVALID_REQUEST, text)
        terms = {"epsilon": request.epsilon, "delta": request.delta}
        entry = AuditEntry(current_operator(), AuditAction.BUDGET_SET, name, terms)
        population = await self._budgets.set(name, records.Budget(**terms), [entry])
        return await self._budgets.accountant.run(_population, population)

    @override
    async def RemovePrivacyBudget(
        self, request: admin_pb2.RemovePrivacyBudgetRequest, context: interceptor.Context
    ) -> admin_pb2.RemovePrivacyBudgetResponse:
        name = validation.name(request.population, "population")
        await self._budgets.remove(name, [AuditEntry(current_operator(), AuditAction.BUDGET_REMOVED, name)])
        return admin_pb2.RemovePrivacyBudgetResponse()


def _page(
    records: Sequence[JobRecord], populations: Sequence[records.Population], after: str, size: int
) -> admin_pb2.ShowPrivacyResponse:
    """Return a page of the jobs, then of the populations. Computes the costs of this page only: each is slow."""
    accounts = {account.job_id: account for population in populations for account in population.accounts}
    jobs = {f"job:{record.state.job_id}": record for record in records}
    listed = [population for population in populations if population.budget is not None or _num_private(population)]
    others = {f"population:{population.name}": population for population in listed}
    keys = [*jobs, *others]
    remaining = keys if not after else keys[keys.index(after) + 1 :] if after in keys else []

    def encode(key: str) -> admin_pb2.JobPrivacy | admin_pb2.PopulationPrivacy:
        return _job(jobs[key], accounts[jobs[key].state.job_id]) if key in jobs else _population(others[key])

    page, token = pages.cut(remaining, size, encode, str)
    return admin_pb2.ShowPrivacyResponse(
        jobs=[message for message in page if isinstance(message, admin_pb2.JobPrivacy)],
        populations=[message for message in page if isinstance(message, admin_pb2.PopulationPrivacy)],
        next_page_token=token,
    )


def _job(record: JobRecord, account: records.Account) -> admin_pb2.JobPrivacy:
    state = record.state
    message = admin_pb2.JobPrivacy(
        job_id=state.job_id,
        name=state.spec.name,
        population=state.spec.population,
        status=convert.STATUSES[state.status],
        is_private=account.planned is not None,
    )
    if account.planned is not None:
        message.MergeFrom(_terms(state.spec, account.planned, account))
    return message


def _terms(spec: JobSpec, planned: Charge, account: records.Account) -> admin_pb2.JobPrivacy:
    options, mechanism, adaptive = spec.privacy, planned.mechanism, spec.updates.adaptive_clip
    assert options is not None
    return admin_pb2.JobPrivacy(
        participation=describe_participation(mechanism),
        adjacency=adjacency(mechanism),
        sampling=describe_sampling(mechanism),
        delta=options.delta,
        epsilon=options.epsilon,
        noise_multiplier=mechanism.noise_multiplier,
        model_noise_multiplier=options.noise_multiplier or 0.0,
        clip_norm=spec.updates.clip_norm if adaptive is None else adaptive.initial_norm,
        adaptive_clip=adaptive is not None,
        released=_cost(account.released, options.delta),
        planned=_cost((planned,), options.delta),
        not_covered=describe_not_covered(mechanism),
        trust=options.trust,
    )


def _population(population: records.Population) -> admin_pb2.PopulationPrivacy:
    budget, num_private = population.budget, _num_private(population)
    return admin_pb2.PopulationPrivacy(
        population=population.name,
        epsilon=None if budget is None else budget.epsilon,
        delta=None if budget is None else budget.delta,
        committed=None if budget is None else _cost(population.charges, budget.delta),
        num_private=num_private,
        num_others=len(population.accounts) - num_private,
    )


def _num_private(population: records.Population) -> int:
    return sum(account.is_private for account in population.accounts)


def _cost(charges: tuple[Charge, ...], delta: float) -> admin_pb2.PrivacyCost:
    epsilon = job_checks.epsilon(charges, delta)
    # If epsilon is infinite, the RDP bound is useless as a check, and perhaps cannot be computed.
    epsilon_rdp = job_checks.epsilon_rdp(charges, delta) if math.isfinite(epsilon) else math.inf
    releases = sum(charge.releases for charge in charges)
    return admin_pb2.PrivacyCost(releases=releases, epsilon=epsilon, epsilon_rdp=epsilon_rdp)
