"""The leader: resumes the jobs, executes the coordinator's commands, and lets its parts follow stored changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from fedplat.rounds import Change, HistoryRow, commands, events, states
from fedplat.rounds.protocols.base import protocol_of
from fedplat_server import logs
from fedplat_server.coordination.runner import StoredObserver
from fedplat_server.leader import handlers
from fedplat_server.leader.parts import LeaderParts
from fedplat_server.rpc.routing.router import LocalRoute


class Leader:
    """Runs the jobs, as long as this daemon leads. `runner_task` is that of its runner, once it has begun."""

    runner_task: asyncio.Task[None]

    def __init__(self, parts: LeaderParts) -> None:
        coordination, production, records = parts.coordination, parts.production, parts.records
        self._parts = parts
        self.runner = coordination.runner
        self.store = parts.mandate.store
        self._observers: Sequence[StoredObserver] = (
            *((records.traces,) if records.traces is not None else ()),
            parts.files.spool,
            coordination.progress,
            records.downloads,
            records.alerts,
            HistoryLog(),
            production.halves,
            production.aggregation,
            production.evaluation,
            production.retention,
            coordination.jobs,  # last: who waits for a change finds all others done
        )

    async def restore(self) -> None:
        """Resume every job, and score the versions that have no metrics yet."""
        coordination, production, records = self._parts.coordination, self._parts.production, self._parts.records
        store, plugins = self.store, self._parts.mandate.config.plugins
        if records.traces is not None:
            await records.traces.begin()
        for record in coordination.jobs.all():
            loaded = plugins.select(record.state.plugins)
            await self.runner.submit(events.ServerRestarted(record.state.job_id, loaded, record.problem))
            for version in await store.jobs.list_versions(record.state.job_id):
                if not version.metrics and version.model_removed_unix_s is None:
                    production.evaluation.schedule_if_due(record.state, version.version)
            production.retention.schedule_job(record.state.job_id)
        await records.alerts.restore(store)
        records.alerts.begin(store)
        await records.alert_recorder.begin()
        records.availability.begin()
        production.halves.begin()
        production.retention.begin()
        records.webhooks.begin()

    def act(self, command: commands.Command) -> None:
        """Execute a command of the coordinator."""
        long_polls, production = self._parts.coordination.long_polls, self._parts.production
        match command:
            case commands.Assign() | commands.Refuse():
                long_polls.deliver(command)
            case commands.Abort():
                long_polls.stop(command)
            case commands.NextStep():
                long_polls.advance(command.key)
            case commands.Fold() | commands.Restart() | commands.Commit():
                production.aggregation.submit(self._parts.coordination.jobs.state(command.key.job_id), command)
            case commands.RunWarmStart():
                job = self._parts.coordination.jobs.state(command.key.job_id)
                production.halves.training_of(job.spec).begin_alone(job, command)
            case commands.Abandon():
                long_polls.advance(command.key)
                job = self._parts.coordination.jobs.state(command.key.job_id)
                production.halves.training_of(job.spec).end(command.key)
                production.aggregation.end(command.key)

    def on_stored(self, changes: Sequence[Change]) -> None:
        """Let each part follow stored changes."""
        for observer in self._observers:
            observer.on_stored(changes)

    def make_route(self) -> LocalRoute:
        """Return the route of calls to the handlers of this leader."""
        return handlers.make_route(self._parts)

    def refuse_work(self) -> None:
        """Give clients no more assignments, because the daemon stops."""
        self._parts.coordination.draining.set()

    def release_calls(self) -> None:
        """Answer the calls that wait, because the daemon stops."""
        self._parts.coordination.jobs.wake_all()
        self._parts.records.event_feed.wake()
        self._parts.coordination.long_polls.release()

    async def wait_for_commits(self) -> None:
        """Wait until no version is being committed."""
        while self._is_committing() or self.runner.has_events:
            await asyncio.sleep(0.02)

    async def finish_audit(self) -> None:
        """Store the entries of the audit log that wait for others like them."""
        await self._parts.coordination.audit.finish()

    def _is_committing(self) -> bool:
        # A warm start does not finish: it may need hours, and resumes from its last checkpoint.
        return any(
            attempt.phase is states.AttemptPhase.COMMITTING and protocol_of(job, attempt.kind).finishes
            for job in self.runner.coordinator.jobs.values()
            if (attempt := job.open_attempt) is not None
        )


class HistoryLog:
    """Writes the history of jobs to the log."""

    def on_stored(self, changes: Iterable[Change]) -> None:
        """Log the rows of stored changes."""
        for change in changes:
            for row in change.history:
                logs.get().info(
                    f"{row.entity} {row.from_state or 'new'} -> {row.to_state}", job=change.job.job_id, **_fields(row)
                )


def _fields(row: HistoryRow) -> dict[str, object]:
    fields = {
        "round": row.round,
        "attempt": row.attempt,
        "client": row.client_id,
        "reason": row.reason,
        "metrics": dict(row.metrics),
    }
    # An attempt of round 0 is one, too.
    return {name: value for name, value in fields.items() if value or (name == "round" and row.attempt)}
