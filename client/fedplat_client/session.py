"""A client's standing with its server: enrolment, the credential, and the check-in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fedplat import wire
from fedplat.wire.v1 import fleet_pb2
from fedplat_client._version import __version__
from fedplat_client.connection import Connection
from fedplat_client.errors import CallRefusedError, CredentialError, EnrolmentError
from fedplat_client.identity import DataDirectory
from fedplat_client.stopping import StopSignal

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a client tells the server about itself."""

    population: str
    labels: Mapping[str, str]
    trainers: Sequence[str]
    evaluators: Sequence[str]


class Session:
    """Calls are cancelled when `stop` is set; they raise `Cancelled` then."""

    def __init__(self, connection: Connection, directory: DataDirectory, profile: Profile, stop: StopSignal) -> None:
        self._connection = connection
        self._directory = directory
        self._profile = profile
        self._stop = stop
        self._identity = directory.identity()
        connection.credential = self._identity.credential

    def enrol(self) -> None:
        """Enrols unless that was done before. Raises `EnrolmentError` or `ServerError`."""
        if self._identity.credential:
            return
        request = fleet_pb2.EnrollRequest(
            population=self._profile.population,
            labels=self._profile.labels,
            idempotency_key=self._identity.idempotency_key,
            protocol_version=wire.PROTOCOL_VERSION,
            software_version=__version__,
        )
        try:
            response = self._connection.enroll(request, self._stop)
        except (CallRefusedError, CredentialError) as exc:
            raise EnrolmentError(
                f"the server does not accept this client in the population {self._profile.population!r}: {exc}; "
                "check the population and the labels with the server's operator"
            ) from exc
        self._remember(response.client_id, response.credential)
        _logger.info(
            "The client is enrolled.",
            extra={"client_id": response.client_id, "population": self._profile.population},
        )

    def check_in(self, wait_s: float) -> fleet_pb2.CheckInResponse:
        """Waits for work. Raises `ServerError`."""
        request = fleet_pb2.CheckInRequest(
            protocol_version=wire.PROTOCOL_VERSION,
            software_version=__version__,
            labels=self._profile.labels,
            trainers=self._profile.trainers,
            evaluators=self._profile.evaluators,
            wait_s=wait_s,
        )
        return self._connection.check_in(request, self._stop)

    def forget_credential(self) -> None:
        """Makes the next `enrol` ask for a new credential.

        The idempotency key stays: a server that knows it returns the same client, and a server whose database is
        new makes a new one.
        """
        self._remember(self._identity.client_id, "")

    def _remember(self, client_id: str, credential: str) -> None:
        self._identity = msgspec.structs.replace(self._identity, client_id=client_id, credential=credential)
        self._directory.save(self._identity)
        self._connection.credential = credential
