"""Private releases and budgets in a SQL database."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, select

from fedplat.job import is_unreadable, plan_charge
from fedplat.job.privacy import charges
from fedplat.privacy import Charge
from fedplat.rounds.states import ENDED_JOBS, JobStatus
from fedplat_server.database import rows, sql_audit, transactions
from fedplat_server.database.records import Account, Budget, JobFileReader, Population, decode_mechanism
from fedplat_server.database.tables import attempts, jobs, ledger, populations
from fedplat_server.errors import BudgetUnknownError, PopulationChangedError
from fedplat_server.records.audit import AuditEntry
from fedplat_server.records.events import EventEntry, EventType


class LedgerStore:
    """Private releases, and the budgets of populations. `JobStore.save` adds the releases."""

    def __init__(self, database: transactions.Database, clock: transactions.Clock, files: JobFileReader) -> None:
        self._database = database
        self._clock = clock
        self._files = files

    async def load_population(self, name: str) -> Population:
        """Return a population; an unknown one is empty."""
        return await self._database.read(lambda connection: self._population(connection, name))

    async def load_populations(self) -> list[Population]:
        """Return all populations with jobs or a budget, by name."""
        names = select(jobs.c.population).union(select(populations.c.population))

        def transaction(connection: Connection) -> list[Population]:
            found = sorted(row.population for row in connection.execute(names))
            return [self._population(connection, name) for name in found]

        return await self._database.read(transaction)

    async def set_budget(
        self, population: str, budget: Budget | None, expected_revision: int, audit: Sequence[AuditEntry] = ()
    ) -> None:
        """Set the budget of a population, or remove it.

        Raises `PopulationChangedError` if the population is not at the expected revision.
        """
        values: rows.Values = {
            "epsilon": None if budget is None else budget.epsilon,
            "delta": None if budget is None else budget.delta,
        }

        def transaction(connection: Connection) -> None:
            advance_revision(connection, population, expected_revision)
            connection.execute(populations.update().where(populations.c.population == population).values(values))
            sql_audit.append_events(connection, [_budget_event(population, budget)], self._clock())
            sql_audit.append_entries(connection, audit, self._clock())

        await self._database.write(transaction)

    def _population(self, connection: Connection, name: str) -> Population:
        row = connection.execute(select(populations).where(populations.c.population == name)).one_or_none()
        mine = jobs.c.population == name
        tally = (
            select(ledger.c.job_id, ledger.c.mechanism, func.count().label("releases"))
            .where(ledger.c.job_id.in_(select(jobs.c.job_id).where(mine)))
            .group_by(ledger.c.job_id, ledger.c.mechanism)
            .order_by(func.min(ledger.c.version))
        )
        job_rows: Sequence[rows.Row] = connection.execute(select(jobs).where(mine).order_by(jobs.c.sequence)).all()
        released: dict[str, list[Charge]] = {}
        for group in connection.execute(tally):
            released.setdefault(group.job_id, []).append(Charge(decode_mechanism(group.mechanism), group.releases))
        for job in filter(rows.adds_own_noise, job_rows):
            released[job.job_id] = self._unmasked_charges(connection, job)
        budget = None if row is None or row.epsilon is None else Budget(row.epsilon, row.delta)
        return Population(
            name=name,
            revision=row.revision if row is not None else 0,
            budget=budget,
            accounts=tuple(self._account(job, tuple(released.get(job.job_id, ())), budget) for job in job_rows),
        )

    def _unmasked_charges(self, connection: Connection, row: rows.Row) -> list[Charge]:
        """Return the charges of all attempts of a job whose sums were unmasked, whether they made a version or not."""
        spec, _ = self._files.read(row)
        return [] if is_unreadable(spec) else charges(spec, list_unmasked(connection, row.job_id))

    def _account(self, row: rows.Row, released: tuple[Charge, ...], budget: Budget | None) -> Account:
        status = JobStatus(row.status)
        if row.privacy is None:
            return Account(row.job_id, status, None, released)
        spec, problem = self._files.read(row)
        if not is_unreadable(spec):
            return Account(row.job_id, status, plan_charge(spec), released)
        if budget is not None and (status not in ENDED_JOBS or rows.adds_own_noise(row)):
            raise BudgetUnknownError(
                f"what is spent in population {row.population} cannot be computed, because this server cannot read the "
                f"job file of {row.job_id} ({problem}); another version of fedplat made the job. If it is newer, "
                "update the server; if it is older, cancel the job"
            )
        return Account(row.job_id, status, None, released)


def _budget_event(population: str, budget: Budget | None) -> EventEntry:
    if budget is None:
        text = f"the privacy budget of population {population} was removed"
        return EventEntry(EventType.BUDGET_REMOVED, population=population, text=text)
    text = f"population {population} has a privacy budget of epsilon = {budget.epsilon:g} at delta = {budget.delta:g}"
    return EventEntry(EventType.BUDGET_SET, population=population, text=text)


def list_unmasked(connection: Connection, job_id: str) -> tuple[int, ...]:
    """Return the numbers of survivors of a job's attempts whose sums were asked to be unmasked, in order."""
    query = (
        select(attempts.c.num_survivors)
        .where(attempts.c.job_id == job_id, attempts.c.num_survivors > 0)
        .order_by(attempts.c.round, attempts.c.number)
    )
    return tuple(connection.execute(query).scalars())


def advance_revision(connection: Connection, population: str, expected: int | None) -> None:
    """Increment the revision of a population and lock its row: other transactions see its jobs before or after this.

    Raises `PopulationChangedError` if it is not at the expected revision (None: any).
    """
    mine = populations.c.population == population
    next_revision = {"revision": populations.c.revision + 1}
    if expected:
        statement = populations.update().where(mine, populations.c.revision == expected).values(next_revision)
    else:
        insert = rows.insert(connection.dialect.name, populations).values(population=population, revision=1)
        statement = insert.on_conflict_do_update(index_elements=["population"], set_=next_revision)
        if expected == 0:
            statement = insert.on_conflict_do_nothing(index_elements=["population"])
    if connection.execute(statement).rowcount != 1:
        raise PopulationChangedError(f"the jobs or the budget of population {population} have changed: read them again")
