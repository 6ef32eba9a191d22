"""Enrollment tokens, clients and their traits, and the availability of populations, in a SQL database."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy
from sqlalchemy import Connection, case, func, select

from fedplat.rounds.states import OPEN_STATES
from fedplat_server import crash_points, errors
from fedplat_server.database import rows, sql_audit, transactions
from fedplat_server.database.records import (
    ALL_CLIENTS,
    ClientFilter,
    ClientRecord,
    Enrollment,
    EnrollmentToken,
    NewEntries,
    make_token_error,
    no_entries,
)
from fedplat_server.database.tables import (
    SAME_ATTEMPT,
    STILL_OPEN,
    assignments,
    attempts,
    availability,
    clients,
    enrollment_tokens,
)
from fedplat_server.records.audit import AuditEntry
from fedplat_server.records.events import EventEntry, EventType

MAX_LOOKED_UP = 1000
"""The number of ids from which on a query of clients reads all clients."""
_SEEN = func.coalesce(clients.c.seen_unix_s, clients.c.enrolled_unix_s)


class ClientStore:
    """Enrollment tokens and clients. The expiry of a token is on the wall clock: it outlives the server."""

    def __init__(self, database: transactions.Database, clock: transactions.Clock) -> None:
        self._database = database
        self._clock = clock

    async def add_enrollment_token(
        self, token: EnrollmentToken, token_hash: bytes, audit: Sequence[AuditEntry] = ()
    ) -> None:
        """Add a token."""
        insert = enrollment_tokens.insert().values({**dataclasses.asdict(token), "token_hash": token_hash})

        def transaction(connection: Connection) -> None:
            connection.execute(insert)
            sql_audit.append_entries(connection, audit, self._clock())

        await self._database.write(transaction)

    async def revoke_enrollment_token(self, token_id: str, audit: Sequence[AuditEntry] = ()) -> EnrollmentToken | None:
        """Revoke a token permanently and return it; None if it is unknown.

        A token that was revoked before keeps the time of its revocation, and gets no more `audit` rows.
        """
        mine, now = enrollment_tokens.c.token_id == token_id, self._clock()
        values = _revocation(enrollment_tokens, now)

        def transaction(connection: Connection) -> EnrollmentToken | None:
            row = _change(connection, enrollment_tokens, mine, values)
            if row is None:
                return None
            if row.revoked_unix_s == now:
                sql_audit.append_entries(connection, audit, now)
            return rows.to_record(row, EnrollmentToken)

        return await self._database.write(transaction)

    async def find_enrollment_token(self, token_hash: bytes) -> EnrollmentToken | None:
        """Return the token with this hash; None if it is unknown."""
        found = await self._database.fetch(
            select(enrollment_tokens).where(enrollment_tokens.c.token_hash == token_hash)
        )
        return rows.to_record(found[0], EnrollmentToken) if found else None

    async def list_enrollment_tokens(self, *, after: str = "", limit: int | None = None) -> list[EnrollmentToken]:
        """Return the first `limit` tokens created after the token with the id `after`; [] if that is unknown."""
        query = select(enrollment_tokens).order_by(enrollment_tokens.c.sequence).limit(limit)
        if after:
            tokens = enrollment_tokens.alias()
            last = select(tokens.c.sequence).where(tokens.c.token_id == after).scalar_subquery()
            query = query.where(enrollment_tokens.c.sequence > last)
        return [rows.to_record(row, EnrollmentToken) for row in await self._database.fetch(query)]

    async def count_enrollment_tokens(self) -> int:
        """Return the number of tokens."""
        return (await self._database.fetch(select(func.count()).select_from(enrollment_tokens)))[0][0]

    async def enroll(self, enrollment: Enrollment, audit: NewEntries = no_entries) -> ClientRecord:
        """Add a client and use its token once.

        If a client has this idempotency key and public key, updates its labels and version and returns it, whatever the
        state of the token, and appends no entries. Raises `TokenRefusedError` if the token is unknown, of another
        population or no longer usable, and `EnrollmentConflictError` if the public key or the idempotency key belongs
        to another client, or if this client is enrolled in another population.
        """
        now = self._clock()
        mutable = {"labels": dict(enrollment.labels), "software_version": enrollment.software_version}
        values = {
            **mutable,
            "client_id": enrollment.client_id,
            "population": enrollment.population,
            "public_key": enrollment.public_key,
            "idempotency_key": enrollment.idempotency_key,
            "enrolled_unix_s": now,
            "seen_unix_s": now,
            "session_number": 0,
            # If there is no such token, `_use_token` raises and the client is not added.
            "token_id": func.coalesce(
                select(enrollment_tokens.c.token_id)
                .where(enrollment_tokens.c.token_hash == enrollment.token_hash)
                .scalar_subquery(),
                "",
            ),
        }
        # The second of two calls with one key waits here for the first, and then finds its client.
        insert = rows.insert(self._database.dialect, clients).values(values).on_conflict_do_nothing()
        mine = clients.c.idempotency_key == enrollment.idempotency_key

        def transaction(connection: Connection) -> ClientRecord:
            is_new = connection.execute(insert).rowcount == 1
            if is_new:
                _use_token(connection, enrollment, now)
            else:
                connection.execute(clients.update().where(mine).values(mutable))
            row = connection.execute(select(clients).where(mine)).one_or_none()
            if row is None:
                raise errors.EnrollmentConflictError("another client has this public key")
            if row.population != enrollment.population:
                raise errors.EnrollmentConflictError(
                    f"this client is enrolled in population {row.population}, not {enrollment.population}"
                )
            if row.public_key != enrollment.public_key:
                raise errors.EnrollmentConflictError("this client is enrolled with another public key")
            record = rows.to_record(row, ClientRecord)
            if is_new:
                sql_audit.append_events(connection, [_event(EventType.CLIENT_ENROLLED, record)], now)
                sql_audit.append_entries(connection, audit(record), now)
            return record

        with crash_points.step("enroll"):
            return await self._database.write(transaction)

    async def find_clients(self, client_ids: Sequence[str]) -> dict[str, ClientRecord]:
        """Return the clients with these ids, by id; unknown ids are left out."""
        return _by_id(await self._database.fetch(_select_by_id(client_ids)))

    async def begin_sessions(self, client_ids: Sequence[str]) -> dict[str, ClientRecord]:
        """Count a session for each of these distinct clients; return the updated ones that exist, by id."""
        update = clients.update().where(clients.c.client_id.in_(client_ids))

        def transaction(connection: Connection) -> Sequence[rows.Row]:
            connection.execute(update.values(session_number=clients.c.session_number + 1, seen_unix_s=self._clock()))
            return connection.execute(_select_by_id(client_ids)).all()

        with crash_points.step("begin_sessions"):
            return _by_id(await self._database.write(transaction))

    async def revoke_client(self, client_id: str, audit: Sequence[AuditEntry] = ()) -> ClientRecord | None:
        """Revoke a client permanently and return it; None if it is unknown.

        A client that was revoked before keeps the time of its revocation, and gets no more `audit` rows.
        """
        mine, now = clients.c.client_id == client_id, self._clock()
        values = _revocation(clients, now)

        def transaction(connection: Connection) -> ClientRecord | None:
            row = _change(connection, clients, mine, values)
            if row is None:
                return None
            record = rows.to_record(row, ClientRecord)
            if record.revoked_unix_s == now:
                sql_audit.append_events(connection, [_event(EventType.CLIENT_REVOKED, record)], now)
                sql_audit.append_entries(connection, audit, now)
            return record

        return await self._database.write(transaction)

    async def revoke_clients_of(
        self, token_id: str, after: str, limit: int, audit: NewEntries = no_entries
    ) -> list[ClientRecord]:
        """Revoke the first `limit` clients that enrolled with a token, after the client `after` ("": all).

        Returns them all, including those revoked before, so that a caller that lost the answer can repeat the call.
        Those keep their time of revocation, and `audit` is only called for the others.
        """
        page = _later(select(clients).where(clients.c.token_id == token_id), after).limit(limit)
        now = self._clock()

        def transaction(connection: Connection) -> list[ClientRecord]:
            records = [rows.to_record(row, ClientRecord) for row in connection.execute(page)]
            unrevoked = [record.client_id for record in records if record.revoked_unix_s is None]
            these = clients.c.client_id.in_(unrevoked)
            connection.execute(clients.update().where(these).values(_revocation(clients, now)))
            revoked = _by_id(connection.execute(select(clients).where(these)).all())
            entries = [entry for client_id in unrevoked for entry in audit(revoked[client_id])]
            revocations = [_event(EventType.CLIENT_REVOKED, revoked[client_id]) for client_id in unrevoked]
            sql_audit.append_events(connection, revocations, now)
            sql_audit.append_entries(connection, entries, now)
            return [revoked.get(record.client_id, record) for record in records]

        return await self._database.write(transaction)

    async def update_client(self, client_id: str, labels: Mapping[str, str], software_version: str) -> None:
        """Replace the labels and the software version of a client."""
        values = {"labels": dict(labels), "software_version": software_version}
        update = clients.update().where(clients.c.client_id == client_id).values(values)
        with crash_points.step("update_client"):
            if await self._database.write(lambda connection: connection.execute(update).rowcount) != 1:
                raise errors.StoreError(f"there is no client {client_id}")

    async def list_clients(
        self, which: ClientFilter = ALL_CLIENTS, *, after: str = "", limit: int | None = None
    ) -> list[ClientRecord]:
        """Return the first `limit` clients that enrolled after the client `after`; [] if that is unknown."""
        query = _later(select(clients).where(*self._matches(which)), after).limit(limit)
        return [rows.to_record(row, ClientRecord) for row in await self._database.fetch(query)]

    async def count_clients(self, which: ClientFilter = ALL_CLIENTS) -> int:
        """Return the number of clients that satisfy a filter."""
        query = select(func.count()).select_from(clients).where(*self._matches(which))
        return (await self._database.fetch(query))[0][0]

    def _matches(self, which: ClientFilter) -> list[sqlalchemy.ColumnElement[bool]]:
        conditions = [clients.c.labels[name].as_string() == value for name, value in sorted(which.labels.items())]
        if which.population is not None:
            conditions.append(clients.c.population == which.population)
        if which.search:
            conditions.append(clients.c.client_id.contains(which.search, autoescape=True))
        if which.is_revoked is not None:
            is_revoked = clients.c.revoked_unix_s.is_not(None)
            conditions.append(is_revoked if which.is_revoked else ~is_revoked)
        dialect = self._database.dialect
        if which.only is not None:
            # To look up many clients and sort them is slower than to read clients in order until a page is full.
            client_id = clients.c.client_id.concat("") if len(which.only) > MAX_LOOKED_UP else clients.c.client_id
            conditions.append(client_id.in_(transactions.json_strings(dialect, which.only)))
        if which.without:
            conditions.append(clients.c.client_id.not_in(transactions.json_strings(dialect, which.without)))
        return conditions

    async def record_seen(self, seen_unix_s: Mapping[str, float]) -> None:
        """Store the times at which clients were last seen."""
        this = clients.c.client_id == sqlalchemy.bindparam("this_client")
        values = [{"this_client": client_id, "seen_unix_s": seen} for client_id, seen in sorted(seen_unix_s.items())]
        statement = clients.update().where(this)
        if values:
            await self._database.write(lambda connection: connection.execute(statement, values))

    async def list_idle_clients(self, before_unix_s: float) -> list[str]:
        """Return the clients that were last seen before a time and have no open assignment, oldest first."""
        busy = select(assignments.c.client_id).where(assignments.c.client_id == clients.c.client_id, STILL_OPEN)
        query = select(clients.c.client_id).where(before_unix_s > _SEEN, ~busy.exists()).order_by(clients.c.sequence)
        query = query.where(clients.c.client_id.not_in(_between_steps()))
        return [row.client_id for row in await self._database.fetch(query)]

    async def remove_clients(self, client_ids: Collection[str], before_unix_s: float) -> int:
        """Remove those of the clients last seen before a time; return their number. Their assignments are kept."""
        delete = clients.delete().where(clients.c.client_id.in_(client_ids), before_unix_s > _SEEN)
        return await self._database.write(lambda connection: connection.execute(delete).rowcount)


def _change(
    connection: Connection, table: sqlalchemy.Table, which: sqlalchemy.ColumnElement[bool], values: Mapping[str, Any]
) -> rows.Row | None:
    """Change the one row that matches, if there is one, and return it."""
    connection.execute(table.update().where(which).values(values))
    return connection.execute(select(table).where(which)).one_or_none()


def _between_steps() -> sqlalchemy.Select[Any]:
    """Return a query for the open assignments that are not `STILL_OPEN`: only those of open attempts can be."""
    return (
        select(assignments.c.client_id)
        .join(attempts, SAME_ATTEMPT)
        .where(attempts.c.ended_unix_s.is_(None), assignments.c.state.in_(OPEN_STATES))
    )


def _select_by_id(client_ids: Sequence[str]) -> sqlalchemy.Select[Any]:
    return select(clients).where(clients.c.client_id.in_(client_ids))


def _later(query: sqlalchemy.Select[Any], client_id: str) -> sqlalchemy.Select[Any]:
    """Order a query by enrollment, and restrict it to clients that enrolled after this one ("": all)."""
    if client_id:
        last = select(clients.c.sequence).where(clients.c.client_id == client_id).scalar_subquery()
        query = query.where(clients.c.sequence > last)
    return query.order_by(clients.c.sequence)


def _event(type_: EventType, client: ClientRecord) -> EventEntry:
    return EventEntry(type_, population=client.population, client_id=client.client_id)


def _by_id(found: Sequence[rows.Row]) -> dict[str, ClientRecord]:
    return {row.client_id: rows.to_record(row, ClientRecord) for row in found}


def _revocation(table: sqlalchemy.Table, now: float) -> Mapping[str, Any]:
    return {"revoked_unix_s": func.coalesce(table.c.revoked_unix_s, now)}


def _use_token(connection: Connection, enrollment: Enrollment, now: float) -> None:
    """Use the token once. Raises `TokenRefusedError` if it is not valid."""
    tokens = enrollment_tokens
    mine = tokens.c.token_hash == enrollment.token_hash
    valid = (
        (tokens.c.population == enrollment.population)
        & (tokens.c.num_left > 0)
        & (tokens.c.expires_unix_s > now)
        & tokens.c.revoked_unix_s.is_(None)
    )
    used = tokens.update().where(mine & valid).values(num_left=tokens.c.num_left - 1)
    if connection.execute(used).rowcount == 1:
        return
    row = connection.execute(select(tokens).where(mine)).one_or_none()
    token = rows.to_record(row, EnrollmentToken) if row is not None else None
    raise make_token_error(token, enrollment.population, now)


class FleetStore:
    """Traits of all clients, and the availability of populations by hour."""

    def __init__(self, database: transactions.Database) -> None:
        self._database = database

    async def list_traits(self, after_sequence: int, limit: int) -> list[ClientTraits]:
        """Return the first `limit` clients after a sequence number."""
        columns = (clients.c.sequence, clients.c.population, clients.c.labels, clients.c.software_version)
        query = select(*columns, clients.c.revoked_unix_s).where(clients.c.sequence > after_sequence)
        found = await self._database.fetch(query.order_by(clients.c.sequence).limit(limit))
        return [
            ClientTraits(row.sequence, row.population, row.labels, row.software_version, row.revoked_unix_s is not None)
            for row in found
        ]

    async def record_availability(self, hours: Sequence[AvailabilityHour]) -> None:
        """Store hours; of each number the larger one of the stored and the new value is kept."""
        statement = rows.insert(self._database.dialect, availability)
        larger = {
            name: case(
                (statement.excluded[name] > availability.c[name], statement.excluded[name]), else_=availability.c[name]
            )
            for name in ("num_seen", "max_available")
        }
        upsert = statement.on_conflict_do_update(index_elements=["population", "hour_unix_s"], set_=larger)
        values = [hour._asdict() for hour in sorted(hours)]  # in one order, so that two writers cannot deadlock
        if values:
            await self._database.write(lambda connection: connection.execute(upsert, values))

    async def list_availability(self, since_unix_s: float, population: str = "") -> list[AvailabilityHour]:
        """Return the hours that began at a time or later, of one population or of all (""), oldest first."""
        query = select(availability).where(availability.c.hour_unix_s >= since_unix_s)
        if population:
            query = query.where(availability.c.population == population)
        query = query.order_by(availability.c.hour_unix_s, availability.c.population)
        return [rows.to_record(row, AvailabilityHour) for row in await self._database.fetch(query)]

    async def remove_availability(self, before_unix_s: float) -> int:
        """Remove the hours that began before a time; return their number."""
        delete = availability.delete().where(availability.c.hour_unix_s < before_unix_s)
        return await self._database.write(lambda connection: connection.execute(delete).rowcount)


@dataclasses.dataclass(frozen=True, slots=True)
class ClientTraits:
    """What is counted of a client. `sequence` grows in the order of enrollment."""

    sequence: int
    population: str
    labels: Mapping[str, str]
    software_version: str
    is_revoked: bool


class AvailabilityHour(NamedTuple):
    """An hour of a population, from `hour_unix_s` on.

    `num_seen` different clients checked in, and `max_available` is the most that waited or worked at one time.
    """

    population: str
    hour_unix_s: float
    num_seen: int
    max_available: int
