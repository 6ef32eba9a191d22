"""The handlers of the Fleet service with which a client gets an identity: enrollment, sessions, certificates."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence

from typing_extensions import override

from fedplat import wire
from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc
from fedplat_server import config, errors
from fedplat_server.auth import authentication, enrollment, rate_limits, tls
from fedplat_server.database import batch_loader, clients, sql_audit
from fedplat_server.messages import validation
from fedplat_server.records.audit import AuditAction, AuditEntry
from fedplat_server.rpc.client_access import ClientAccess, current_call
from fedplat_server.rpc.handlers import Context


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class EnrollmentService(fleet_pb2_grpc.FleetServicer):
    """The methods that a client calls before it can check in."""

    access: ClientAccess
    authenticator: authentication.Authenticator
    enrollments: enrollment.Enrollments
    quotas: rate_limits.Quotas
    limits: config.Limits
    audit: sql_audit.AuditStore
    issuer: tls.CertificateIssuer
    mtls_port: int
    """The port that requires client certificates; 0 without one."""

    def __post_init__(self) -> None:
        self._certified = rate_limits.RecentEntries()
        self._certificates = batch_loader.BatchLoader(self._audit_certificates)

    @override
    async def GetChallenge(
        self, request: fleet_pb2.GetChallengeRequest, context: Context
    ) -> fleet_pb2.GetChallengeResponse:
        validation.protocol_version(request.protocol_version)
        self.quotas.challenge(self.access.network_of(context))
        nonce = self.authenticator.challenge()
        return fleet_pb2.GetChallengeResponse(protocol_version=wire.PROTOCOL_VERSION, nonce=nonce)

    @override
    async def Enroll(self, request: fleet_pb2.EnrollRequest, context: Context) -> fleet_pb2.EnrollResponse:
        return await self.access.refund_proven(self._enroll(request, context), context)

    async def _enroll(self, request: fleet_pb2.EnrollRequest, context: Context) -> fleet_pb2.EnrollResponse:
        validation.protocol_version(request.protocol_version)
        newcomer = enrollment.Newcomer(
            population=validation.name(request.population, "population"),
            labels=validation.labels(request.labels, self.limits),
            software_version=validation.text(request.software_version, 100),
            idempotency_key=validation.key(request.idempotency_key),
            token=request.token,
            public_key=request.public_key,
        )
        self.authenticator.require_proof(current_call(), newcomer.public_key)
        self.quotas.require_anonymous(self.access.network_of(context))
        record = await self.enrollments.enroll(newcomer)
        return fleet_pb2.EnrollResponse(client_id=record.client_id)

    @override
    async def OpenSession(
        self, request: fleet_pb2.OpenSessionRequest, context: Context
    ) -> fleet_pb2.OpenSessionResponse:
        return await self.access.refund_proven(self._open_session(request, context), context)

    async def _open_session(
        self, request: fleet_pb2.OpenSessionRequest, context: Context
    ) -> fleet_pb2.OpenSessionResponse:
        validation.protocol_version(request.protocol_version)
        client_id = validation.client_id(request.client_id, errors.Code.CLIENT_UNKNOWN)
        await self.authenticator.prove(current_call(), client_id)
        self.quotas.session(client_id)
        session_id = await self.authenticator.open_session(client_id)
        return fleet_pb2.OpenSessionResponse(session_id=session_id)

    @override
    async def RenewCertificate(
        self, request: fleet_pb2.RenewCertificateRequest, context: Context
    ) -> fleet_pb2.RenewCertificateResponse:
        client = await self.access.charge_failures(self.authenticator.authenticate_by_key(current_call()), context)
        self.quotas.request(client.client_id)
        issuer = self.issuer
        issued = await asyncio.to_thread(issuer.issue, client, request.signing_request, listener=request.listener)
        await self._audit_certificate(client)
        return fleet_pb2.RenewCertificateResponse(
            certificate=issued.certificate,
            port=self.mtls_port,
            valid_s=issuer.valid.total_seconds(),
            authorities=issued.authorities,
        )

    async def _audit_certificate(self, client: clients.ClientRecord) -> None:
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
        await self.audit.append(entries)
        return {}
