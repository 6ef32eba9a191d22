"""The ports of clients and of their counts; `ports.py` has the others, and the rules for all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from fedplat_server.database.clients import (
    ALL_CLIENTS,
    ClientFilter,
    ClientRecord,
    Enrollment,
    EnrollmentToken,
    NewEntries,
    no_entries,
)
from fedplat_server.database.fleet import AvailabilityHour, ClientTraits
from fedplat_server.records.audit import AuditEntry


class ClientStore(Protocol):
    """Enrollment tokens and clients. The expiry of a token is on the wall clock: it outlives the server."""

    async def add_enrollment_token(
        self, token: EnrollmentToken, token_hash: bytes, audit: Sequence[AuditEntry] = ()
    ) -> None:
        """Add a token."""
        ...

    async def revoke_enrollment_token(self, token_id: str, audit: Sequence[AuditEntry] = ()) -> EnrollmentToken | None:
        """Revoke a token permanently and return it; None if it is unknown. Keeps the time of the first revocation."""
        ...

    async def find_enrollment_token(self, token_hash: bytes) -> EnrollmentToken | None:
        """Return the token with this hash; None if it is unknown."""
        ...

    async def list_enrollment_tokens(self, *, after: str = "", limit: int | None = None) -> list[EnrollmentToken]:
        """Return the first `limit` tokens created after the token with the id `after`; [] if that is unknown."""
        ...

    async def count_enrollment_tokens(self) -> int:
        """Return the number of tokens."""
        ...

    async def enroll(self, enrollment: Enrollment, audit: NewEntries = no_entries) -> ClientRecord:
        """Add a client and use its token once.

        If a client has this idempotency key and public key, updates its labels and version and returns it, whatever the
        state of the token, and appends no entries. Raises `TokenRefusedError` if the token is unknown, of another
        population or no longer usable, and `EnrollmentConflictError` if the public key or the idempotency key belongs
        to another client, or if this client is enrolled in another population.
        """
        ...

    async def find_clients(self, client_ids: Sequence[str]) -> dict[str, ClientRecord]:
        """Return the clients with these ids, by id; unknown ids are left out."""
        ...

    async def begin_sessions(self, client_ids: Sequence[str]) -> dict[str, ClientRecord]:
        """Count a session for each of these distinct clients; return the updated ones that exist, by id."""
        ...

    async def revoke_client(self, client_id: str, audit: Sequence[AuditEntry] = ()) -> ClientRecord | None:
        """Revoke a client permanently and return it; None if it is unknown. Keeps the time of the first revocation."""
        ...

    async def revoke_clients_of(
        self, token_id: str, after: str, limit: int, audit: NewEntries = no_entries
    ) -> list[ClientRecord]:
        """Revoke the first `limit` clients that enrolled with a token, after the client `after` ("": all).

        Returns them all, including those revoked before, so that a caller that lost the answer can repeat the call.
        Those keep their time of revocation, and `audit` is only called for the others.
        """
        ...

    async def update_client(self, client_id: str, labels: Mapping[str, str], software_version: str) -> None:
        """Replace the labels and the software version of a client."""
        ...

    async def list_clients(
        self, which: ClientFilter = ALL_CLIENTS, *, after: str = "", limit: int | None = None
    ) -> list[ClientRecord]:
        """Return the first `limit` clients that enrolled after the client `after`; [] if that is unknown."""
        ...

    async def count_clients(self, which: ClientFilter = ALL_CLIENTS) -> int:
        """Return the number of clients that satisfy a filter."""
        ...

    async def record_seen(self, seen_unix_s: Mapping[str, float]) -> None:
        """Store the times at which clients were last seen."""
        ...

    async def list_idle_clients(self, before_unix_s: float) -> list[str]:
        """Return the clients that were last seen before a time and have no open assignment, oldest first."""
        ...

    async def remove_clients(self, client_ids: Collection[str], before_unix_s: float) -> int:
        """Remove those of the clients last seen before a time; return their number. Their assignments are kept."""
        ...


class FleetStore(Protocol):
    """Traits of all clients, and the availability of populations by hour."""

    async def list_traits(self, after_sequence: int, limit: int) -> list[ClientTraits]:
        """Return the first `limit` clients after a sequence number."""
        ...

    async def record_availability(self, hours: Sequence[AvailabilityHour]) -> None:
        """Store hours; of each number the larger one of the stored and the new value is kept."""
        ...

    async def list_availability(self, since_unix_s: float, population: str = "") -> list[AvailabilityHour]:
        """Return the hours that began at a time or later, of one population or of all (""), oldest first."""
        ...

    async def remove_availability(self, before_unix_s: float) -> int:
        """Remove the hours that began before a time; return their number."""
        ...
