"""A client's session with its server: its ticket, enrollment and check-in."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fedplat import wire
from fedplat.codecs import CODECS
from fedplat.config.loaded_plugins import NO_PLUGINS, LoadedPlugins
from fedplat.errors import TicketError
from fedplat.secure_aggregation.setup import FEATURE
from fedplat.wire import auth, proxies
from fedplat.wire.auth import MAX_TICKET, Ticket
from fedplat.wire.v1 import fleet_pb2
from fedplat_client import cancellation, errors, transport
from fedplat_client._auth import authenticator
from fedplat_client._state.data_dir import DataDirectory, Identity
from fedplat_client._version import __version__
from fedplat_client.link import ServerLink

_ENROLL = transport.Method("Enroll", fleet_pb2.EnrollResponse)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ClientDescription:
    """What a client sends to the server about itself; the ticket is needed only to enroll."""

    population: str
    labels: Mapping[str, str]
    trainers: Sequence[str]
    evaluators: Sequence[str]
    features: Sequence[str] = (FEATURE,)
    plugins: LoadedPlugins = NO_PLUGINS
    announce: Callable[[], fleet_pb2.OwnerApprovals | None] = lambda: None
    """Returns what the owner of the client has decided of jobs by now."""
    ticket: auth.Ticket | None = None


@dataclass(frozen=True)
class Endpoints:
    """The ways to call the server: `access` proves the client's identity, `connection` makes authenticated calls.

    Both use `link`.
    """

    access: authenticator.SignedAccess
    connection: authenticator.Connection
    link: ServerLink


class ClientSession:
    """Enrolls and checks in. Setting `stop` cancels its calls, which then raise `Cancelled`."""

    def __init__(
        self,
        endpoints: Endpoints,
        directory: DataDirectory,
        identity: Identity,
        description: ClientDescription,
        stop: cancellation.StopSignal,
    ) -> None:
        self._endpoints = endpoints
        self._directory = directory
        self._description = description
        self._stop = stop
        self._identity = identity
        endpoints.access.client_id = identity.client_id

    def enroll(self) -> None:
        """Enroll, unless the client has enrolled already. Raises `EnrollmentError` or `CallError`."""
        if self._identity.client_id:
            return
        population, ticket = self._description.population, self._description.ticket
        if ticket is None:
            raise errors.EnrollmentError(
                f"this client is not enrolled in the population {population!r}, and has no ticket; "
                "request one from the server's operator (fedplat enrollment create) and set FEDPLAT_TICKET to it"
            )
        request = fleet_pb2.EnrollRequest(
            population=population,
            labels=self._description.labels,
            idempotency_key=self._identity.idempotency_key,
            protocol_version=wire.PROTOCOL_VERSION,
            software_version=__version__,
            token=ticket.secret,
            public_key=self._endpoints.access.public_key,
        )
        try:
            with authenticator.version_check():
                response = self._endpoints.access.prove(_ENROLL, request.SerializeToString(), self._stop)
        except errors.RevokedError:
            raise
        except (errors.CallRefusedError, errors.IdentityError) as exc:
            raise errors.EnrollmentError(
                f"the server does not accept this client in the population {population!r}: {exc}; "
                "check the ticket and the labels with the server's operator"
            ) from exc
        self._save_client_id(response.client_id)
        _logger.info("The client is enrolled.", extra={"client": response.client_id, "population": population})

    def check_in(self, wait_s: float) -> fleet_pb2.CheckInResponse:
        """Wait for an assignment, at most `wait_s`. Raises `CallError`."""
        return self._endpoints.connection.check_in(self.make_check_in(wait_s), self._stop)

    def make_check_in(self, wait_s: float) -> fleet_pb2.CheckInRequest:
        """Return the request that waits for an assignment, at most `wait_s`."""
        return fleet_pb2.CheckInRequest(
            protocol_version=wire.PROTOCOL_VERSION,
            software_version=__version__,
            labels=self._description.labels,
            trainers=self._description.trainers,
            evaluators=self._description.evaluators,
            codecs=sorted([*CODECS, *self._description.plugins.names("codecs")]),
            algorithms=self._description.plugins.names("algorithms"),
            features=self._description.features,
            approvals=self._description.announce(),
            wait_s=wait_s,
        )

    def explain_error(self, exc: errors.CallError) -> errors.CallError:
        """Return the error with its cause: a proxy in between, the server's TLS, or the short form of gRPC's text."""
        if exc.code != "UNAVAILABLE":
            return exc
        route = self._endpoints.link.route
        text = proxies.explain(route.server, exc.text, route.proxy)
        if proxies.is_direct(route.server, route.proxy):
            problem = proxies.describe_failure(route.server, ca=route.ca) if route.tls else ""
            text = f"{route.server}: {problem or text}{route.hint}"
        return errors.ServerUnavailableError(exc.code, text, exc.retry)

    def forget_enrollment(self) -> None:
        """Make the next `enroll` enroll again, at a server that does not know this client. Raises `EnrollmentError`.

        The keys are kept: a server with a restored database recognizes them. Without a ticket the enrollment is kept
        too, and the error is raised.
        """
        if self._description.ticket is None:
            raise errors.EnrollmentError(
                f"the server does not know the client {self._identity.client_id} any more; "
                "request a ticket from its operator and set FEDPLAT_TICKET to it to enroll again"
            )
        self._save_client_id("")

    def _save_client_id(self, client_id: str) -> None:
        self._identity = msgspec.structs.replace(self._identity, client_id=client_id)
        self._directory.save(self._identity)
        self._endpoints.access.client_id = client_id


TICKET_VARIABLE = "FEDPLAT_TICKET"
TICKET_FILE_VARIABLE = "FEDPLAT_TICKET_FILE"


def find_ticket(text: str | None = None, file: Path | None = None) -> Ticket | None:
    """Return the ticket from the arguments, else from the environment, else None. Raises `TicketError`."""
    if text is not None and file is not None:
        raise TicketError("both a ticket and a ticket file were given; expected one of them")
    if text is None and file is None:
        text = os.environ.get(TICKET_VARIABLE) or None
        name = os.environ.get(TICKET_FILE_VARIABLE)
        file = Path(name) if name and text is None else None
    if file is not None:
        text = _read(file)
        try:
            return Ticket.from_text(text)
        except TicketError as exc:
            raise TicketError(f"the ticket file {file}: {exc}") from exc
    return Ticket.from_text(text) if text is not None else None


def _read(file: Path) -> str:
    try:
        with file.open(encoding="ascii", errors="replace") as opened:
            return opened.read(MAX_TICKET + 100)
    except OSError as exc:
        raise TicketError(f"the ticket file {file} cannot be read: {exc.strerror}") from exc
