"""The service `Operators`: the status of the server, its operators and its audit log."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import resource
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from typing_extensions import override

from fedplat import wire
from fedplat.config.loaded_plugins import PluginVersion
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc
from fedplat_server import __version__
from fedplat_server.auth import addresses, tls
from fedplat_server.coordination.alert_monitor import AlertMonitor, DiskSpace
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.store import Store
from fedplat_server.errors import Code, ConfigError, LastAdminError, OperatorError, RefusedError
from fedplat_server.instruments import FullWrites
from fedplat_server.messages import convert, validation
from fedplat_server.records import audit
from fedplat_server.records.audit import OperatorRecord
from fedplat_server.records.events import Alert, Severity
from fedplat_server.records.lease import Lease
from fedplat_server.rpc import pages
from fedplat_server.rpc.interceptor import Context
from fedplat_server.rpc.operator_access import current_operator, current_role

MAX_ALERTS = 100
_SEVERITIES = {Severity.WARNING: admin_pb2.ALERT_SEVERITY_WARNING, Severity.CRITICAL: admin_pb2.ALERT_SEVERITY_CRITICAL}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusFacts:
    """What the status of a leader shows that does not change while it leads."""

    started_unix_s: float
    data_dir: Path
    database: str
    """SQLite or PostgreSQL, as SQLAlchemy names them."""
    evaluators: Sequence[str]
    trainers: Sequence[str]
    plugins: Sequence[PluginVersion]


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class OperatorsService(admin_pb2_grpc.OperatorsServicer):
    """The handlers of the service."""

    facts: StatusFacts
    lease: Lease
    certificates: tls.Certificates | None
    store: Store
    runner: Runner
    alerts: AlertMonitor
    full_writes: FullWrites

    @override
    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        facts = self.facts
        coordinator, certificates = self.runner.coordinator, self.certificates
        disk = await asyncio.to_thread(DiskSpace.of, facts.data_dir)
        alerts = self.alerts.evaluate(disk)
        jobs = Counter(state.status.value for state in coordinator.jobs.values())
        return admin_pb2.GetStatusResponse(
            software_version=__version__,
            protocol_version=wire.PROTOCOL_VERSION,
            uptime_s=time.time() - facts.started_unix_s,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            num_clients=await self.store.clients.count_clients(),
            num_waiting=len(coordinator.room.clients),
            num_busy=coordinator.num_busy,
            num_jobs=dict(jobs),
            process_id=os.getpid(),
            evaluators=facts.evaluators,
            trainers=facts.trainers,
            plugins=convert.plugins(facts.plugins),
            num_storage_full=self.full_writes.num,
            leader=self.lease.holder,
            leader_address=self.lease.address,
            term=self.lease.term,
            gateway=addresses.forwarded_for(context, self.lease.secret).gateway,
            insecure=certificates is None,
            certificate_expires_unix_s=certificates.loaded.expires.timestamp() if certificates else 0.0,
            certificate_days_left=certificates.days_left if certificates else 0.0,
            operator=current_operator(),
            role=current_role(),
            disk_free_bytes=disk.free_bytes,
            disk_total_bytes=disk.total_bytes,
            database=facts.database,
            alerts=[_alert(alert, since_unix_s) for alert, since_unix_s in alerts[:MAX_ALERTS]],
            num_alerts=len(alerts),
        )

    @override
    async def AddOperator(
        self, request: admin_pb2.AddOperatorRequest, context: Context
    ) -> admin_pb2.AddOperatorResponse:
        try:
            name, role = audit.checked_name(request.name), audit.parse_role(request.role)
        except ConfigError as exc:
            raise RefusedError(Code.INVALID_REQUEST, str(exc)) from exc
        if not (math.isfinite(request.expires_in_s) and request.expires_in_s >= 0):
            raise RefusedError(Code.INVALID_REQUEST, f"expires_in_s is {request.expires_in_s}; expected 0 or more")
        now = time.time()
        record = OperatorRecord(name, role, now, now + request.expires_in_s if request.expires_in_s else None)
        token, token_hash = audit.new_operator_token()
        entry = audit.AuditEntry(current_operator(), audit.AuditAction.OPERATOR_ADDED, name, {"role": role})
        try:
            await self.store.operators.add_operator(record, token_hash, [entry])
        except OperatorError as exc:
            raise RefusedError(Code.NAME_TAKEN, str(exc)) from exc
        return admin_pb2.AddOperatorResponse(operator=convert.encode(admin_pb2.Operator, record), token=token)

    @override
    async def ListOperators(
        self, request: admin_pb2.ListOperatorsRequest, context: Context
    ) -> admin_pb2.ListOperatorsResponse:
        size, after = pages.size(request.page_size), pages.token(request.page_token, pages.NAME)
        records = await self.store.operators.list_operators(after=after, limit=size + 1)
        page, token = pages.cut(records, size, partial(convert.encode, admin_pb2.Operator), lambda record: record.name)
        return admin_pb2.ListOperatorsResponse(operators=page, next_page_token=token)

    @override
    async def RemoveOperator(
        self, request: admin_pb2.RemoveOperatorRequest, context: Context
    ) -> admin_pb2.RemoveOperatorResponse:
        if not audit.is_name(request.name):
            raise RefusedError(Code.NO_SUCH_OPERATOR, repr(request.name[:80]))
        entry = audit.AuditEntry(current_operator(), audit.AuditAction.OPERATOR_REMOVED, request.name)
        try:
            await self.store.operators.remove_operator(request.name, [entry], keep_an_admin=True)
        except LastAdminError as exc:
            raise RefusedError(Code.LAST_ADMIN) from exc
        except OperatorError as exc:
            raise RefusedError(Code.NO_SUCH_OPERATOR, repr(request.name[:80])) from exc
        return admin_pb2.RemoveOperatorResponse()

    @override
    async def ListAudit(self, request: admin_pb2.ListAuditRequest, context: Context) -> admin_pb2.ListAuditResponse:
        size, last = pages.size(request.page_size), pages.numbers(request.page_token, pages.SEQUENCE)
        if request.newest_first and request.after_sequence:
            raise RefusedError(Code.INVALID_REQUEST, "after_sequence and newest_first: expected only one of them")
        which = audit.AuditFilter(
            actor=validation.search(request.actor, "actor"),
            action=validation.search(request.action, "action"),
            since_unix_s=validation.since(request.since_unix_s),
            newest_first=request.newest_first,
        )
        first = min(request.after_sequence, 2**62)
        rows = await self.store.audit.list_rows(last[0] if last is not None else first, size + 1, which)
        events, token = pages.cut(
            rows, size, partial(convert.encode, admin_pb2.AuditEvent), lambda row: str(row.sequence)
        )
        total = await self.store.audit.count_rows(first, which)
        return admin_pb2.ListAuditResponse(events=events, next_page_token=token, total=total)


def _alert(alert: Alert, since_unix_s: float) -> admin_pb2.Alert:
    return convert.encode(admin_pb2.Alert, alert, severity=_SEVERITIES[alert.severity], since_unix_s=since_unix_s)
