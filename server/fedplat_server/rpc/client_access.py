"""Who calls the Fleet service, and for which assignment; and the handlers with which a client gets an identity."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar, cast

from typing_extensions import override

from fedplat import rounds, wire
from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc
from fedplat_server import config, errors, logs
from fedplat_server.auth import addresses, authentication, client_directory, rate_limits, tls
from fedplat_server.auth.addresses import Origins
from fedplat_server.coordination.runner import Runner
from fedplat_server.database import records, sql_audit, sql_jobs, transactions
from fedplat_server.database.records import ClientRecord
from fedplat_server.messages import validation
from fedplat_server.records.audit import AuditAction, AuditEntry
from fedplat_server.rpc import interceptor
from fedplat_server.rpc.interceptor import Context

_RENEWAL = "/fedplat.wire.v1.Fleet/RenewCertificate"
"""Its caller is authenticated by a signature only: a certificate must not be enough to get the next one."""
_T = TypeVar("_T")


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ClientAccess:
    """Admits the calls of clients."""

    authenticator: authentication.Authenticator
    clients: client_directory.ClientDirectory
    quotas: rate_limits.Quotas
    max_calls: int
    """Calls of one client that may be open at once."""
    origins: Origins
    peers: tls.PeerCertificates
    gateway_secret: str
    """What proves that a call comes from a gateway of this leader."""

    async def begin_call(self, context: Context) -> ClientRecord:
        """Return the calling client, whose call counts as open until it ends. Raises `RefusedError`."""
        client = await self.charge_failures(self._authenticate(context), context)
        logs.bind(client=client.client_id)
        self.quotas.request(client.client_id)
        end_call = self.clients.begin_call(client.client_id, self.max_calls)

        def on_done(_: object) -> None:
            end_call()

        context.add_done_callback(cast(Any, on_done))
        return client

    async def require(self, client: ClientRecord) -> None:
        """Raise `RefusedError` if a client was revoked while its call waited."""
        await self.clients.find(client.client_id)

    async def read_claim(self, method: str, context: Context) -> str:
        """Return the client that a call claims to be. Raises `RefusedError`, before a message is read, without one."""
        return await self.charge_failures(self._read_claim(method, context), context)

    def network_of(self, context: Context) -> str:
        """Return the network of a caller."""
        return self.origins.of(context).network

    async def charge_failures(self, proof: Awaitable[_T], context: Context) -> _T:
        """Await the authentication of a call; charge a failure to its network."""
        try:
            return await proof
        except errors.RefusedError as exc:
            # After a restart a whole fleet, perhaps at one address, calls with sessions that are gone. This refusal
            # costs no more than refusing for lack of tokens would, and opening a new session is counted.
            if exc.code is not errors.Code.SESSION_UNKNOWN:
                self.quotas.charge_anonymous(self.network_of(context))
            raise

    async def refund_proven(self, proof: Awaitable[_T], context: Context) -> _T:
        """Await a proof; then refund its network the cost of the challenge. Charge the network again if it fails."""
        response = await self.charge_failures(proof, context)
        self.quotas.refund_anonymous(self.network_of(context))
        return response

    async def _read_claim(self, method: str, context: Context) -> str:
        certified = "" if method == _RENEWAL else self._by_certificate(context)
        return self.authenticator.read_claim(current_call(certified))

    async def _authenticate(self, context: Context) -> ClientRecord:
        return await self.authenticator.authenticate(current_call(self._by_certificate(context)))

    def _by_certificate(self, context: Context) -> str:
        incoming = interceptor.INCOMING.get()
        if incoming.certified is None:
            forwarded = addresses.read_forwarding(incoming.metadata.items(), self.gateway_secret)
            certified = forwarded.client if forwarded is not None else self.peers.client_of(context)
            incoming.certified = certified
        return incoming.certified


class AssignmentFinder:
    """Finds assignments and their jobs."""

    def __init__(self, runner: Runner, store: sql_jobs.JobStore) -> None:
        self._coordinator = runner.coordinator
        self._store = store

    async def find(self, client: ClientRecord, token: str) -> rounds.Assignment | None:
        """Return the assignment of a token, however old; None if it is not this client's."""
        found = await self._look_up(client, token)
        if found is not None:
            logs.bind(**logs.assignment_fields(found.id))
        return found

    async def find_busy(self, client: ClientRecord, token: str) -> rounds.Assignment:
        """Return the assignment of a token on which its client works. Raises `RefusedError`."""
        assignment = await self.find(client, token)
        if assignment is None:
            raise errors.RefusedError(errors.Code.STALE_ASSIGNMENT)
        if not assignment.is_busy:
            raise errors.RefusedError(errors.Code.STALE_ASSIGNMENT, assignment.reason or assignment.state)
        return assignment

    def job_of(self, assignment: rounds.Assignment) -> rounds.JobState:
        """Return the coordinator's state of an assignment's job."""
        return self._coordinator.jobs[assignment.key.job_id]

    async def _look_up(self, client: ClientRecord, token: str) -> rounds.Assignment | None:
        token_hash = client_directory.hash_secret(token)
        key = self._coordinator.assignment_of(client.client_id)
        current = self._coordinator.find(key, client.client_id) if key is not None else None
        if current is not None and secrets.compare_digest(current.token_hash, token_hash):
            return current
        stored = await self._store.find_assignment(token_hash)
        if stored is None or stored.client_id != client.client_id:
            return None
        return self._coordinator.find(*stored.id) or stored


def current_call(certified: str = "") -> authentication.ClientCall:
    """Return the unauthenticated call that this task serves."""
    incoming = interceptor.INCOMING.get()
    return authentication.ClientCall(incoming.method, incoming.metadata, incoming.request, certified)


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class EnrollmentService(fleet_pb2_grpc.FleetServicer):
    """The methods that a client calls before it can check in."""

    access: ClientAccess
    authenticator: authentication.Authenticator
    enrollments: client_directory.Enrollments
    quotas: rate_limits.Quotas
    limits: config.Limits
    audit: sql_audit.AuditStore
    issuer: tls.CertificateIssuer
    mtls_port: int
    """The port that requires client certificates; 0 without one."""

    def __post_init__(self) -> None:
        self._certified = rate_limits.RecentEntries()
        self._certificates = transactions.BatchLoader(self._audit_certificates)

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
        newcomer = client_directory.Newcomer(
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

    async def _audit_certificate(self, client: records.ClientRecord) -> None:
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
