"""Authentication and authorization of operators, for each call of the services of `admin.proto` and `events.proto`.

The option `needed_role` of a method in the proto is the lowest role that may call it. All other methods are denied.

The operator whose call a task serves.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import datetime
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, cast

from google.protobuf.descriptor import ServiceDescriptor

from fedplat import wire
from fedplat.wire.v1 import admin_pb2, events_pb2, options_pb2
from fedplat_server import logs
from fedplat_server.auth import addresses, rate_limits
from fedplat_server.database.sql_audit import OperatorStore
from fedplat_server.errors import Code, RefusedError
from fedplat_server.records.audit import AuditAction, AuditEntry, OperatorRecord, Role, hash_token, looks_like_token
from fedplat_server.rpc.interceptor import Context

_operator: contextvars.ContextVar[OperatorRecord] = contextvars.ContextVar("operator")


def set_operator(operator: OperatorRecord) -> None:
    """Note the operator whose call this task serves."""
    _operator.set(operator)


def current_operator() -> str:
    """Return the name of the operator whose call this task serves."""
    return _operator.get().name


def current_role() -> Role:
    """Return the role of the operator whose call this task serves."""
    return _operator.get().role


_ROLES = {
    options_pb2.ROLE_VIEWER: Role.VIEWER,
    options_pb2.ROLE_OPERATOR: Role.OPERATOR,
    options_pb2.ROLE_ADMIN: Role.ADMIN,
}


def read_needed_roles(services: Iterable[ServiceDescriptor]) -> dict[str, Role]:
    """Return the lowest role for each method (`/service/name`). Raises `ValueError` for a method without the option."""
    needed: dict[str, Role] = {}
    for service in services:
        for method in service.methods:
            role = _ROLES.get(method.GetOptions().Extensions[options_pb2.needed_role])
            if role is None:
                raise ValueError(
                    f"the method {method.full_name} names no role that may call it; expected an option such as "
                    "`option (fedplat.wire.v1.needed_role) = ROLE_ADMIN;` in its proto file"
                )
            needed[f"/{service.full_name}/{method.name}"] = role
    return needed


SERVICES = tuple(service for file in (admin_pb2, events_pb2) for service in file.DESCRIPTOR.services_by_name.values())
"""The services for operators."""
NEEDED_ROLES: Mapping[str, Role] = read_needed_roles(SERVICES)
"""The lowest role for each of their methods (`/service/name`)."""

MAX_PENDING = 16
"""Refused calls of one network, or of one operator, that may wait for their response."""
MAX_CALLERS = 10_000
"""Callers whose refused calls are counted; beyond them, the one refused longest ago is dropped."""
NOTE_EVERY_S = 60.0
"""Minimum interval between audit entries for the refused calls of one network, or of one operator."""


@dataclasses.dataclass
class _RefusedCalls:
    """The refused calls of one network, or of one operator whose role is too low."""

    pending: int = 0
    num_since_audit: int = 0
    audited_at: float = -NOTE_EVERY_S


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """A refused call of a method. `operator` is the owner of the call's token ("": unknown)."""

    method: str
    code: Code
    reason: str
    operator: str = ""


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class OperatorAccess:
    """Admits the calls of operators. Delays refusals, and limits how many are pending."""

    store: OperatorStore
    quotas: rate_limits.Quotas
    origins: addresses.Origins
    audit: rate_limits.BoundedAudit
    delay_s: float
    """The time after which a refusal is sent."""
    _refused: OrderedDict[str, _RefusedCalls] = dataclasses.field(default_factory=OrderedDict, init=False)

    async def admit(self, method: str, context: Context) -> str:
        """Return the name of the calling operator. Raises `RefusedError` if it may not call `/service/name`."""
        needed = NEEDED_ROLES.get(method)
        if needed is None:
            raise RefusedError(Code.ROLE_TOO_LOW, f"no role may call {method}")
        operator = await self._authenticate(method, context)
        self._count(operator, context)
        if not operator.role.includes(needed):
            name = method.rpartition("/")[2]
            reason = f"{name} needs the role {needed}; operator {operator.name} has the role {operator.role}"
            await self._refuse(context, _Refusal(method, Code.ROLE_TOO_LOW, reason, operator.name))
        set_operator(operator)
        return operator.name

    def _count(self, operator: OperatorRecord, context: Context) -> None:
        """Count a call until it ends, even if it is refused for its role."""
        end_call = self.quotas.operator_call(operator.name)

        def on_done(_: object) -> None:
            end_call()

        context.add_done_callback(cast(Any, on_done))

    async def _authenticate(self, method: str, context: Context) -> OperatorRecord:
        metadata = context.invocation_metadata() or ()
        values = [str(value) for key, value in metadata if key == wire.METADATA_AUTHORIZATION]
        if not values:
            await self._refuse(context, _Refusal(method, Code.NO_OPERATOR, "no token was sent"))
        scheme, _, token = values[0].partition(" ")
        if len(values) > 1 or scheme != "Bearer" or not looks_like_token(token):
            reason = "the authorization is not an operator's token; expected: Bearer TOKEN"
            await self._refuse(context, _Refusal(method, Code.NO_OPERATOR, reason))
        operator = await self.store.find_operator(hash_token(token))
        if operator is None:
            reason = "the token is unknown, or its operator was removed"
            await self._refuse(context, _Refusal(method, Code.NO_OPERATOR, reason))
        if not operator.is_valid(time.time()):
            assert operator.expires_unix_s is not None
            day = datetime.datetime.fromtimestamp(operator.expires_unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
            reason = f"the token of operator {operator.name} expired {day}"
            await self._refuse(context, _Refusal(method, Code.NO_OPERATOR, reason, operator.name))
        return operator

    async def _refuse(self, context: Context, refusal: _Refusal) -> NoReturn:
        """Refuse a call after a delay, with a limit of pending ones, so that guessing tokens or methods is slow."""
        origin = self.origins.of(context)
        caller = f"operator {refusal.operator}" if refusal.code is Code.ROLE_TOO_LOW else origin.network
        refused = self._refused.setdefault(caller, _RefusedCalls())
        self._refused.move_to_end(caller)
        while len(self._refused) > MAX_CALLERS:
            self._refused.popitem(last=False)
        refused.num_since_audit += 1
        if refused.pending >= MAX_PENDING:
            raise RefusedError(Code.TOO_MANY_LOGINS)
        refused.pending += 1
        try:
            if time.time() >= refused.audited_at + NOTE_EVERY_S:
                await self._audit(refused, refusal, origin.address)
            await asyncio.sleep(self.delay_s)
        finally:
            refused.pending -= 1
        raise RefusedError(refusal.code, refusal.reason)

    async def _audit(self, refused: _RefusedCalls, refusal: _Refusal, address: str) -> None:
        refused.audited_at, count, refused.num_since_audit = time.time(), refused.num_since_audit, 0
        details = {"why": refusal.reason, "address": address, "num_refused": count}
        action = AuditAction.ROLE_REFUSED if refusal.code is Code.ROLE_TOO_LOW else AuditAction.LOGIN_REFUSED
        logs.get().warning("an operator's call was refused", method=refusal.method, **details)
        await self.audit.append(AuditEntry(refusal.operator or address, action, refusal.method, details))
