"""The part of the store's port about who may take part: enrolment tokens and clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from fedplat_server.audit import AuditEntry
from fedplat_server.errors import TokenRefusedError


@dataclasses.dataclass(frozen=True, slots=True)
class ClientRecord:
    """An enrolled client. `session_number` counts the sessions that it has opened; the last one counts.

    `token_id`: the enrolment token that let it in; empty if it enrolled before that was noted.
    """

    client_id: str
    population: str
    labels: Mapping[str, str]
    software_version: str
    enrolled_unix_s: float
    public_key: bytes
    session_number: int = 0
    revoked_unix_s: float | None = None
    token_id: str = ""


Notes: TypeAlias = Callable[[ClientRecord], Sequence[AuditEntry]]
"""The audit entries for what is done to a client, which only the transaction knows."""


def no_notes(client: ClientRecord) -> Sequence[AuditEntry]:
    """Return no entries."""
    return ()


@dataclasses.dataclass(frozen=True, slots=True)
class EnrolmentToken:
    """A token by which clients enrol. The database keeps its hash beside this, never the token."""

    token_id: str
    population: str
    num_uses: int
    num_left: int
    created_unix_s: float
    expires_unix_s: float
    revoked_unix_s: float | None = None

    def why_not(self, unix_s: float) -> str:
        """Why nobody enrols by it at a moment; empty when somebody may."""
        if self.revoked_unix_s is not None:
            return "revoked"
        if self.num_left <= 0:
            return "used up"
        return "expired" if unix_s >= self.expires_unix_s else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Enrolment:
    """A client that enrols: `client_id` is used if the idempotency key is new."""

    client_id: str
    population: str
    labels: Mapping[str, str]
    software_version: str
    public_key: bytes
    token_hash: bytes
    idempotency_key: str


def token_refused(token: EnrolmentToken | None, population: str, unix_s: float) -> TokenRefusedError:
    """Why a client does not enrol by what was found for its token."""
    if token is None:
        return TokenRefusedError("", is_known=False)
    if token.population != population:
        return TokenRefusedError("it is for another population")
    return TokenRefusedError(f"it is {token.why_not(unix_s)}")


class FleetStore(Protocol):
    """Enrolment tokens and clients. A token's expiry is a moment on the wall clock: it outlives the server.

    Where a method takes `audit`, its entries are noted in the same transaction.
    """

    async def add_enrolment_token(
        self, token: EnrolmentToken, token_hash: bytes, audit: Sequence[AuditEntry] = ()
    ) -> None:
        """Adds a token."""
        ...

    async def revoke_enrolment_token(self, token_id: str, audit: Sequence[AuditEntry] = ()) -> EnrolmentToken | None:
        """Revokes a token, for good; None if there is none. The first revocation stays."""
        ...

    async def list_enrolment_tokens(self, *, after: str = "", limit: int | None = None) -> list[EnrolmentToken]:
        """Tokens in the order of their making: the first `limit` of those after the token with the id `after`.

        There are none after a token that is unknown.
        """
        ...

    async def enroll(self, enrolment: Enrolment, audit: Notes = no_notes) -> ClientRecord:
        """Adds a client, which remembers its token, and uses the token once, in one transaction.

        A known idempotency key with the same public key returns the client that has them, with new labels and
        version, whatever has become of the token, and notes nothing. Raises `TokenRefusedError` if the token is
        unknown, of another population, or of no use any more, and `EnrolmentError` if the key or the idempotency key
        is another client's.
        """
        ...

    async def find_clients(self, client_ids: Sequence[str]) -> dict[str, ClientRecord]:
        """The clients with these ids, by id; those that there are."""
        ...

    async def begin_sessions(self, client_ids: Sequence[str]) -> dict[str, ClientRecord]:
        """Counts a session for each of these clients, which differ; those that there are, as they are then, by id."""
        ...

    async def revoke_client(self, client_id: str, audit: Sequence[AuditEntry] = ()) -> ClientRecord | None:
        """Revokes a client, for good; None if there is none. The first revocation stays."""
        ...

    async def revoke_clients_of(
        self, token_id: str, after: str, limit: int, audit: Notes = no_notes
    ) -> list[ClientRecord]:
        """Revoke a page of the clients that have enrolled by a token, ordered and cut as by `list_clients`.

        Returns all of the page as they are then, also those that were revoked before, so that a caller whose answer
        was lost gets it again. Their first revocation stays, and `audit` is asked for the others only.
        """
        ...

    async def update_client(self, client_id: str, labels: Mapping[str, str], software_version: str) -> None:
        """Replaces what a client says of itself."""
        ...

    async def list_clients(
        self, population: str | None = None, *, after: str = "", limit: int | None = None
    ) -> list[ClientRecord]:
        """Clients in the order of their enrolment: the first `limit` of those that enrolled after the client `after`.

        There are none after a client that is unknown.
        """
        ...

    async def count_clients(self) -> int:
        """How many clients have enrolled."""
        ...
