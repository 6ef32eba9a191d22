"""Stores an event when an alert is raised and when it ends: a background task of the leader.

An evaluation follows from the state of the moment, so after a restart the alerts that the database still has as raised
are compared with the first evaluation: no event is repeated, and an alert that ended meanwhile gets its event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from fedplat_server import logs
from fedplat_server.coordination.alert_monitor import AlertMonitor, DiskSpace
from fedplat_server.coordination.alerts import Alert, AlertBook, Severity, WebhookFacts
from fedplat_server.database.store import Store
from fedplat_server.errors import LeadershipLostError, StoreError
from fedplat_server.records import webhooks
from fedplat_server.records.events import EventRow

INTERVAL_S = 10.0
WEBHOOK_FAILING_S = 3600.0
"""The time for which a webhook must fail: receivers are restarted now and then."""


class AlertRecorder:
    """The background task. `unix_s` is the wall clock."""

    def __init__(
        self, monitor: AlertMonitor, store: Store, data_dir: Path, unix_s: Callable[[], float] = time.time
    ) -> None:
        self._monitor = monitor
        self._store = store
        self._data_dir = data_dir
        self._unix_s = unix_s
        self._recorded = AlertBook()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Read the raised alerts, and start the task."""
        raised = [(_restore(event), event.unix_s) for event in await self._store.events.list_raised_alerts()]
        self._recorded.load(raised)
        self._monitor.restore_alerts(raised)
        self._task = asyncio.create_task(self._run(), name="alerts")

    async def close(self) -> None:
        """Stop the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def record(self) -> None:
        """Evaluate the alerts, and store the events of the changes since the last call."""
        now = self._unix_s()
        failing = await self._store.webhooks.find_failing_webhooks(now - WEBHOOK_FAILING_S)
        self._monitor.failing_webhooks = [
            WebhookFacts(
                webhook.webhook_id,
                webhooks.parse_url(webhook.url).origin,
                webhook.last_result,
                now - (webhook.failing_since_unix_s or now),
            )
            for webhook in failing
        ]
        disk = await asyncio.to_thread(DiskSpace.of, self._data_dir)
        found = [alert for alert, _ in self._monitor.evaluate(disk)]
        changes = self._recorded.compare(found)
        await self._store.events.record_alerts(changes.raised, changes.ended)
        self._recorded.update(found, now)  # only now: after an error they are still to be stored

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.record()
            except LeadershipLostError:
                return
            except StoreError as exc:
                logs.get().warning("changed alerts could not be stored", error=str(exc))


def _restore(event: EventRow) -> Alert:
    # Only its identity and its text matter: the next evaluation makes it anew, or ends it.
    return Alert(event.subject, Severity.WARNING, event.text, "", event.job_id, event.population)
