"""What a client that shows certificates keeps, and what it says; with a real server: tests/server/test_mtls.py."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import Client, DataDirectoryError, EnrollmentError, Task, TrainResult, transport
from fedplat_client._auth import mtls
from fedplat_client._auth.authenticator import SignedAccess
from fedplat_client._auth.mtls import CertificateAccess
from fedplat_client._state.data_dir import (
    DataDirectory,
    Identity,
    SigningKey,
    make_signing_request,
    new_signing_key,
    new_tls_key,
)
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import ServerUnavailableError, UnreachableError
from fedplat_client.transport import connect


def no_op(task: Task) -> TrainResult:
    return TrainResult(parameters=task.parameters, num_examples=1)


def test_the_key_for_tls_is_private_and_stays(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path, "server:1", "demo")
    with directory.lock():
        key = directory.load_tls_key()
        assert directory.load_tls_key() == key
        assert stat.S_IMODE((directory.path / "tls.key").stat().st_mode) == 0o600
    assert x509.load_der_x509_csr(make_signing_request(key)).is_signature_valid


@pytest.mark.parametrize(
    "content", [b"", b"rubbish", new_signing_key(), new_tls_key()[:100]], ids=["empty", "rubbish", "not text", "cut"]
)
def test_a_damaged_key_gives_one_clear_line(content: bytes, tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path, "127.0.0.1:1", "demo")
    with directory.lock(), connect("127.0.0.1:1") as channel:
        (directory.path / "tls.key").write_bytes(content)
        signed = SignedAccess(channel, SigningKey(new_signing_key()), 1.0)
        identity = Identity("key", "127.0.0.1:1", "demo", tls=True)
        with (
            CertificateAccess(signed, directory, identity, 1.0) as access,
            pytest.raises(DataDirectoryError, match=r"tls\.key is damaged .*delete it to get another one"),
        ):
            access.authenticate("/method", b"", StopSignal())


def test_a_certificate_is_renewed_while_it_is_still_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed renewal is tried again before the end, up to which the certificate is used."""
    now, requests, failing = [0.0], list[float](), [False]

    def request(*_: object) -> tuple[bytes, fleet_pb2.RenewCertificateResponse]:
        requests.append(now[0])
        if failing[0]:
            raise ServerUnavailableError("UNAVAILABLE", "away, says the test")
        return new_tls_key(), fleet_pb2.RenewCertificateResponse(certificate="", port=1, valid_s=90.0)

    def open_channel(address: str, **_: object) -> grpc.Channel:
        return grpc.insecure_channel(address)  # the certificate is not one

    monkeypatch.setattr(mtls, "request_certificate", request)
    monkeypatch.setattr(transport, "connect", open_channel)
    identity = Identity("key", "127.0.0.1:1", "demo", tls=True)
    with connect("127.0.0.1:1") as channel:
        signed = SignedAccess(channel, SigningKey(new_signing_key()), 1.0)
        directory = DataDirectory(tmp_path, "127.0.0.1:1", "demo")
        with CertificateAccess(signed, directory, identity, 1.0, lambda: now[0]) as access:
            for now[0] in (0.0, 59.0, 60.0, 119.0):
                access.authenticate("/method", b"", StopSignal())
            assert requests == [0.0, 60.0]
            failing[0] = True
            for now[0] in (120.0, 127.0, 128.0):  # it is valid until 150
                access.authenticate("/method", b"", StopSignal())
            assert requests[2:] == [120.0, 128.0]
            now[0] = 150.0
            with pytest.raises(ServerUnavailableError):
                access.authenticate("/method", b"", StopSignal())


@pytest.mark.parametrize(("lasts_s", "num_requests"), [(50.0, 1), (0.1, 2)])
def test_a_wait_that_a_load_balancer_ends_costs_no_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasts_s: float, num_requests: int
) -> None:
    """A connection that breaks at once may be due to the certificate."""
    now, requests = [0.0], list[float]()

    def request(*_: object) -> tuple[bytes, fleet_pb2.RenewCertificateResponse]:
        requests.append(now[0])
        return new_tls_key(), fleet_pb2.RenewCertificateResponse(certificate="", port=1, valid_s=900.0)

    def open_channel(address: str, **_: object) -> grpc.Channel:
        return grpc.insecure_channel(address)  # the certificate is not one

    monkeypatch.setattr(mtls, "request_certificate", request)
    monkeypatch.setattr(transport, "connect", open_channel)
    identity = Identity("key", "127.0.0.1:1", "demo", tls=True)
    with connect("127.0.0.1:1") as channel:
        signed = SignedAccess(channel, SigningKey(new_signing_key()), 1.0)
        directory = DataDirectory(tmp_path, "127.0.0.1:1", "demo")
        with CertificateAccess(signed, directory, identity, 1.0, lambda: now[0]) as access:
            used = access.authenticate("/method", b"", StopSignal())
            now[0] += lasts_s
            assert not access.may_try_again(used, UnreachableError("UNAVAILABLE", "Socket closed"))
            access.authenticate("/method", b"", StopSignal())
    assert len(requests) == num_requests


def test_without_tls_a_certificate_is_of_no_use(
    make_client: Callable[..., Client], model: model_pb2.ModelRef, tmp_path: Path
) -> None:
    client = make_client(mtls=True)
    client.add_trainer("digits", no_op)
    with pytest.raises(EnrollmentError, match="without TLS"):
        client.run()
