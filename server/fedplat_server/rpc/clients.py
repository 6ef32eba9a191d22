"""The service `Clients`: clients and the tokens with which they enroll, filters of their list, and the whole fleet."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable

from typing_extensions import override

from fedplat.rounds import Coordinator
from fedplat.wire.auth import is_address
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc
from fedplat_server.auth import client_directory
from fedplat_server.config import Limits
from fedplat_server.coordination.availability import HOUR_S, KEEP_S, AvailabilityTracker, FleetCounter, FleetCounts
from fedplat_server.coordination.progress import ProgressTracker
from fedplat_server.coordination.revocation import EnrolledClients, Revocation
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.records import ClientFilter, ClientRecord, EnrollmentToken
from fedplat_server.database.sql_clients import AvailabilityHour, ClientStore, FleetStore
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import convert, validation
from fedplat_server.rpc import pages
from fedplat_server.rpc.interceptor import Context
from fedplat_server.rpc.operator_access import current_operator


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ClientsService(admin_pb2_grpc.ClientsServicer):
    """The handlers of the service."""

    store: ClientStore
    runner: Runner
    limits: Limits
    clients: client_directory.ClientDirectory
    enrollments: client_directory.Enrollments
    revocation: Revocation
    progress: ProgressTracker
    fleet: FleetView

    @override
    async def ListClients(
        self, request: admin_pb2.ListClientsRequest, context: Context
    ) -> admin_pb2.ListClientsResponse:
        size, after = pages.size(request.page_size), pages.token(request.page_token, pages.ID)
        store, coordinator = self.store, self.runner.coordinator
        found = select_clients(coordinator, request, self.limits)
        records = await store.list_clients(found.which, after=after, limit=size + 1)
        page, token = pages.cut(records, size, self._client, lambda record: record.client_id)
        total = len(page) if not (after or token) else await count_clients(store, found)
        return admin_pb2.ListClientsResponse(clients=page, next_page_token=token, total=total)

    @override
    async def ShowClient(self, request: admin_pb2.ShowClientRequest, context: Context) -> admin_pb2.Client:
        client_id = validation.client_id(request.client_id, Code.NO_SUCH_CLIENT)
        found = await self.store.find_clients([client_id])
        if client_id not in found:
            raise RefusedError(Code.NO_SUCH_CLIENT, repr(client_id))
        return self._client(found[client_id])

    @override
    async def ShowFleet(self, request: admin_pb2.ShowFleetRequest, context: Context) -> admin_pb2.ShowFleetResponse:
        return await self.fleet.show(request)

    @override
    async def RevokeClient(self, request: admin_pb2.RevokeClientRequest, context: Context) -> admin_pb2.Client:
        client_id = validation.client_id(request.client_id, Code.NO_SUCH_CLIENT)
        record = await self.revocation.revoke(client_id, current_operator())
        return self._client(record)

    @override
    async def CreateEnrollment(
        self, request: admin_pb2.CreateEnrollmentRequest, context: Context
    ) -> admin_pb2.CreateEnrollmentResponse:
        if len(request.address) > 255 or not is_address(request.address):
            raise RefusedError(Code.INVALID_REQUEST, "the address must be host:port, where clients reach the server")
        token, ticket = await self.enrollments.create(
            validation.name(request.population, "population"),
            request.num_uses or 1,
            request.expires_s,
            request.address,
            current_operator(),
        )
        return admin_pb2.CreateEnrollmentResponse(enrollment=_enrollment(token), ticket=ticket.to_text())

    @override
    async def ListEnrollments(
        self, request: admin_pb2.ListEnrollmentsRequest, context: Context
    ) -> admin_pb2.ListEnrollmentsResponse:
        size, after = pages.size(request.page_size), pages.token(request.page_token, pages.ID)
        tokens = await self.store.list_enrollment_tokens(after=after, limit=size + 1)
        page, token = pages.cut(tokens, size, _enrollment, lambda record: record.token_id)
        total = await self.store.count_enrollment_tokens()
        return admin_pb2.ListEnrollmentsResponse(enrollments=page, next_page_token=token, total=total)

    @override
    async def RevokeEnrollment(
        self, request: admin_pb2.RevokeEnrollmentRequest, context: Context
    ) -> admin_pb2.Enrollment:
        enrollment_id = validation.enrollment_id(request.enrollment_id)
        response = _enrollment(await self.enrollments.revoke(enrollment_id, current_operator()))
        if request.with_clients:  # after the token, so that no more clients can enroll with it
            after = validation.client_id(request.page_token, Code.INVALID_REQUEST) if request.page_token else ""
            revoked = await self.revocation.revoke_clients_of(EnrolledClients(enrollment_id, after), current_operator())
            response.num_revoked_clients, response.next_page_token = revoked
        return response

    def _client(self, record: ClientRecord) -> admin_pb2.Client:
        coordinator = self.runner.coordinator
        key = coordinator.assignment_of(record.client_id)
        assignment = coordinator.find(key, record.client_id) if key is not None else None
        offer = self.clients.find_offer(record.client_id)
        return convert.encode(
            admin_pb2.Client,
            record,
            state=self._state(record),
            last_seen_unix_s=self.clients.last_seen_unix_s.get(record.client_id, 0.0),
            job_id=key.job_id if key is not None else self._find_overdue(record.client_id),
            enrollment_id=record.token_id,
            progress=self.progress.get(assignment) if assignment is not None else None,
            trainers=sorted(offer.trainers),
            evaluators=sorted(offer.evaluators),
        )

    def _find_overdue(self, client_id: str) -> str:
        return self.progress.find_overdue(client_id, self.runner.now)

    def _state(self, record: ClientRecord) -> str:
        coordinator = self.runner.coordinator
        if record.revoked_unix_s is not None:
            return "revoked"
        if coordinator.assignment_of(record.client_id) is not None:
            return "busy"
        return "waiting" if record.client_id in coordinator.room.clients else "away"


def _enrollment(token: EnrollmentToken) -> admin_pb2.Enrollment:
    state = token.describe_problem(time.time()) or "open"
    return convert.encode(admin_pb2.Enrollment, token, enrollment_id=token.token_id, state=state)


@dataclasses.dataclass(frozen=True)
class ClientSelection:
    """The clients of a list; their number is that of `counted`, less that of `less`, plus `num_known`."""

    which: ClientFilter
    counted: ClientFilter | None
    less: ClientFilter | None = None
    num_known: int = 0


def select_clients(coordinator: Coordinator, request: admin_pb2.ListClientsRequest, limits: Limits) -> ClientSelection:
    """Return the clients that a request selects. Raises `RefusedError` if it is not valid."""
    conditions = ClientFilter(
        population=validation.name(request.population, "population") if request.population else None,
        labels=validation.labels(request.labels, limits),
        search=validation.search(request.search).lower(),
    )
    current = dataclasses.replace(conditions, is_revoked=False)
    busy = list(coordinator.busy_clients)
    match request.state:
        case "":
            return ClientSelection(conditions, conditions)
        case "revoked":
            revoked = dataclasses.replace(conditions, is_revoked=True)
            return ClientSelection(revoked, revoked)
        case "busy":
            which = dataclasses.replace(current, only=busy)
            return ClientSelection(which, which)
        case "waiting":
            waiting = _list_waiting(coordinator, conditions)
            return ClientSelection(dataclasses.replace(current, only=waiting), None, None, len(waiting))
        case "away":
            waiting = _list_waiting(coordinator, conditions)
            which = dataclasses.replace(current, without=[*waiting, *busy])
            return ClientSelection(which, current, dataclasses.replace(current, only=busy), -len(waiting))
        case _:
            text = f"state is {request.state[:80]!r}; expected waiting, busy, away or revoked, or none for all"
            raise RefusedError(Code.INVALID_REQUEST, text)


async def count_clients(store: ClientStore, selected: ClientSelection) -> int:
    """Return the number of selected clients."""
    counted = await store.count_clients(selected.counted) if selected.counted is not None else 0
    less = await store.count_clients(selected.less) if selected.less is not None else 0
    return max(counted - less + selected.num_known, 0)


def _list_waiting(coordinator: Coordinator, which: ClientFilter) -> list[str]:
    """Return the waiting clients that satisfy the conditions on population, labels and id."""
    waiting = coordinator.room.clients.values()
    if which.population is not None:
        waiting = [client for client in waiting if client.population == which.population]
    if which.search:
        waiting = [client for client in waiting if which.search in client.client_id]
    for name, value in which.labels.items():
        waiting = [client for client in waiting if client.labels.get(name) == value]
    busy = coordinator.busy_clients
    return [client.client_id for client in waiting if client.client_id not in busy]


MAX_LABELS = 20
MAX_VALUES = 20
MAX_VERSIONS = 20
DEFAULT_S = 7 * 24 * HOUR_S
MAX_ROWS = 20_000
"""Maximum number of hours of all populations in a response, which limits its size to about 1 MiB."""


@dataclasses.dataclass(eq=False, repr=False)
class FleetView:
    """Counts the clients that have enrolled, and those that are there."""

    counter: FleetCounter
    store: FleetStore
    availability: AvailabilityTracker
    coordinator: Coordinator

    async def show(self, request: admin_pb2.ShowFleetRequest) -> admin_pb2.ShowFleetResponse:
        """Return the counts of a population, or of all. Raises `RefusedError` if the request is not valid."""
        population = validation.name(request.population, "population") if request.population else ""
        since = validation.since(request.since_unix_s) or time.time() - DEFAULT_S
        counts = await self.counter.count()
        hours = await self.store.list_availability(max(since, time.time() - KEEP_S), population)
        current = [hour for hour in self.availability.current if population in ("", hour.population)]
        return admin_pb2.ShowFleetResponse(
            populations=self._populations(counts, population),
            labels=_labels(counts, population),
            versions=_versions(counts, population),
            hours=_merge(hours, current),
        )

    def _populations(self, counts: FleetCounts, only: str) -> list[admin_pb2.PopulationCount]:
        busy = Counter[str]()
        for job in self.coordinator.jobs.values():
            busy[job.spec.population] += job.num_busy
        return [
            admin_pb2.PopulationCount(
                population=name,
                num_clients=number,
                num_waiting=self.coordinator.room.num_waiting(name),
                num_busy=busy[name],
                num_revoked=counts.revoked[name],
            )
            for name, number in sorted(counts.enrolled.items())
            if only in ("", name)
        ]


def _labels(counts: FleetCounts, only: str) -> list[admin_pb2.ValueCount]:
    """Return the labels that most clients have, each with its most frequent values."""
    found: dict[str, Counter[str]] = {}
    for (population, name, value), number in counts.labels.items():
        if only in ("", population):
            found.setdefault(name, Counter())[value] += number
    frequent = sorted(found.items(), key=lambda each: (-each[1].total(), each[0]))[:MAX_LABELS]
    return [
        admin_pb2.ValueCount(name=name, value=value, count=number)
        for name, values in frequent
        for value, number in _most_frequent(values, MAX_VALUES)
    ]


def _versions(counts: FleetCounts, only: str) -> list[admin_pb2.ValueCount]:
    found = Counter[str]()
    for (population, version), number in counts.versions.items():
        if only in ("", population):
            found[version] += number
    return [admin_pb2.ValueCount(value=value, count=number) for value, number in _most_frequent(found, MAX_VERSIONS)]


def _most_frequent(values: Counter[str], most: int) -> list[tuple[str, int]]:
    return sorted(values.items(), key=lambda each: (-each[1], each[0]))[:most]


def _merge(stored: Iterable[AvailabilityHour], current: Iterable[AvailabilityHour]) -> list[admin_pb2.AvailabilityHour]:
    """Return the latest hours, with the larger numbers where the current hour is stored already."""
    merged = {(hour.hour_unix_s, hour.population): hour for hour in stored}
    for hour in current:
        key = (hour.hour_unix_s, hour.population)
        before = merged.get(key, hour)
        merged[key] = AvailabilityHour(
            *(hour.population, hour.hour_unix_s),
            num_seen=max(before.num_seen, hour.num_seen),
            max_available=max(before.max_available, hour.max_available),
        )
    latest = sorted(merged)[-MAX_ROWS:]
    return [admin_pb2.AvailabilityHour(**merged[key]._asdict()) for key in latest]
