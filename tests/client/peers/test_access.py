"""How a client gets and keeps its certificate towards peers, and what its operator sets."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fedplat.wire.v1 import fleet_pb2
from fedplat_client import (
    CallRefusedError,
    ClientOptions,
    EnrollmentError,
    RevokedError,
    ServerUnavailableError,
    transport,
)
from fedplat_client._auth import mtls
from fedplat_client._auth.authenticator import SignedAccess
from fedplat_client._auth.mtls import PeerAccess, PeerCredentials
from fedplat_client._state.data_dir import DataDirectory, Identity, SigningKey, new_signing_key
from fedplat_client.cancellation import StopSignal
from fedplat_client.commands import main
from fedplat_client.transport import connect


class Issuer:
    """Answers requests for certificates with numbers; fails with `error` if it is set."""

    def __init__(self) -> None:
        self.num_issued = 0
        self.error: Exception | None = None
        self.authorities = "authorities"
        self.listener: list[bool] = []

    def request(self, *_: Any, listener: bool) -> tuple[bytes, fleet_pb2.RenewCertificateResponse]:
        self.listener.append(listener)
        if self.error is not None:
            raise self.error
        self.num_issued += 1
        certificate = f"certificate {self.num_issued}"
        answer = fleet_pb2.RenewCertificateResponse(
            certificate=certificate, valid_s=900.0, authorities=self.authorities
        )
        return b"key", answer


@pytest.fixture
def issuer(monkeypatch: pytest.MonkeyPatch) -> Issuer:
    made = Issuer()
    monkeypatch.setattr(mtls, "request_certificate", made.request)
    return made


@pytest.fixture
def signed() -> Generator[SignedAccess]:
    with connect("127.0.0.1:1") as channel:
        made = SignedAccess(channel, SigningKey(new_signing_key()), 1.0)
        made.client_id = "c-1"
        yield made


def access_of(signed: SignedAccess, tmp_path: Path, now: list[float], *, tls: bool = True) -> PeerAccess:
    directory = DataDirectory(tmp_path, "server:1", "demo")
    identity = Identity("key", "server:1", "demo", tls=tls)
    return PeerAccess(signed, directory, identity, 1.0, listens=True, clock=lambda: now[0])


def test_a_certificate_is_renewed_in_time(issuer: Issuer, signed: SignedAccess, tmp_path: Path) -> None:
    now = [0.0]
    access = access_of(signed, tmp_path, now)
    for at, expected in ((0.0, b"certificate 1"), (599.0, b"certificate 1"), (600.0, b"certificate 2")):
        now[0] = at
        assert access.renew(StopSignal()).certificate == access.current.certificate == expected
    assert issuer.listener == [True, True]


def test_a_valid_certificate_is_kept_while_the_server_is_away(
    issuer: Issuer, signed: SignedAccess, tmp_path: Path
) -> None:
    now = [0.0]
    access = access_of(signed, tmp_path, now)
    access.renew(StopSignal())
    issuer.error = ServerUnavailableError("UNAVAILABLE", "away")
    for at, num_requests in ((800.0, 2), (824.0, 2), (825.0, 3), (899.0, 4)):
        now[0] = at  # after a failure it waits for a quarter of the time that is left
        assert access.renew(StopSignal()).certificate == b"certificate 1"
        assert len(issuer.listener) == num_requests
    now[0] = 900.0
    with pytest.raises(ServerUnavailableError):
        access.renew(StopSignal())
    issuer.error = RevokedError("PERMISSION_DENIED", "revoked")
    with pytest.raises(RevokedError):
        access.renew(StopSignal())


def test_a_client_that_enrolls_again_gets_a_certificate_with_its_new_name(
    issuer: Issuer, signed: SignedAccess, tmp_path: Path
) -> None:
    access = access_of(signed, tmp_path, [0.0])
    access.renew(StopSignal())
    signed.client_id = "c-2"
    assert access.renew(StopSignal()).certificate == b"certificate 2"


def test_an_older_server_is_named(issuer: Issuer, signed: SignedAccess, tmp_path: Path) -> None:
    issuer.authorities = ""
    with pytest.raises(CallRefusedError, match="update the server"):
        access_of(signed, tmp_path, [0.0]).renew(StopSignal())


def test_without_tls_there_is_no_listener(signed: SignedAccess, tmp_path: Path) -> None:
    with pytest.raises(EnrollmentError, match="without TLS"):
        access_of(signed, tmp_path, [0.0], tls=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peer_listen": "7445"}, "peer_listen is '7445'; expected host:port"),
        ({"peer_listen": "127.0.0.1:0"}, "expected host:port"),
        ({"peer_listen": "127.0.0.1:7445", "peer_address": "silo"}, "peer_address is 'silo'; expected host:port"),
        ({"peer_address": "silo:7445"}, "peer_address is set, but peer_listen is not"),
        ({"peer_listen": "0.0.0.0:7445"}, "set peer_address"),
        ({"peer_listen": "[::]:7445"}, "set peer_address"),
    ],
)
def test_wrong_addresses_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClientOptions(**options)  # type: ignore[arg-type]
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    result = CliRunner().invoke(main, ["run", "--trainer", "os:getcwd", *arguments])
    assert (result.exit_code, message in result.output) == (2, True)


def test_addresses() -> None:
    assert ClientOptions().peer_listen == ""
    ClientOptions(peer_listen="0.0.0.0:7445", peer_address="silo.example.org:7445")
    ClientOptions(peer_listen="127.0.0.1:7445")


@pytest.mark.parametrize("address", ["xds:80", "unix-abstract:80", "google-c2p:80", "[::1]:80", "silo:7445"])
def test_the_address_of_a_peer_is_a_host(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """A peer names its own address, which must not make gRPC use another kind of target."""
    targets: list[str] = []

    def connect(target: str, **options: object) -> None:
        targets.append(target)

    monkeypatch.setattr(transport, "connect", connect)
    PeerCredentials(b"", b"", b"").connect(address, "c-1")
    assert targets == [f"dns:///{address}"]
