"""The handlers of a leading daemon: each gets only the parts that it uses."""

from __future__ import annotations

import asyncio
import functools

from fedplat.wire.v1 import admin_pb2_grpc, events_pb2_grpc, fleet_pb2_grpc
from fedplat_server.auth import addresses, authentication
from fedplat_server.auth.enrollment import Enrollments, Trust
from fedplat_server.coordination import availability, conflicts, long_polls
from fedplat_server.coordination.revocation import Revocation
from fedplat_server.database.engine import async_url
from fedplat_server.leader.parts import LeaderParts
from fedplat_server.rpc import serving
from fedplat_server.rpc.admission import Admission
from fedplat_server.rpc.check_in import AssignmentMessages, CheckInService
from fedplat_server.rpc.client_access import AssignmentFinder, ClientAccess
from fedplat_server.rpc.client_models import ClientModels
from fedplat_server.rpc.clients import ClientsService, FleetView
from fedplat_server.rpc.enrollment import EnrollmentService
from fedplat_server.rpc.events import EventsService
from fedplat_server.rpc.fleet import FleetService
from fedplat_server.rpc.job_models import JobModelsService
from fedplat_server.rpc.job_rounds import JobRoundsService
from fedplat_server.rpc.job_view import JobView
from fedplat_server.rpc.jobs import JobFiles, JobsService
from fedplat_server.rpc.operator_access import OperatorAccess
from fedplat_server.rpc.operators import OperatorsService, StatusFacts
from fedplat_server.rpc.privacy import PrivacyService
from fedplat_server.rpc.report_intake import ReportIntake
from fedplat_server.rpc.routing.router import LocalRoute
from fedplat_server.rpc.webhooks import WebhooksService
from fedplat_server.rpc.working_clients import WorkingClientsService
from fedplat_server.storage.read_cache import InlineModels


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
    enrollments = Enrollments(store.clients, coordination.clients, lambda: Trust.of(mandate.endpoint.certificates))
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
    admission = Admission(operator_access, access.read_claim, origins, mandate.endpoint.reads, parts.files.memory)
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
    free = functools.partial(
        CheckInService,
        access=access,
        limits=limits,
        presence=long_polls.Presence(coordination.clients, parts.records.availability, coordination.progress),
        runner=coordination.runner,
        long_polls=coordination.long_polls,
        messages=AssignmentMessages(coordination.runner, halves, models, is_tracing=is_tracing),
        instruments=instruments,
        draining=coordination.draining,
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
        conflicts=conflicts.Conflicts(store.audit),
    )
    return serving.combine(fleet_pb2_grpc.FleetServicer, identity, free, working, results)


def _make_jobs(parts: LeaderParts) -> admin_pb2_grpc.JobsServicer:
    mandate, coordination, files, production = parts.mandate, parts.coordination, parts.files, parts.production
    config, store, jobs, runner = mandate.config, mandate.store, coordination.jobs, coordination.runner
    view = JobView(jobs, store.jobs, production.halves, coordination.progress, coordination.clients, runner)
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
