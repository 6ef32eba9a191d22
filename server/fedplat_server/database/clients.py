"""Records of enrollment tokens and clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from fedplat_server.errors import TokenRefusedError
from fedplat_server.records.audit import AuditEntry


@dataclasses.dataclass(frozen=True, slots=True)
class ClientRecord:
    """An enrolled client.

    `session_number` is the number of sessions that it has opened; only the last one is valid. `token_id` is the
    enrollment token that it used; empty if it enrolled with a version of fedplat that did not store it.
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


@dataclasses.dataclass(frozen=True, slots=True)
class ClientFilter:
    """The clients of a list: those that satisfy all conditions; the default is all clients.

    `labels` are labels that a client must have, `search` is a part of its id. `only` are the ids of the clients to
    choose from (None: all), and `without` those to leave out: both may have as many ids as there are clients.
    """

    population: str | None = None
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    search: str = ""
    is_revoked: bool | None = None
    only: Collection[str] | None = None
    without: Collection[str] = ()


ALL_CLIENTS = ClientFilter()
"""The filter that every client satisfies."""

NewEntries: TypeAlias = Callable[[ClientRecord], Sequence[AuditEntry]]
"""A function that returns the audit entries for a changed client, which is only known within the transaction."""


def no_entries(client: ClientRecord) -> Sequence[AuditEntry]:
    """Return no entries."""
    return ()


@dataclasses.dataclass(frozen=True, slots=True)
class EnrollmentToken:
    """A token with which clients enroll. The database stores its hash with this record, never the token."""

    token_id: str
    population: str
    num_uses: int
    num_left: int
    created_unix_s: float
    expires_unix_s: float
    revoked_unix_s: float | None = None

    def describe_problem(self, unix_s: float) -> str:
        """Return why the token is unusable at `unix_s` ("revoked", "used up" or "expired"), or ""."""
        if self.revoked_unix_s is not None:
            return "revoked"
        if self.num_left <= 0:
            return "used up"
        return "expired" if unix_s >= self.expires_unix_s else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Enrollment:
    """A request to enroll. `client_id` is the id of the new client, if the idempotency key is new."""

    client_id: str
    population: str
    labels: Mapping[str, str]
    software_version: str
    public_key: bytes
    token_hash: bytes
    idempotency_key: str


def make_token_error(token: EnrollmentToken | None, population: str, unix_s: float) -> TokenRefusedError:
    """Return the error for an enrollment with this unusable token; None: the token is unknown."""
    if token is None:
        return TokenRefusedError("", is_known=False)
    if token.population != population:
        return TokenRefusedError("it is for another population")
    return TokenRefusedError(f"it is {token.describe_problem(unix_s)}")
