"""The part of `admin.proto` about clients and the tokens by which they enrol."""

from __future__ import annotations

import time
from typing import Any, TypeAlias

from grpc import aio

from fedplat.identity import is_address
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc
from fedplat_server.identity.revocation import Enrolled
from fedplat_server.rpc import gate, pages, requests
from fedplat_server.rpc.errors import Code, RefusedError
from fedplat_server.services import Services
from fedplat_server.store.clients import ClientRecord, EnrolmentToken

Context: TypeAlias = "aio.ServicerContext[Any, Any]"  # a string: generic for the type checker only


class MembersMethods(admin_pb2_grpc.AdminServicer):
    """What `AdminService` answers about who takes part, and who may."""

    _services: Services

    async def ListClients(
        self, request: admin_pb2.ListClientsRequest, context: Context
    ) -> admin_pb2.ListClientsResponse:
        """A page of the enrolled clients, and what each of them does."""
        size, after = pages.size(request.page_size), pages.token(request.page_token, pages.ID)
        population = requests.name(request.population, "population") if request.population else None
        records = await self._services.store.clients.list_clients(population, after=after, limit=size + 1)
        page, token = pages.cut(records, size, self._client, lambda record: record.client_id)
        return admin_pb2.ListClientsResponse(clients=page, next_page_token=token)

    async def RevokeClient(self, request: admin_pb2.RevokeClientRequest, context: Context) -> admin_pb2.Client:
        """Ends a client's membership."""
        services, client_id = self._services, requests.client_id(request.client_id, Code.NO_SUCH_CLIENT)
        return self._client(await services.revocation.revoke(client_id, gate.caller(), services.runner, services.desk))

    async def CreateEnrolment(
        self, request: admin_pb2.CreateEnrolmentRequest, context: Context
    ) -> admin_pb2.CreateEnrolmentResponse:
        """Makes a token and the ticket that carries it."""
        if len(request.address) > 255 or not is_address(request.address):
            raise RefusedError(Code.INVALID_REQUEST, "the address must be host:port, as the clients shall call it")
        token, ticket = await self._services.enrolments.create(
            requests.name(request.population, "population"),
            request.num_uses or 1,
            request.expires_s,
            request.address,
            gate.caller(),
        )
        return admin_pb2.CreateEnrolmentResponse(enrolment=_enrolment(token), ticket=ticket.to_text())

    async def ListEnrolments(
        self, request: admin_pb2.ListEnrolmentsRequest, context: Context
    ) -> admin_pb2.ListEnrolmentsResponse:
        """A page of the tokens, good or not."""
        size, after = pages.size(request.page_size), pages.token(request.page_token, pages.ID)
        tokens = await self._services.store.clients.list_enrolment_tokens(after=after, limit=size + 1)
        page, token = pages.cut(tokens, size, _enrolment, lambda one: one.token_id)
        return admin_pb2.ListEnrolmentsResponse(enrolments=page, next_page_token=token)

    async def RevokeEnrolment(self, request: admin_pb2.RevokeEnrolmentRequest, context: Context) -> admin_pb2.Enrolment:
        """Revoke a ticket, and the clients that have enrolled by it if they are to go with it."""
        services, enrolment_id = self._services, requests.enrolment_id(request.enrolment_id)
        answer = _enrolment(await services.enrolments.revoke(enrolment_id, gate.caller()))
        if request.with_clients:  # no other one can enrol by it any more
            after = requests.client_id(request.page_token, Code.INVALID_REQUEST) if request.page_token else ""
            revoked = await services.revocation.revoke_clients_of(
                Enrolled(enrolment_id, after), gate.caller(), services.runner, services.desk
            )
            answer.num_revoked_clients, answer.next_page_token = revoked
        return answer

    def _client(self, record: ClientRecord) -> admin_pb2.Client:
        services = self._services
        key = services.runner.coordinator.assignment_of(record.client_id)
        return admin_pb2.Client(
            client_id=record.client_id,
            population=record.population,
            labels=dict(record.labels),
            state=self._state(record),
            enrolled_unix_s=record.enrolled_unix_s,
            last_seen_unix_s=services.clients.last_seen_unix_s.get(record.client_id, 0.0),
            software_version=record.software_version,
            job_id=key.job_id if key is not None else "",
            enrolment_id=record.token_id,
        )

    def _state(self, record: ClientRecord) -> str:
        coordinator = self._services.runner.coordinator
        if record.revoked_unix_s is not None:
            return "revoked"
        if coordinator.assignment_of(record.client_id) is not None:
            return "busy"
        return "waiting" if record.client_id in coordinator.room.clients else "away"


def _enrolment(token: EnrolmentToken) -> admin_pb2.Enrolment:
    return admin_pb2.Enrolment(
        enrolment_id=token.token_id,
        population=token.population,
        num_uses=token.num_uses,
        num_left=token.num_left,
        created_unix_s=token.created_unix_s,
        expires_unix_s=token.expires_unix_s,
        state=token.why_not(time.time()) or "open",
    )
