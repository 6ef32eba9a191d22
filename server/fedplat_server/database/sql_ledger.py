"""Private releases and budgets in a SQL database."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, select

from fedplat.job import plan_charge
from fedplat.privacy import Charge
from fedplat.rounds.states import JobStatus
from fedplat_server.database import rows
from fedplat_server.database.ledger import Account, Budget, LedgerRow, Population, decode_mechanism
from fedplat_server.database.sql_audit import append_entries
from fedplat_server.database.tables import jobs, ledger, populations
from fedplat_server.database.transactions import Clock, Database
from fedplat_server.errors import PopulationChangedError
from fedplat_server.records.audit import AuditEntry


class SqlLedger:
    """The adapter of `ports.LedgerStore`."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def list_releases(self, job_id: str) -> list[LedgerRow]:
        """Return the releases of a job, oldest first."""
        query = select(ledger).where(ledger.c.job_id == job_id).order_by(ledger.c.version)
        found = await self._database.fetch(query)
        return [LedgerRow(row.version, row.round, decode_mechanism(row.mechanism), row.unix_s) for row in found]

    async def load_population(self, name: str) -> Population:
        """Return a population; see the port."""
        return await self._database.read(lambda connection: _population(connection, name))

    async def load_populations(self) -> list[Population]:
        """Return all populations with jobs or a budget, by name; see the port."""
        names = select(jobs.c.population).union(select(populations.c.population))

        def work(connection: Connection) -> list[Population]:
            found = sorted(row.population for row in connection.execute(names))
            return [_population(connection, name) for name in found]

        return await self._database.read(work)

    async def set_budget(
        self, population: str, budget: Budget | None, expected_revision: int, audit: Sequence[AuditEntry] = ()
    ) -> None:
        """Set the budget of a population, or remove it; see the port."""
        values: rows.Values = {
            "epsilon": None if budget is None else budget.epsilon,
            "delta": None if budget is None else budget.delta,
        }

        def work(connection: Connection) -> None:
            advance_revision(connection, population, expected_revision)
            connection.execute(populations.update().where(populations.c.population == population).values(values))
            append_entries(connection, audit, self._clock())

        await self._database.write(work)


def advance_revision(connection: Connection, population: str, expected: int | None) -> None:
    """Move a population to its next revision, and lock its row: others read its jobs and budget before or after.

    Raises `PopulationChangedError` if it is not at the expected one.
    """
    mine = populations.c.population == population
    next_one = {"revision": populations.c.revision + 1}
    if expected:
        step = populations.update().where(mine, populations.c.revision == expected).values(next_one)
    else:
        insert = rows.insert(connection.dialect.name, populations).values(population=population, revision=1)
        step = insert.on_conflict_do_update(index_elements=["population"], set_=next_one)
        if expected == 0:
            step = insert.on_conflict_do_nothing(index_elements=["population"])
    if connection.execute(step).rowcount != 1:
        raise PopulationChangedError(f"the jobs or the budget of population {population} have changed: read them again")


def _population(connection: Connection, name: str) -> Population:
    row = connection.execute(select(populations).where(populations.c.population == name)).one_or_none()
    mine = jobs.c.population == name
    tally = (
        select(ledger.c.job_id, ledger.c.mechanism, func.count().label("releases"))
        .where(ledger.c.job_id.in_(select(jobs.c.job_id).where(mine)))
        .group_by(ledger.c.job_id, ledger.c.mechanism)
        .order_by(func.min(ledger.c.version))
    )
    released: dict[str, list[Charge]] = {}
    for one in connection.execute(tally):
        released.setdefault(one.job_id, []).append(Charge(decode_mechanism(one.mechanism), one.releases))
    found: Sequence[rows.Row] = connection.execute(select(jobs).where(mine).order_by(jobs.c.sequence)).all()
    return Population(
        name=name,
        revision=row.revision if row is not None else 0,
        budget=None if row is None or row.epsilon is None else Budget(row.epsilon, row.delta),
        accounts=tuple(_account(one, tuple(released.get(one.job_id, ()))) for one in found),
    )


def _account(row: rows.Row, released: tuple[Charge, ...]) -> Account:
    planned = plan_charge(rows.job_spec(row)) if row.privacy is not None else None
    return Account(row.job_id, JobStatus(row.status), planned, released)
