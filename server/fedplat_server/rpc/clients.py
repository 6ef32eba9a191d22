"""The service `Clients`: clients, and the tokens with which they enroll."""

from __future__ import annotations

import dataclasses
import time

from typing_extensions import override

from fedplat.wire.auth import is_address
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc
from fedplat_server.auth.client_directory import ClientDirectory
from fedplat_server.auth.enrollment import Enrollments
from fedplat_server.config import Limits
from fedplat_server.coordination.progress import ProgressTracker
from fedplat_server.coordination.revocation import EnrolledClients, Revocation
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.clients import ClientRecord, EnrollmentToken
from fedplat_server.database.sql_clients import ClientStore
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import validation
from fedplat_server.rpc import client_filters, pages
from fedplat_server.rpc.caller import current_operator
from fedplat_server.rpc.fleet_view import FleetView
from fedplat_server.rpc.handlers import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientsParts:
    """The parts that `ClientsService` uses."""

    store: ClientStore
    runner: Runner
    limits: Limits
    clients: ClientDirectory
    enrollments: Enrollments
    revocation: Revocation
    progress: ProgressTracker
    fleet: FleetView


class ClientsService(admin_pb2_grpc.ClientsServicer):
    """The handlers of the service."""

    def __init__(self, parts: ClientsParts) -> None:
        self._parts = parts

    @override
    async def ListClients(
        self, request: admin_pb2.ListClientsRequest, context: Context
    ) -> admin_pb2.ListClientsResponse:
        size, after = pages.size(request.page_size), pages.token(request.page_token, pages.ID)
        store, coordinator = self._parts.store, self._parts.runner.coordinator
        found = client_filters.select(coordinator, request, self._parts.limits)
        records = await store.list_clients(found.which, after=after, limit=size + 1)
        page, token = pages.cut(records, size, self._client, lambda record: record.client_id)
        total = len(page) if not (after or token) else await client_filters.count(store, found)
        return admin_pb2.ListClientsResponse(clients=page, next_page_token=token, total=total)

    @override
    async def ShowClient(self, request: admin_pb2.ShowClientRequest, context: Context) -> admin_pb2.Client:
        client_id = validation.client_id(request.client_id, Code.NO_SUCH_CLIENT)
        found = await self._parts.store.find_clients([client_id])
        if client_id not in found:
            raise RefusedError(Code.NO_SUCH_CLIENT, repr(client_id))
        return self._client(found[client_id])

    @override
    async def ShowFleet(self, request: admin_pb2.ShowFleetRequest, context: Context) -> admin_pb2.ShowFleetResponse:
        return await self._parts.fleet.show(request)

    @override
    async def RevokeClient(self, request: admin_pb2.RevokeClientRequest, context: Context) -> admin_pb2.Client:
        client_id = validation.client_id(request.client_id, Code.NO_SUCH_CLIENT)
        record = await self._parts.revocation.revoke(client_id, current_operator())
        return self._client(record)

    @override
    async def CreateEnrollment(
        self, request: admin_pb2.CreateEnrollmentRequest, context: Context
    ) -> admin_pb2.CreateEnrollmentResponse:
        if len(request.address) > 255 or not is_address(request.address):
            raise RefusedError(Code.INVALID_REQUEST, "the address must be host:port, where clients reach the server")
        token, ticket = await self._parts.enrollments.create(
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
        tokens = await self._parts.store.list_enrollment_tokens(after=after, limit=size + 1)
        page, token = pages.cut(tokens, size, _enrollment, lambda record: record.token_id)
        total = await self._parts.store.count_enrollment_tokens()
        return admin_pb2.ListEnrollmentsResponse(enrollments=page, next_page_token=token, total=total)

    @override
    async def RevokeEnrollment(
        self, request: admin_pb2.RevokeEnrollmentRequest, context: Context
    ) -> admin_pb2.Enrollment:
        parts, enrollment_id = self._parts, validation.enrollment_id(request.enrollment_id)
        response = _enrollment(await parts.enrollments.revoke(enrollment_id, current_operator()))
        if request.with_clients:  # after the token, so that no more clients can enroll with it
            after = validation.client_id(request.page_token, Code.INVALID_REQUEST) if request.page_token else ""
            revoked = await parts.revocation.revoke_clients_of(
                EnrolledClients(enrollment_id, after), current_operator()
            )
            response.num_revoked_clients, response.next_page_token = revoked
        return response

    def _client(self, record: ClientRecord) -> admin_pb2.Client:
        parts = self._parts
        coordinator = parts.runner.coordinator
        key = coordinator.assignment_of(record.client_id)
        assignment = coordinator.find(key, record.client_id) if key is not None else None
        offer = parts.clients.find_offer(record.client_id)
        return admin_pb2.Client(
            client_id=record.client_id,
            population=record.population,
            labels=dict(record.labels),
            state=self._state(record),
            enrolled_unix_s=record.enrolled_unix_s,
            last_seen_unix_s=parts.clients.last_seen_unix_s.get(record.client_id, 0.0),
            software_version=record.software_version,
            job_id=key.job_id if key is not None else self._find_overdue(record.client_id),
            enrollment_id=record.token_id,
            progress=parts.progress.get(assignment) if assignment is not None else None,
            trainers=sorted(offer.trainers),
            evaluators=sorted(offer.evaluators),
        )

    def _find_overdue(self, client_id: str) -> str:
        return self._parts.progress.find_overdue(client_id, self._parts.runner.now)

    def _state(self, record: ClientRecord) -> str:
        coordinator = self._parts.runner.coordinator
        if record.revoked_unix_s is not None:
            return "revoked"
        if coordinator.assignment_of(record.client_id) is not None:
            return "busy"
        return "waiting" if record.client_id in coordinator.room.clients else "away"


def _enrollment(token: EnrollmentToken) -> admin_pb2.Enrollment:
    return admin_pb2.Enrollment(
        enrollment_id=token.token_id,
        population=token.population,
        num_uses=token.num_uses,
        num_left=token.num_left,
        created_unix_s=token.created_unix_s,
        expires_unix_s=token.expires_unix_s,
        state=token.describe_problem(time.time()) or "open",
    )
