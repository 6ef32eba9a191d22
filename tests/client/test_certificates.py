"""What a client that shows certificates keeps, and what it says; with a real server: tests/server/test_mtls.py."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509

from fedplat.wire.v1 import model_pb2
from fedplat_client import Client, DataDirectoryError, EnrollmentError, Task, TrainResult
from fedplat_client._auth.authenticator import SignedAccess
from fedplat_client._auth.mtls import CertificateAccess
from fedplat_client._state.data_dir import DataDirectory, Identity
from fedplat_client._state.keys import SigningKey, make_signing_request, new_signing_key, new_tls_key
from fedplat_client.cancellation import StopSignal
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


def test_without_tls_a_certificate_is_of_no_use(
    make_client: Callable[..., Client], model: model_pb2.ModelRef, tmp_path: Path
) -> None:
    client = make_client(mtls=True)
    client.add_trainer("digits", no_op)
    with pytest.raises(EnrollmentError, match="without TLS"):
        client.run()
