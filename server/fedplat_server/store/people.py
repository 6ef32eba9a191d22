"""The part of the store's port about operators and the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fedplat_server.audit import AuditEntry, AuditHead, AuditRow
from fedplat_server.errors import LastAdminError
from fedplat_server.operators import OperatorRecord, Role


def require_another_admin(operators: Sequence[OperatorRecord], name: str, unix_s: float) -> None:
    """Raise `LastAdminError` if no operator but this one is an admin whose token is good at a moment."""
    admins = {one.name for one in operators if one.role is Role.ADMIN and one.is_valid(unix_s)}
    if admins == {name}:
        raise LastAdminError(f"operator {name} is the last one with the role admin; add another one first")


class OperatorStore(Protocol):
    """Who may use the Admin service. Whatever changes it notes audit entries in the same transaction."""

    async def add_operator(self, operator: OperatorRecord, token_hash: bytes, audit: Sequence[AuditEntry] = ()) -> None:
        """Adds an operator. Raises `OperatorError` if there is one of that name."""
        ...

    async def remove_operator(
        self, name: str, audit: Sequence[AuditEntry] = (), *, keep_an_admin: bool = False
    ) -> None:
        """Removes an operator. Raises `OperatorError` if there is none of that name.

        With `keep_an_admin`, raises `LastAdminError` if it is the only one left with the role admin and a token that
        is still good, also when others are removed at the same time.
        """
        ...

    async def operator_by_token(self, token_hash: bytes) -> OperatorRecord | None:
        """The operator with this token, valid or expired."""
        ...

    async def list_operators(self, *, after: str = "", limit: int | None = None) -> list[OperatorRecord]:
        """The first `limit` operators after a name, by name."""
        ...


class AuditStore(Protocol):
    """The audit log. Nothing here changes or removes a row."""

    async def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        """Appends entries, all or none, each continuing the one before, whoever else appends at the same time."""
        ...

    async def list_audit(self, after_sequence: int = 0, limit: int = 1000) -> list[AuditRow]:
        """Rows after a sequence number, oldest first."""
        ...

    async def audit_head(self) -> AuditHead:
        """Where the log ends, by the note that is kept of it."""
        ...
