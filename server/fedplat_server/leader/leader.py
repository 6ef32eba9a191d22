"""The leader: resumes the jobs, executes the coordinator's commands, and gives each handler what it uses."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Sequence

from fedplat.rounds import Change, HistoryRow, commands, events, states
from fedplat.rounds.protocols.base import protocol_of
from fedplat.wire.v1 import admin_pb2_grpc, events_pb2_grpc, fleet_pb2_grpc
from fedplat_server import logs
from fedplat_server.auth import addresses, authentication
from fedplat_server.auth.client_directory import Enrollments, Trust
from fedplat_server.coordination import availability, long_polls, revocation
from fedplat_server.coordination.revocation import Revocation
from fedplat_server.coordination.runner import StoredObserver
from fedplat_server.database.engine import async_url
from fedplat_server.leader.parts import LeaderParts
from fedplat_server.rpc import serving
from fedplat_server.rpc.admission import Admission
from fedplat_server.rpc.check_in import AssignmentMessages, CheckIns, CheckInService, ClientModels
from fedplat_server.rpc.client_access import AssignmentFinder, ClientAccess, EnrollmentService
from fedplat_server.rpc.clients import ClientsService, FleetView
from fedplat_server.rpc.events import EventsService, WebhooksService
from fedplat_server.rpc.fleet import FleetService, ReportService, WorkingClientsService
from fedplat_server.rpc.job_models import JobModelsService
from fedplat_server.rpc.job_rounds import JobRoundsService
from fedplat_server.rpc.job_view import JobView
from fedplat_server.rpc.jobs import JobFiles, JobsService
from fedplat_server.rpc.operator_access import OperatorAccess
from fedplat_server.rpc.operators import OperatorsService, StatusFacts
from fedplat_server.rpc.privacy import PrivacyService
from fedplat_server.rpc.report_intake import ReportIntake
from fedplat_server.rpc.review import ReviewService
from fedplat_server.rpc.router import LocalRoute
from fedplat_server.storage.read_cache import InlineModels


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
        return make_route(self._parts)

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

    async def hand_over(self) -> None:
        """Write the updates that are rows to files, for a daemon of a release that does not know the rows."""
        await asyncio.to_thread(self._parts.files.spool.hand_over)

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


def make_route(parts: LeaderParts) -> LocalRoute:
    """Return the route to all handlers, for admitted calls."""
    mandate, coordination, store = parts.mandate, parts.coordination, parts.mandate.store
    origins = addresses.Origins(mandate.config.trusted_proxies, mandate.lease.secret)
    authenticator = authentication.Authenticator(coordination.audit, coordination.clients)
    access = ClientAccess(
        authenticator=authenticator,
        clients=coordination.clients,
        quotas=coordination.quotas,
        max_calls=mandate.config.limits.max_calls,
        origins=origins,
        peers=mandate.endpoint.peers,
        gateway_secret=mandate.lease.secret,
    )
    http_address = mandate.config.http_address
    enrollments = Enrollments(
        store.clients, coordination.clients, lambda: Trust.of(mandate.endpoint.certificates, http_address)
    )
    operator_access = OperatorAccess(
        store=store.operators,
        quotas=coordination.quotas,
        origins=origins,
        audit=coordination.audit,
        delay_s=mandate.config.limits.refusal_delay_s,
    )
    privacy = PrivacyService(coordination.jobs, store.ledger, parts.production.budgets)
    events = EventsService(coordination.jobs, store.events, parts.records.event_feed, coordination.draining)
    others = [
        functools.partial(admin_pb2_grpc.add_JobsServicer_to_server, _make_jobs(parts)),
        functools.partial(admin_pb2_grpc.add_ClientsServicer_to_server, _make_clients(parts, enrollments)),
        functools.partial(admin_pb2_grpc.add_OperatorsServicer_to_server, _make_operators(parts)),
        functools.partial(admin_pb2_grpc.add_PrivacyServicer_to_server, privacy),
        functools.partial(events_pb2_grpc.add_EventsServicer_to_server, events),
        functools.partial(
            events_pb2_grpc.add_WebhooksServicer_to_server, WebhooksService(parts.records.webhooks, store)
        ),
    ]
    reads, expect_report = mandate.endpoint.reads, coordination.runner.expect_report
    admission = Admission(operator_access, access.read_claim, origins, reads, parts.files.memory, expect_report)
    return serving.route(_make_fleet(parts, access, authenticator, enrollments), others, admission)


def _make_fleet(
    parts: LeaderParts, access: ClientAccess, authenticator: authentication.Authenticator, enrollments: Enrollments
) -> fleet_pb2_grpc.FleetServicer:
    mandate, coordination, files, halves = parts.mandate, parts.coordination, parts.files, parts.production.halves
    limits, store, instruments = mandate.config.limits, mandate.store, mandate.metrics.instruments
    finder = AssignmentFinder(coordination.runner, store.jobs)
    models = ClientModels(
        access=access,
        runner=coordination.runner,
        store=store.jobs,
        blobs=files.blobs,
        chunks=files.chunks,
        inline_models=InlineModels(files.blobs),
        downloads=parts.records.downloads,
        instruments=instruments,
    )
    intake = ReportIntake(
        limits=limits,
        runner=coordination.runner,
        finder=finder,
        halves=halves,
        memory=files.memory,
        spool=files.spool,
        blobs=files.blobs,
        quotas=coordination.quotas,
    )
    identity = functools.partial(
        EnrollmentService,
        access=access,
        authenticator=authenticator,
        enrollments=enrollments,
        quotas=coordination.quotas,
        limits=limits,
        audit=store.audit,
        issuer=mandate.endpoint.issuer,
        mtls_port=mandate.endpoint.mtls_port,
    )
    is_tracing = mandate.endpoint.tracing is not None
    check_ins = CheckIns(
        access=access,
        limits=limits,
        presence=long_polls.Presence(
            coordination.clients, parts.records.availability, coordination.progress, coordination.boards
        ),
        runner=coordination.runner,
        long_polls=coordination.long_polls,
        messages=AssignmentMessages(
            coordination.runner, halves, models, is_tracing=is_tracing, max_downloads=limits.max_streams
        ),
        instruments=instruments,
        draining=coordination.draining,
    )
    free = functools.partial(CheckInService, access=access, check_ins=check_ins)
    review = functools.partial(
        ReviewService, access=access, jobs=coordination.jobs, plugins=mandate.config.plugins.table
    )
    reports = functools.partial(
        ReportService,
        access=access,
        finder=finder,
        runner=coordination.runner,
        intake=intake,
        conflicts=revocation.Conflicts(store.audit),
        memory=files.memory,
        check_ins=check_ins,
    )
    working = functools.partial(
        WorkingClientsService,
        access=access,
        finder=finder,
        limits=limits,
        runner=coordination.runner,
        long_polls=coordination.long_polls,
        progress=coordination.progress,
        downloads=parts.records.downloads,
    )
    results = functools.partial(
        FleetService,
        access=access,
        finder=finder,
        quotas=coordination.quotas,
        limits=limits,
        halves=halves,
        intake=intake,
        models=models,
    )
    return serving.combine(fleet_pb2_grpc.FleetServicer, identity, review, free, reports, working, results)


def _make_jobs(parts: LeaderParts) -> admin_pb2_grpc.JobsServicer:
    mandate, coordination, files, production = parts.mandate, parts.coordination, parts.files, parts.production
    config, store, jobs, runner = mandate.config, mandate.store, coordination.jobs, coordination.runner
    view = JobView(
        jobs, store.jobs, production.halves, coordination.progress, coordination.clients, runner, coordination.boards
    )
    max_bytes, trainers = config.limits.max_job_file_bytes, sorted(config.trainers)
    commands = functools.partial(
        JobsService,
        jobs=jobs,
        view=view,
        files=JobFiles(config.plugins.table, max_bytes, production.evaluation.names, trainers, production.halves),
        plugins=config.plugins,
        store=store,
        runner=runner,
        budgets=production.budgets,
        blobs=files.blobs,
    )
    models = functools.partial(
        JobModelsService,
        jobs=jobs,
        view=view,
        store=store,
        runner=runner,
        blobs=files.blobs,
        chunks=files.chunks,
        limits=config.limits,
    )
    rounds = functools.partial(
        JobRoundsService,
        jobs=jobs,
        view=view,
        store=store,
        runner=runner,
        progress=coordination.progress,
        evaluation=production.evaluation,
        draining=coordination.draining,
    )
    return serving.combine(admin_pb2_grpc.JobsServicer, commands, models, rounds)


def _make_clients(parts: LeaderParts, enrollments: Enrollments) -> ClientsService:
    coordination, store = parts.coordination, parts.mandate.store
    counter = availability.FleetCounter(store.fleet, asyncio.get_running_loop().time)
    return ClientsService(
        store=store.clients,
        runner=coordination.runner,
        limits=parts.mandate.config.limits,
        clients=coordination.clients,
        enrollments=enrollments,
        revocation=Revocation(store.clients, coordination.clients, coordination.runner, coordination.long_polls),
        progress=coordination.progress,
        fleet=FleetView(counter, store.fleet, parts.records.availability, coordination.runner.coordinator),
    )


def _make_operators(parts: LeaderParts) -> OperatorsService:
    mandate = parts.mandate
    facts = StatusFacts(
        started_unix_s=mandate.started_unix_s,
        data_dir=mandate.config.data_dir,
        database=async_url(mandate.config.database).get_backend_name(),
        evaluators=parts.production.evaluation.names,
        trainers=sorted(mandate.config.trainers),
        plugins=mandate.config.plugins.versions,
    )
    return OperatorsService(
        facts=facts,
        lease=mandate.lease,
        certificates=mandate.endpoint.certificates,
        store=mandate.store,
        runner=parts.coordination.runner,
        alerts=parts.records.alerts,
        full_writes=mandate.metrics.instruments.full_writes,
    )
