"""The methods of `admin.proto` about operators and the audit log."""

from __future__ import annotations

import math
import time
from typing import Any

from grpc import aio

from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc
from fedplat_server import operators
from fedplat_server.audit import Action, AuditEntry, AuditRow
from fedplat_server.errors import ConfigError, LastAdminError, OperatorError
from fedplat_server.operators import OperatorRecord
from fedplat_server.rpc import gate, pages
from fedplat_server.rpc.errors import Code, RefusedError
from fedplat_server.services import Services

Context = aio.ServicerContext


class OperatorMethods(admin_pb2_grpc.AdminServicer):
    """What `AdminService` answers about operators and the audit log."""

    _services: Services

    async def AddOperator(
        self, request: admin_pb2.AddOperatorRequest, context: Context[Any, Any]
    ) -> admin_pb2.AddOperatorResponse:
        """Makes an operator and tells its token."""
        try:
            name, role = operators.checked_name(request.name), operators.parse_role(request.role)
        except ConfigError as exc:
            raise RefusedError(Code.INVALID_REQUEST, str(exc)) from exc
        if not (math.isfinite(request.expires_in_s) and request.expires_in_s >= 0):
            raise RefusedError(Code.INVALID_REQUEST, f"expires_in_s is {request.expires_in_s}; expected 0 or more")
        now = time.time()
        record = OperatorRecord(name, role, now, now + request.expires_in_s if request.expires_in_s else None)
        token, token_hash = operators.new_operator_token()
        entry = AuditEntry(gate.caller(), Action.OPERATOR_ADDED, name, {"role": role})
        try:
            await self._services.store.operators.add_operator(record, token_hash, [entry])
        except OperatorError as exc:
            raise RefusedError(Code.NAME_TAKEN, str(exc)) from exc
        return admin_pb2.AddOperatorResponse(operator=_operator(record), token=token)

    async def ListOperators(
        self, request: admin_pb2.ListOperatorsRequest, context: Context[Any, Any]
    ) -> admin_pb2.ListOperatorsResponse:
        """A page of the operators."""
        size, after = pages.size(request.page_size), pages.token(request.page_token, pages.NAME)
        found = await self._services.store.operators.list_operators(after=after, limit=size + 1)
        page, token = pages.cut(found, size, _operator, lambda record: record.name)
        return admin_pb2.ListOperatorsResponse(operators=page, next_page_token=token)

    async def RemoveOperator(
        self, request: admin_pb2.RemoveOperatorRequest, context: Context[Any, Any]
    ) -> admin_pb2.RemoveOperatorResponse:
        """Removes an operator, unless nobody would be left who can make one."""
        if not operators.is_name(request.name):
            raise RefusedError(Code.NO_SUCH_OPERATOR, repr(request.name[:80]))
        entry = AuditEntry(gate.caller(), Action.OPERATOR_REMOVED, request.name)
        try:
            await self._services.store.operators.remove_operator(request.name, [entry], keep_an_admin=True)
        except LastAdminError as exc:
            raise RefusedError(Code.LAST_ADMIN) from exc
        except OperatorError as exc:
            raise RefusedError(Code.NO_SUCH_OPERATOR, repr(request.name[:80])) from exc
        return admin_pb2.RemoveOperatorResponse()

    async def ListAudit(
        self, request: admin_pb2.ListAuditRequest, context: Context[Any, Any]
    ) -> admin_pb2.ListAuditResponse:
        """A page of the rows of the audit log."""
        size, given = pages.size(request.page_size), pages.numbers(request.page_token, pages.SEQUENCE)
        after = given[0] if given is not None else min(request.after_sequence, 2**62)
        rows = await self._services.store.audit.list_rows(after, size + 1)
        events, token = pages.cut(rows, size, _audit_event, lambda row: str(row.sequence))
        return admin_pb2.ListAuditResponse(events=events, next_page_token=token)


def _audit_event(row: AuditRow) -> admin_pb2.AuditEvent:
    return admin_pb2.AuditEvent(
        sequence=row.sequence,
        unix_s=row.unix_s,
        actor=row.actor,
        action=row.action,
        subject=row.subject,
        details=row.details,
        previous_hash=row.previous_hash,
        hash=row.hash,
    )


def _operator(record: OperatorRecord) -> admin_pb2.Operator:
    return admin_pb2.Operator(
        name=record.name,
        role=record.role,
        created_unix_s=record.created_unix_s,
        expires_unix_s=record.expires_unix_s or 0.0,
    )
