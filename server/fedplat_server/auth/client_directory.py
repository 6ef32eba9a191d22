"""A cache of client records by id, with the time each client was last seen and its number of open calls."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from fedplat.config.label_expressions import compile_expression
from fedplat.rounds import JobState
from fedplat_server.auth.rate_limits import RecentEntries
from fedplat_server.database import batch_loader, sql_clients
from fedplat_server.database.clients import ClientRecord
from fedplat_server.errors import Code, RefusedError

CACHE_SIZE = 50_000
UPDATE_EVERY_S = 60.0
"""Minimum interval between updates of a client's labels and software version."""


class Offer(NamedTuple):
    """The trainers and evaluators that a client has installed."""

    trainers: frozenset[str] = frozenset()
    evaluators: frozenset[str] = frozenset()


class ClientDirectory:
    """A cache of the most recently stored clients. Coherent because only the leader changes clients."""

    def __init__(self, clients: sql_clients.ClientStore) -> None:
        self._clients = clients
        self._records = batch_loader.BatchLoader(clients.find_clients)
        self._sessions = batch_loader.BatchLoader(self._begin_sessions)
        self._cache: OrderedDict[str, ClientRecord] = OrderedDict()
        self._num_changes = 0
        self._num_calls: Counter[str] = Counter()
        self._updated = RecentEntries(UPDATE_EVERY_S, CACHE_SIZE)
        self.last_seen_unix_s: dict[str, float] = {}
        self._newly_seen: dict[str, float] = {}
        self._offers: OrderedDict[str, Offer] = OrderedDict()

    def record_offer(self, client_id: str, offer: Offer) -> None:
        """Remember what a client offers at a check-in."""
        self._offers[client_id] = offer
        self._offers.move_to_end(client_id)
        while len(self._offers) > CACHE_SIZE:
            self._offers.popitem(last=False)

    def find_offer(self, client_id: str) -> Offer:
        """Return what a client offered last; nothing if it has not checked in since the server started."""
        return self._offers.get(client_id, Offer())

    async def find(self, client_id: str) -> ClientRecord:
        """Return the client. Raises `RefusedError` if it is unknown or revoked."""
        record = await self._load(client_id)
        if record is None:
            raise RefusedError(Code.CLIENT_UNKNOWN)
        if record.revoked_unix_s is not None:
            raise RefusedError(Code.REVOKED)
        return record

    async def find_all(self, client_ids: Iterable[str]) -> dict[str, ClientRecord]:
        """Return these clients by id, also revoked ones; unknown ones are left out."""
        records = await asyncio.gather(*map(self._load, client_ids))
        return {record.client_id: record for record in records if record is not None}

    async def _load(self, client_id: str) -> ClientRecord | None:
        record = self._cache.get(client_id)
        if record is None:
            before = self._num_changes
            record = await self._records.load(client_id)
            if record is not None and before == self._num_changes:  # else it may have changed since it was read
                self._remember(record)
        return record

    def has_open_call(self, client_id: str) -> bool:
        """Return whether a call of the client is open, such as a long poll."""
        return self._num_calls[client_id] > 0

    async def list_able(self, job: JobState, client_ids: Iterable[str]) -> list[str]:
        """Return those of some clients that a job may have train, in the order of their enrollment.

        Clients that are unknown or revoked are left out.
        """
        is_eligible = compile_expression(job.spec.selection.where)
        found: list[ClientRecord] = []
        for client_id in client_ids:
            with contextlib.suppress(RefusedError):
                found.append(await self.find(client_id))
        able = [each for each in found if each.population == job.spec.population and is_eligible(each.labels)]
        return [each.client_id for each in sorted(able, key=lambda each: (each.enrolled_unix_s, each.client_id))]

    async def begin_session(self, client_id: str) -> ClientRecord:
        """Store a new session number for a client; return the client. Raises `RefusedError` if it is unknown."""
        record = await self._sessions.load(client_id)
        if record is None:
            raise RefusedError(Code.CLIENT_UNKNOWN)
        return record

    async def _begin_sessions(self, client_ids: Sequence[str]) -> Mapping[str, ClientRecord]:
        records = await self._clients.begin_sessions(client_ids)
        for record in records.values():
            self.replace(record)
        return records

    def replace(self, record: ClientRecord) -> None:
        """Cache a client's record that was just stored."""
        self._num_changes += 1
        self._remember(record)

    def record_call(self, client_id: str) -> None:
        """Record the current time as when the client was last seen."""
        self.last_seen_unix_s[client_id] = self._newly_seen[client_id] = time.time()

    def drain_last_seen(self) -> Mapping[str, float]:
        """Return the clients seen since the last call of this method, with the times (unix seconds)."""
        seen, self._newly_seen = self._newly_seen, {}
        return seen

    def begin_call(self, client_id: str, limit: int) -> Callable[[], None]:
        """Count a call that begins; return a function to call at its end.

        Raises `RefusedError` if the client has `limit` calls open.
        """
        if self._num_calls[client_id] >= limit:
            raise RefusedError(Code.TOO_MANY_CALLS, f"at most {limit}")
        self._num_calls[client_id] += 1

        def end() -> None:
            self._num_calls[client_id] -= 1
            if not self._num_calls[client_id]:
                del self._num_calls[client_id]

        return end

    async def update(self, record: ClientRecord, labels: Mapping[str, str], software_version: str) -> ClientRecord:
        """Return the client with the labels and version that it reports, and store them if they changed.

        Stores at most once a minute; a change in between is stored at the first check-in afterwards. So a client that
        changes its labels each time costs one transaction a minute, and is still selected by its latest labels.
        """
        if dict(labels) == dict(record.labels) and software_version == record.software_version:
            return record
        if not self._updated.add(record.client_id, time.monotonic()):
            return dataclasses.replace(record, labels=dict(labels), software_version=software_version)
        before = self._num_changes
        await self._clients.update_client(record.client_id, labels, software_version)
        changed = dataclasses.replace(record, labels=dict(labels), software_version=software_version)
        if before == self._num_changes:
            self.replace(changed)
        else:
            self._cache.pop(record.client_id, None)  # it may have been revoked meanwhile
        return changed

    def _remember(self, record: ClientRecord) -> None:
        self._cache[record.client_id] = record
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
