"""Operators and the audit log in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedplat_server import audit as log
from fedplat_server.audit import AuditEntry, AuditHead, AuditRow
from fedplat_server.errors import OperatorError
from fedplat_server.operators import OperatorRecord
from fedplat_server.store.people import require_another_admin


class MemoryPeople:
    """What `MemoryStore` does of `people.OperatorStore` and `people.AuditStore`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._operators: dict[str, tuple[OperatorRecord, bytes]] = {}
        self._audit: list[AuditRow] = []
        self._audit_head = AuditHead()

    async def add_operator(self, operator: OperatorRecord, token_hash: bytes, audit: Sequence[AuditEntry] = ()) -> None:
        """Adds an operator; see the port."""
        if operator.name in self._operators:
            raise OperatorError(f"there is an operator {operator.name} already; remove it first or choose another")
        self._operators[operator.name] = (operator, token_hash)
        await self.append_audit(audit)

    async def remove_operator(
        self, name: str, audit: Sequence[AuditEntry] = (), *, keep_an_admin: bool = False
    ) -> None:
        """Removes an operator; see the port."""
        if keep_an_admin:
            require_another_admin([record for record, _ in self._operators.values()], name, self._clock())
        if self._operators.pop(name, None) is None:
            raise OperatorError(f"there is no operator {name}")
        await self.append_audit(audit)

    async def operator_by_token(self, token_hash: bytes) -> OperatorRecord | None:
        """The operator with this token; see the port."""
        return next((record for record, known in self._operators.values() if known == token_hash), None)

    async def list_operators(self, *, after: str = "", limit: int | None = None) -> list[OperatorRecord]:
        """The first operators after a name; see the port."""
        later = [record for record, _ in self._operators.values() if record.name > after]
        return sorted(later, key=lambda one: one.name)[:limit]

    async def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        """Appends entries; see the port."""
        rows, self._audit_head = log.chain(entries, self._clock(), self._audit_head)
        self._audit += rows

    async def list_audit(self, after_sequence: int = 0, limit: int = 1000) -> list[AuditRow]:
        """Rows after a sequence number, oldest first."""
        return [row for row in self._audit if row.sequence > after_sequence][:limit]

    async def audit_head(self) -> AuditHead:
        """Where the log ends, by the note that is kept of it."""
        return self._audit_head
