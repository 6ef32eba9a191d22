"""Who calls: enrolled clients by their credential, when they were last seen, and how many calls they have open."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from uuid import uuid4

from fedplat_server.errors import EnrolmentError
from fedplat_server.rpc.errors import Code, RefusedError
from fedplat_server.runner import hash_secret, new_token
from fedplat_server.store.port import ClientRecord, Enrolment, Store

CACHE_SIZE = 50_000


class ClientBook:
    """Looks clients up in the store, and remembers the latest ones."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[bytes, ClientRecord] = OrderedDict()
        self._hash_of: dict[str, bytes] = {}
        self._num_enrolments = 0
        self._num_calls: Counter[str] = Counter()
        self.last_seen_unix_s: dict[str, float] = {}

    async def enroll(
        self, population: str, labels: Mapping[str, str], software_version: str, idempotency_key: str
    ) -> tuple[str, str]:
        """Makes a client, or gives the client of a known key a new credential; returns (client id, credential).

        Raises `RefusedError` if the key is known in another population.
        """
        credential, credential_hash = new_token()
        enrolment = Enrolment(
            client_id=f"c-{uuid4().hex[:16]}",
            population=population,
            labels=labels,
            software_version=software_version,
            credential_hash=credential_hash,
            idempotency_key=idempotency_key,
        )
        try:
            client_id = await self._store.enroll(enrolment)
        except EnrolmentError as exc:
            raise RefusedError(Code.INVALID_REQUEST, str(exc)) from exc
        self._num_enrolments += 1
        if (earlier := self._hash_of.pop(client_id, None)) is not None:
            self._known.pop(earlier, None)
        return client_id, credential

    async def authenticate(self, authorization: str) -> ClientRecord:
        """The client that presents `Bearer <credential>`. Raises `RefusedError`."""
        scheme, _, credential = authorization.partition(" ")
        if scheme != "Bearer" or not credential:
            raise RefusedError(Code.UNAUTHENTICATED)
        credential_hash = hash_secret(credential)
        record = self._known.get(credential_hash)
        if record is None:
            before = self._num_enrolments
            record = await self._store.client_by_credential(credential_hash)
            if record is None:
                raise RefusedError(Code.UNAUTHENTICATED)
            if before == self._num_enrolments:  # else this credential may have been replaced since it was read
                self._remember(credential_hash, record)
        self.last_seen_unix_s[record.client_id] = time.time()
        return record

    def begin_call(self, client_id: str, limit: int) -> Callable[[], None]:
        """Counts a call that begins; returns what is to be called at its end. Raises `RefusedError`."""
        if self._num_calls[client_id] >= limit:
            raise RefusedError(Code.TOO_MANY_CALLS, f"at most {limit}")
        self._num_calls[client_id] += 1

        def end() -> None:
            self._num_calls[client_id] -= 1
            if not self._num_calls[client_id]:
                del self._num_calls[client_id]

        return end

    async def update(self, record: ClientRecord, labels: Mapping[str, str], software_version: str) -> ClientRecord:
        """Notes what a client says of itself, if that is new."""
        if dict(labels) == dict(record.labels) and software_version == record.software_version:
            return record
        await self._store.update_client(record.client_id, labels, software_version)
        changed = dataclasses.replace(record, labels=dict(labels), software_version=software_version)
        credential_hash = self._hash_of.get(record.client_id)
        if credential_hash is not None:
            self._remember(credential_hash, changed)
        return changed

    def _remember(self, credential_hash: bytes, record: ClientRecord) -> None:
        self._known[credential_hash] = record
        self._hash_of[record.client_id] = credential_hash
        while len(self._known) > CACHE_SIZE:
            _, oldest = self._known.popitem(last=False)
            self._hash_of.pop(oldest.client_id, None)
