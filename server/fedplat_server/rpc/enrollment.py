"""The identity part of the Fleet service: enrollment, sessions, certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from grpc import aio
from typing_extensions import override

from fedplat import wire
from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc
from fedplat_server.auth import forwarding
from fedplat_server.auth.audit_limits import RecentEntries
from fedplat_server.auth.authentication import ClientCall
from fedplat_server.auth.enrollment import Newcomer
from fedplat_server.database.batch_loader import BatchLoader
from fedplat_server.database.clients import ClientRecord
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import validation
from fedplat_server.records.audit import AuditAction, AuditEntry
from fedplat_server.rpc import interceptor
from fedplat_server.rpc.services import Services

Context: TypeAlias = "aio.ServicerContext[Any, Any]"  # a string: generic for the type checker only

_T = TypeVar("_T")
_RENEWAL = "/fedplat.wire.v1.Fleet/RenewCertificate"
"""Its caller is authenticated by a signature only: a certificate must not be enough to get the next one."""


class EnrollmentService(fleet_pb2_grpc.FleetServicer):
    """The methods that a client calls before it can check in, and the authentication of all methods."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._limits = services.config.limits
        self._certified = RecentEntries()
        self._certificates = BatchLoader(self._audit_certificates)

    @override
    async def GetChallenge(
        self, request: fleet_pb2.GetChallengeRequest, context: Context
    ) -> fleet_pb2.GetChallengeResponse:
        validation.protocol_version(request.protocol_version)
        self._services.quotas.challenge(self._network_of(context))
        nonce = self._services.authenticator.challenge()
        return fleet_pb2.GetChallengeResponse(protocol_version=wire.PROTOCOL_VERSION, nonce=nonce)

    @override
    async def Enroll(self, request: fleet_pb2.EnrollRequest, context: Context) -> fleet_pb2.EnrollResponse:
        return await self._refund_proven(self._enroll(request, context), context)

    async def _enroll(self, request: fleet_pb2.EnrollRequest, context: Context) -> fleet_pb2.EnrollResponse:
        validation.protocol_version(request.protocol_version)
        newcomer = Newcomer(
            population=validation.name(request.population, "population"),
            labels=validation.labels(request.labels, self._limits),
            software_version=validation.text(request.software_version, 100),
            idempotency_key=validation.key(request.idempotency_key),
            token=request.token,
            public_key=request.public_key,
        )
        self._services.authenticator.require_proof(_call(), newcomer.public_key)
        self._services.quotas.require_anonymous(self._network_of(context))
        record = await self._services.enrollments.enroll(newcomer)
        return fleet_pb2.EnrollResponse(client_id=record.client_id)

    @override
    async def OpenSession(
        self, request: fleet_pb2.OpenSessionRequest, context: Context
    ) -> fleet_pb2.OpenSessionResponse:
        return await self._refund_proven(self._open_session(request, context), context)

    async def _open_session(
        self, request: fleet_pb2.OpenSessionRequest, context: Context
    ) -> fleet_pb2.OpenSessionResponse:
        validation.protocol_version(request.protocol_version)
        client_id = validation.client_id(request.client_id, Code.CLIENT_UNKNOWN)
        await self._services.authenticator.prove(_call(), client_id)
        self._services.quotas.session(client_id)
        session_id = await self._services.authenticator.open_session(client_id)
        return fleet_pb2.OpenSessionResponse(session_id=session_id)

    @override
    async def RenewCertificate(
        self, request: fleet_pb2.RenewCertificateRequest, context: Context
    ) -> fleet_pb2.RenewCertificateResponse:
        client = await self._charge_failures(self._services.authenticator.authenticate_by_key(_call()), context)
        self._services.quotas.request(client.client_id)
        issuer = self._services.issuer
        issued = await asyncio.to_thread(issuer.issue, client, request.signing_request, listener=request.listener)
        await self._audit_certificate(client)
        return fleet_pb2.RenewCertificateResponse(
            certificate=issued.certificate,
            port=self._services.mtls_port,
            valid_s=issuer.valid.total_seconds(),
            authorities=issued.authorities,
        )

    async def _audit_certificate(self, client: ClientRecord) -> None:
        """Audit a certificate before the client receives it, at most once an hour per client."""
        if not self._certified.add(client.client_id, asyncio.get_running_loop().time()):
            return
        try:
            await self._certificates.load(client.client_id)
        except BaseException:
            self._certified.forget(client.client_id)
            raise

    async def _audit_certificates(self, client_ids: Sequence[str]) -> Mapping[str, None]:
        """Append the entries of many clients in one transaction: a whole fleet may renew at once."""
        entries = [AuditEntry(name, AuditAction.CERTIFICATE_ISSUED, name) for name in client_ids]
        await self._services.store.audit.append(entries)
        return {}

    async def read_claim(self, method: str, context: Context) -> str:
        """Return the client that a call claims to be. Raises `RefusedError`, before a message is read, without one."""
        return await self._charge_failures(self._read_claim(method, context), context)

    async def _read_claim(self, method: str, context: Context) -> str:
        certified = "" if method == _RENEWAL else self._by_certificate(context)
        return self._services.authenticator.read_claim(_call(certified))

    def _network_of(self, context: Context) -> str:
        return self._services.origins.of(context).network

    async def _authenticate_client(self, context: Context) -> ClientRecord:
        return await self._charge_failures(self._authenticate(context), context)

    async def _authenticate(self, context: Context) -> ClientRecord:
        return await self._services.authenticator.authenticate(_call(self._by_certificate(context)))

    def _by_certificate(self, context: Context) -> str:
        incoming = interceptor.INCOMING.get()
        if incoming.certified is None:
            forwarded = forwarding.read(incoming.metadata.items(), self._services.lease.secret)
            certified = forwarded.client if forwarded is not None else self._services.peers.client_of(context)
            incoming.certified = certified
        return incoming.certified

    async def _charge_failures(self, proof: Awaitable[_T], context: Context) -> _T:
        """Await the authentication of a call; charge a failure to its network."""
        try:
            return await proof
        except RefusedError as exc:
            # After a restart a whole fleet, perhaps at one address, calls with sessions that are gone. This refusal
            # costs no more than refusing for lack of tokens would, and opening a new session is counted.
            if exc.code is not Code.SESSION_UNKNOWN:
                self._services.quotas.charge_anonymous(self._network_of(context))
            raise

    async def _refund_proven(self, proof: Awaitable[_T], context: Context) -> _T:
        """Await a proof; then refund its network the cost of the challenge. Charge the network again if it fails."""
        response = await self._charge_failures(proof, context)
        self._services.quotas.refund_anonymous(self._network_of(context))
        return response


def _call(certified: str = "") -> ClientCall:
    """Return the unauthenticated call that this task serves."""
    incoming = interceptor.INCOMING.get()
    return ClientCall(incoming.method, incoming.metadata, incoming.request, certified)
