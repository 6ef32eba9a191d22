"""Who may call what: the one place where operators are authenticated, for every method, before its handler runs.

Whatever is not named here is denied. The Fleet service authenticates clients itself; health needs nobody's leave.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import datetime
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

from grpc import aio

from fedplat import wire
from fedplat_server import logs
from fedplat_server.audit import Action, AuditEntry
from fedplat_server.operators import OperatorRecord, Role, hash_token, looks_like_token
from fedplat_server.rpc.errors import Code, RefusedError
from fedplat_server.services import Services

ADMIN = "fedplat.wire.v1.Admin"
OPEN_SERVICES = frozenset(
    {"fedplat.wire.v1.Fleet", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
)
"""Services that operators' tokens are not asked for."""
NEEDED_ROLES: Mapping[str, Role] = {
    "GetStatus": Role.VIEWER,
    "ListJobs": Role.VIEWER,
    "ShowJob": Role.VIEWER,
    "WatchJob": Role.VIEWER,
    "ListRounds": Role.VIEWER,
    "ListClients": Role.VIEWER,
    "ListModelVersions": Role.VIEWER,
    "ExportModel": Role.VIEWER,
    "ShowPrivacy": Role.VIEWER,
    "UploadModel": Role.OPERATOR,
    "CreateJob": Role.OPERATOR,
    "StartJob": Role.OPERATOR,
    "PauseJob": Role.OPERATOR,
    "ResumeJob": Role.OPERATOR,
    "CancelJob": Role.OPERATOR,
    "RollbackJob": Role.OPERATOR,
    "RevokeClient": Role.OPERATOR,
    "CreateEnrolment": Role.OPERATOR,
    "ListEnrolments": Role.OPERATOR,
    "RevokeEnrolment": Role.OPERATOR,
    "ListAudit": Role.OPERATOR,
    "AddOperator": Role.ADMIN,
    "ListOperators": Role.ADMIN,
    "RemoveOperator": Role.ADMIN,
    "SetPrivacyBudget": Role.ADMIN,
    "RemovePrivacyBudget": Role.ADMIN,
}
"""The least role for each method of the Admin service."""

MAX_PENDING = 16
"""How many refused calls of one network, or of one operator, may wait for their answer."""
MAX_ADDRESSES = 10_000
NOTE_EVERY_S = 60.0
"""How often the refused calls of one network, or of one operator, are noted: no caller can fill the audit log."""

Context = aio.ServicerContext
_caller: contextvars.ContextVar[str] = contextvars.ContextVar("operator")


def caller() -> str:
    """The name of the operator whose call this task serves."""
    return _caller.get()


@dataclasses.dataclass
class _Refused:
    """Refused calls of one network, or of one operator whose role is too low."""

    pending: int = 0
    since_noted: int = 0
    noted_at: float = -NOTE_EVERY_S


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """Why a call of a method is refused; `operator`: whose token it brings, if that is known."""

    method: str
    code: Code
    why: str
    operator: str = ""


class Gate:
    """Lets calls pass, or raises `RefusedError`."""

    def __init__(self, services: Services, clock: Callable[[], float] = time.time) -> None:
        self._services = services
        self._delay_s = services.config.limits.refusal_delay_s
        self._clock = clock
        self._refused: OrderedDict[str, _Refused] = OrderedDict()

    async def admit(self, method: str, context: Context[Any, Any]) -> None:
        """Returns when the caller may call the method (`/service/name`)."""
        service, _, name = method.removeprefix("/").partition("/")
        if service in OPEN_SERVICES:
            return
        needed = NEEDED_ROLES.get(name) if service == ADMIN else None
        if needed is None:
            raise RefusedError(Code.ROLE_TOO_LOW, f"nobody may call {method}")
        operator = await self._authenticate(method, context)
        self._count(operator, context)
        if not operator.role.includes(needed):
            why = f"{name} needs the role {needed}; operator {operator.name} has the role {operator.role}"
            await self._refuse(context, _Refusal(method, Code.ROLE_TOO_LOW, why, operator.name))
        _caller.set(operator.name)

    def _count(self, operator: OperatorRecord, context: Context[Any, Any]) -> None:
        """Counts a call, also one that is refused for its role, until it ends."""
        end_call = self._services.quotas.operator_call(operator.name)

        def done(_: object) -> None:
            end_call()

        context.add_done_callback(cast(Any, done))

    async def _authenticate(self, method: str, context: Context[Any, Any]) -> OperatorRecord:
        given = [str(value) for key, value in context.invocation_metadata() or () if key == wire.METADATA_AUTHORIZATION]
        if not given:
            await self._refuse(context, _Refusal(method, Code.NO_OPERATOR, "no token was sent"))
        scheme, _, token = given[0].partition(" ")
        if len(given) > 1 or scheme != "Bearer" or not looks_like_token(token):
            why = "what was sent is not an operator's token"
            await self._refuse(context, _Refusal(method, Code.NO_OPERATOR, why))
        operator = await self._services.store.operators.find_operator(hash_token(token))
        if operator is None:
            why = "the token is unknown, or its operator was removed"
            await self._refuse(context, _Refusal(method, Code.NO_OPERATOR, why))
        if not operator.is_valid(self._clock()):
            assert operator.expires_unix_s is not None
            day = datetime.datetime.fromtimestamp(operator.expires_unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
            why = f"the token of operator {operator.name} expired {day}"
            await self._refuse(context, _Refusal(method, Code.NO_OPERATOR, why, operator.name))
        return operator

    async def _refuse(self, context: Context[Any, Any], refusal: _Refusal) -> NoReturn:
        """Refuses slowly, and only so many at a time: who guesses tokens, or tries what it may not do, gets not far."""
        origin = self._services.origins.of(context)
        whose = f"operator {refusal.operator}" if refusal.code is Code.ROLE_TOO_LOW else origin.network
        seen = self._refused.setdefault(whose, _Refused())
        self._refused.move_to_end(whose)
        while len(self._refused) > MAX_ADDRESSES:
            self._refused.popitem(last=False)
        seen.since_noted += 1
        if seen.pending >= MAX_PENDING:
            raise RefusedError(Code.TOO_MANY_LOGINS)
        seen.pending += 1
        try:
            if self._clock() >= seen.noted_at + NOTE_EVERY_S:
                await self._note(seen, refusal, origin.address)
            await asyncio.sleep(self._delay_s)
        finally:
            seen.pending -= 1
        raise RefusedError(refusal.code, refusal.why)

    async def _note(self, seen: _Refused, refusal: _Refusal, address: str) -> None:
        seen.noted_at, count, seen.since_noted = self._clock(), seen.since_noted, 0
        details = {"why": refusal.why, "address": address, "num_refused": count}
        action = Action.ROLE_REFUSED if refusal.code is Code.ROLE_TOO_LOW else Action.LOGIN_REFUSED
        logs.get().warning("an operator's call was refused", method=refusal.method, **details)
        await self._services.bounded_audit.append(
            AuditEntry(refusal.operator or address, action, refusal.method, details)
        )
