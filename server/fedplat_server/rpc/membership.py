"""The part of `fleet.proto` by which clients come to be known: enrolment, sessions, certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeAlias, TypeVar

from grpc import aio

from fedplat import wire
from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc
from fedplat_server.cluster import hop
from fedplat_server.identity.callers import Call
from fedplat_server.identity.enrolment import Newcomer
from fedplat_server.rpc import boundary, requests
from fedplat_server.rpc.errors import Code, RefusedError
from fedplat_server.services import Services
from fedplat_server.store.fleet import ClientRecord

Context: TypeAlias = "aio.ServicerContext[Any, Any]"  # a string: generic for the type checker only

_T = TypeVar("_T")
_RENEWAL = "/fedplat.wire.v1.Fleet/RenewCertificate"
"""No certificate leads to the next one, so that one who asks for it is known by a signature only."""


class MembershipService(fleet_pb2_grpc.FleetServicer):
    """What is asked before a client may work."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._limits = services.config.limits

    async def GetChallenge(
        self, request: fleet_pb2.GetChallengeRequest, context: Context
    ) -> fleet_pb2.GetChallengeResponse:
        """Gives a nonce."""
        self._services.quotas.stranger(self.peer_of(context))
        requests.protocol_version(request.protocol_version)
        nonce = self._services.callers.challenge()
        return fleet_pb2.GetChallengeResponse(protocol_version=wire.PROTOCOL_VERSION, nonce=nonce)

    async def Enroll(self, request: fleet_pb2.EnrollRequest, context: Context) -> fleet_pb2.EnrollResponse:
        """Makes the caller a client."""
        return await self._proven(self._enroll(request, context), context)

    async def _enroll(self, request: fleet_pb2.EnrollRequest, context: Context) -> fleet_pb2.EnrollResponse:
        requests.protocol_version(request.protocol_version)
        newcomer = Newcomer(
            population=requests.name(request.population, "population"),
            labels=requests.labels(request.labels, self._limits),
            software_version=requests.text(request.software_version, 100),
            idempotency_key=requests.key(request.idempotency_key),
            token=request.token,
            public_key=request.public_key,
        )
        self._services.callers.require_proof(_call(context), newcomer.public_key)
        record = await self._services.enrolments.enroll(newcomer)
        return fleet_pb2.EnrollResponse(client_id=record.client_id)

    async def OpenSession(
        self, request: fleet_pb2.OpenSessionRequest, context: Context
    ) -> fleet_pb2.OpenSessionResponse:
        """Begins a session, and ends the one before."""
        return await self._proven(self._open_session(request, context), context)

    async def _open_session(
        self, request: fleet_pb2.OpenSessionRequest, context: Context
    ) -> fleet_pb2.OpenSessionResponse:
        requests.protocol_version(request.protocol_version)
        await self._services.callers.prove(_call(context), request.client_id)
        self._services.quotas.request(request.client_id)
        session_id = await self._services.callers.open_session(request.client_id)
        return fleet_pb2.OpenSessionResponse(session_id=session_id)

    async def RenewCertificate(
        self, request: fleet_pb2.RenewCertificateRequest, context: Context
    ) -> fleet_pb2.RenewCertificateResponse:
        """Gives a client a certificate for TLS, if it signs for that: no certificate leads to the next one."""
        client = await self._counted(self._services.callers.authenticate_by_key(_call(context)), context)
        self._services.quotas.request(client.client_id)
        issuer = self._services.issuer
        certificate = await asyncio.to_thread(issuer.issue, client, request.signing_request)
        return fleet_pb2.RenewCertificateResponse(
            certificate=certificate, port=self._services.mtls_port, valid_s=issuer.valid.total_seconds()
        )

    async def claimed(self, method: str, context: Context) -> str:
        """Return the client that a call names: who names none is refused before the message is received."""
        return await self._counted(self._claimed(method, context), context)

    async def _claimed(self, method: str, context: Context) -> str:
        certified = "" if method == _RENEWAL else self._certified(context)
        return self._services.callers.claimed(_call(context, certified))

    def peer_of(self, context: Context) -> str:
        """Return the address of the caller, as gRPC has it."""
        return hop.of(context, self._services.lease.secret).peer

    async def _known(self, context: Context) -> ClientRecord:
        """The client that calls."""
        return await self._counted(self._authenticate(context), context)

    async def _authenticate(self, context: Context) -> ClientRecord:
        return await self._services.callers.authenticate(_call(context, self._certified(context)))

    def _certified(self, context: Context) -> str:
        passed_on = hop.read(context.invocation_metadata() or (), self._services.lease.secret)
        return passed_on.client if passed_on is not None else self._services.peers.client_of(context)

    async def _counted(self, work: Awaitable[_T], context: Context) -> _T:
        """Whoever is no client is counted with the strangers."""
        try:
            return await work
        except RefusedError as exc:
            # One whose session is from before a restart only has to open another, and that is counted. A whole
            # fleet does so at once, perhaps from one address; to say so costs no more than to say no.
            if exc.code is not Code.SESSION_UNKNOWN:
                self._services.quotas.stranger(self.peer_of(context))
            raise

    async def _proven(self, work: Awaitable[_T], context: Context) -> _T:
        """Who proves to be a client gets back what its address paid for the challenge; who does not pays again."""
        answer = await self._counted(work, context)
        self._services.quotas.no_stranger(self.peer_of(context))
        return answer


def _call(context: Context, certified: str = "") -> Call:
    """What is known of the call that this task serves."""
    incoming = boundary.INCOMING.get()
    metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
    return Call(incoming.method, metadata, incoming.request, certified)
