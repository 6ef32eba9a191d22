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
from typing import Any, NoReturn

from grpc import aio

from fedplat import wire
from fedplat_server import logs
from fedplat_server.audit import Action, AuditEntry
from fedplat_server.cluster import hop
from fedplat_server.operators import OperatorRecord, Role, hash_token, looks_like_token
from fedplat_server.rpc.errors import Code, RefusedError
from fedplat_server.store.port import Store

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
"""How many refused calls of one address may wait for their answer."""
MAX_ADDRESSES = 10_000
NOTE_EVERY_S = 60.0
"""How often the refused calls of one address are noted, so that nobody can fill the audit log."""

Context = aio.ServicerContext
_caller: contextvars.ContextVar[str] = contextvars.ContextVar("operator")


def caller() -> str:
    """The name of the operator whose call this task serves."""
    return _caller.get()


@dataclasses.dataclass
class _Address:
    """Refused calls of one address."""

    pending: int = 0
    since_noted: int = 0
    noted_at: float = -NOTE_EVERY_S


class Gate:
    """Lets calls pass, or raises `RefusedError`."""

    def __init__(self, store: Store, delay_s: float, secret: str, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._delay_s = delay_s
        self._secret = secret  # of the daemons that pass calls on
        self._clock = clock
        self._addresses: OrderedDict[str, _Address] = OrderedDict()

    async def admit(self, method: str, context: Context[Any, Any]) -> None:
        """Returns when the caller may call the method (`/service/name`)."""
        service, _, name = method.removeprefix("/").partition("/")
        if service in OPEN_SERVICES:
            return
        needed = NEEDED_ROLES.get(name) if service == ADMIN else None
        if needed is None:
            raise RefusedError(Code.ROLE_TOO_LOW, f"nobody may call {method}")
        operator = await self._authenticate(method, context)
        if not operator.role.includes(needed):
            raise RefusedError(
                Code.ROLE_TOO_LOW,
                f"{name} needs the role {needed}; operator {operator.name} has the role {operator.role}",
            )
        _caller.set(operator.name)

    async def _authenticate(self, method: str, context: Context[Any, Any]) -> OperatorRecord:
        given = [str(value) for key, value in context.invocation_metadata() or () if key == wire.METADATA_AUTHORIZATION]
        if not given:
            await self._refuse(method, context, "", "no token was sent")
        scheme, _, token = given[0].partition(" ")
        if len(given) > 1 or scheme != "Bearer" or not looks_like_token(token):
            await self._refuse(method, context, "", "what was sent is not an operator's token")
        operator = await self._store.operator_by_token(hash_token(token))
        if operator is None:
            await self._refuse(method, context, "", "the token is unknown, or its operator was removed")
        if not operator.is_valid(self._clock()):
            assert operator.expires_unix_s is not None
            day = datetime.datetime.fromtimestamp(operator.expires_unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
            await self._refuse(method, context, operator.name, f"the token of operator {operator.name} expired {day}")
        return operator

    async def _refuse(self, method: str, context: Context[Any, Any], actor: str, why: str) -> NoReturn:
        """Refuses slowly, and only so many at a time: who guesses tokens shall not get far."""
        address = _host_of(hop.of(context, self._secret).peer)
        seen = self._addresses.setdefault(address, _Address())
        self._addresses.move_to_end(address)
        while len(self._addresses) > MAX_ADDRESSES:
            self._addresses.popitem(last=False)
        seen.since_noted += 1
        if seen.pending >= MAX_PENDING:
            raise RefusedError(Code.TOO_MANY_LOGINS)
        seen.pending += 1
        try:
            if self._clock() >= seen.noted_at + NOTE_EVERY_S:
                await self._note(
                    seen, AuditEntry(actor or address, Action.LOGIN_REFUSED, method, {"why": why}), address
                )
            await asyncio.sleep(self._delay_s)
        finally:
            seen.pending -= 1
        raise RefusedError(Code.NO_OPERATOR, why)

    async def _note(self, seen: _Address, entry: AuditEntry, address: str) -> None:
        seen.noted_at, count, seen.since_noted = self._clock(), seen.since_noted, 0
        details = {**entry.details, "address": address, "num_refused": count}
        logs.get().warning("an operator's call was refused", method=entry.subject, **details)
        await self._store.append_audit([dataclasses.replace(entry, details=details)])


def _host_of(peer: str) -> str:
    """The address of a gRPC peer without its port: `ipv4:10.0.0.7`."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer[:100]
