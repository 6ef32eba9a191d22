"""A client's standing with its server: enrollment, and the check-in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fedplat import wire
from fedplat.auth import Ticket
from fedplat.codecs import CODECS
from fedplat.wire import handshake
from fedplat.wire.v1 import fleet_pb2
from fedplat_client._auth.authenticator import SignedAccess
from fedplat_client._auth.calls import Connection, version_check
from fedplat_client._state.data_dir import DataDirectory, Identity
from fedplat_client._version import __version__
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import (
    CallError,
    CallRefusedError,
    EnrollmentError,
    IdentityError,
    RevokedError,
    ServerUnavailableError,
)
from fedplat_client.transport import Method

_ENROLL = Method("Enroll", fleet_pb2.EnrollResponse)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ClientDescription:
    """What a client tells the server about itself; the ticket is needed to enroll, and not afterwards."""

    population: str
    labels: Mapping[str, str]
    trainers: Sequence[str]
    evaluators: Sequence[str]
    ticket: Ticket | None = None


@dataclass(frozen=True)
class Endpoints:
    """The ways to the server: `access` proves who the client is, `connection` makes the calls of one that is known."""

    access: SignedAccess
    connection: Connection


class ClientSession:
    """Calls are cancelled when `stop` is set; they raise `Cancelled` then."""

    def __init__(
        self,
        door: Endpoints,
        directory: DataDirectory,
        identity: Identity,
        profile: ClientDescription,
        stop: StopSignal,
    ) -> None:
        self._endpoints = door
        self._directory = directory
        self._profile = profile
        self._stop = stop
        self._identity = identity
        door.access.client_id = identity.client_id

    def enroll(self) -> None:
        """Enrolls unless that was done before. Raises `EnrollmentError` or `CallError`."""
        if self._identity.client_id:
            return
        population, ticket = self._profile.population, self._profile.ticket
        if ticket is None:
            raise EnrollmentError(
                f"this client is not enrolled in the population {population!r}, and has no ticket; "
                "ask the server's operator for one (fedplat enrollment create) and give it as FEDPLAT_TICKET"
            )
        request = fleet_pb2.EnrollRequest(
            population=population,
            labels=self._profile.labels,
            idempotency_key=self._identity.idempotency_key,
            protocol_version=wire.PROTOCOL_VERSION,
            software_version=__version__,
            token=ticket.secret,
            public_key=self._endpoints.access.public_key,
        )
        try:
            with version_check():
                response = self._endpoints.access.prove(_ENROLL, request.SerializeToString(), self._stop)
        except RevokedError:
            raise
        except (CallRefusedError, IdentityError) as exc:
            raise EnrollmentError(
                f"the server does not accept this client in the population {population!r}: {exc}; "
                "check the ticket and the labels with the server's operator"
            ) from exc
        self._remember(response.client_id)
        _logger.info("The client is enrolled.", extra={"client_id": response.client_id, "population": population})

    def check_in(self, wait_s: float) -> fleet_pb2.CheckInResponse:
        """Waits for work. Raises `CallError`."""
        request = fleet_pb2.CheckInRequest(
            protocol_version=wire.PROTOCOL_VERSION,
            software_version=__version__,
            labels=self._profile.labels,
            trainers=self._profile.trainers,
            evaluators=self._profile.evaluators,
            codecs=sorted(CODECS),
            wait_s=wait_s,
        )
        return self._endpoints.connection.check_in(request, self._stop)

    def explain_error(self, exc: CallError) -> CallError:
        """An error in better words, if the server and what the client trusts do not go together."""
        known = self._identity
        if not known.tls or exc.code != "UNAVAILABLE":
            return exc
        problem = handshake.problem(known.server, ca=known.ca)
        return ServerUnavailableError(exc.code, f"{known.server}: {problem}", exc.retry) if problem else exc

    def forget_enrollment(self) -> None:
        """Makes the next `enroll` ask anew, of a server that does not know this client. Raises `EnrollmentError`.

        The keys stay: a server whose database was restored knows them again. So does the enrollment, without a ticket.
        """
        if self._profile.ticket is None:
            raise EnrollmentError(
                f"the server does not know the client {self._identity.client_id} any more; "
                "ask its operator for a ticket and give it as FEDPLAT_TICKET to enroll again"
            )
        self._remember("")

    def _remember(self, client_id: str) -> None:
        self._identity = msgspec.structs.replace(self._identity, client_id=client_id)
        self._directory.save(self._identity)
        self._endpoints.access.client_id = client_id
