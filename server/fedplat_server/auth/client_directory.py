"""The clients, by their id: their stored records, when they were last seen, and the number of their open calls."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence

from fedplat_server.auth.audit_limits import RecentEntries
from fedplat_server.database.batch_loader import BatchLoader
from fedplat_server.database.clients import ClientRecord
from fedplat_server.database.ports import ClientStore
from fedplat_server.errors import Code, RefusedError

CACHE_SIZE = 50_000
UPDATE_EVERY_S = 60.0
"""Minimum interval between updates of what a client reports of itself."""


class ClientDirectory:
    """A cache of the latest clients: only the daemon that leads changes them."""

    def __init__(self, clients: ClientStore) -> None:
        self._clients = clients
        self._found = BatchLoader(clients.find_clients)
        self._begun = BatchLoader(self._begin_sessions)
        self._known: OrderedDict[str, ClientRecord] = OrderedDict()
        self._num_changes = 0
        self._num_calls: Counter[str] = Counter()
        self._updated = RecentEntries(UPDATE_EVERY_S, CACHE_SIZE)
        self.last_seen_unix_s: dict[str, float] = {}
        self._seen_lately: dict[str, float] = {}

    async def find(self, client_id: str) -> ClientRecord:
        """Return the client. Raises `RefusedError` if it is unknown or revoked."""
        record = self._known.get(client_id)
        if record is None:
            before = self._num_changes
            record = await self._found.load(client_id)
            if record is None:
                raise RefusedError(Code.CLIENT_UNKNOWN)
            if before == self._num_changes:  # else it may be another one than was read
                self._remember(record)
        if record.revoked_unix_s is not None:
            raise RefusedError(Code.REVOKED)
        return record

    async def begin_session(self, client_id: str) -> ClientRecord:
        """Count a new session of a client, and return the client. Raises `RefusedError` if it is unknown."""
        record = await self._begun.load(client_id)
        if record is None:
            raise RefusedError(Code.CLIENT_UNKNOWN)
        return record

    async def _begin_sessions(self, client_ids: Sequence[str]) -> Mapping[str, ClientRecord]:
        records = await self._clients.begin_sessions(client_ids)
        for record in records.values():
            self.replace(record)
        return records

    def replace(self, record: ClientRecord) -> None:
        """Replace a client by its record, which was just stored."""
        self._num_changes += 1
        self._remember(record)

    def record_call(self, client_id: str) -> None:
        """Record that a client has called."""
        self.last_seen_unix_s[client_id] = self._seen_lately[client_id] = time.time()

    def take_seen(self) -> Mapping[str, float]:
        """Return when clients were seen since the last call of this method."""
        seen, self._seen_lately = self._seen_lately, {}
        return seen

    def begin_call(self, client_id: str, limit: int) -> Callable[[], None]:
        """Count a call that begins; return a function to call at its end. Raises `RefusedError`."""
        if self._num_calls[client_id] >= limit:
            raise RefusedError(Code.TOO_MANY_CALLS, f"at most {limit}")
        self._num_calls[client_id] += 1

        def end() -> None:
            self._num_calls[client_id] -= 1
            if not self._num_calls[client_id]:
                del self._num_calls[client_id]

        return end

    async def update(self, record: ClientRecord, labels: Mapping[str, str], software_version: str) -> ClientRecord:
        """Return the client with what it reports of itself now, and store that if it is new.

        At most once a minute: what it says in between is put off to its first check-in afterwards. So a client that
        says something else each time costs one transaction a minute, and is still selected by its latest labels.
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
            self._known.pop(record.client_id, None)  # it may have been revoked meanwhile
        return changed

    def _remember(self, record: ClientRecord) -> None:
        self._known[record.client_id] = record
        while len(self._known) > CACHE_SIZE:
            self._known.popitem(last=False)
