"""The golden vectors of docs/protocol.md are what the product makes, and what it accepts."""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.protobuf import json_format

from fedplat import report_validation
from fedplat.errors import ModelError, TicketError
from fedplat.model import Parameters
from fedplat.wire import auth
from fedplat.wire.v1 import fleet_pb2
from fedplat_client import TrainResult
from fedplat_client._auth import authenticator
from fedplat_client._state.data_dir import SigningKey
from fedplat_server.rpc.http import context
from wire import make_vectors


def load(name: str) -> Any:
    return json.loads((make_vectors.FOLDER / name).read_text("utf-8"))


CALLS, MODELS, TICKETS = load("calls.json"), load("models.json"), load("tickets.json")


def signing_key() -> SigningKey:
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(CALLS["seed"]))
    return SigningKey(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def test_the_files_are_those_that_the_program_makes() -> None:
    for name, content in make_vectors.make().items():
        kept = (make_vectors.FOLDER / name).read_text("utf-8")
        assert kept == make_vectors.to_text(content), f"{name}: run python tests/wire/make_vectors.py"


def test_the_client_signs_these_bytes_and_the_server_reads_these_headers() -> None:
    key = signing_key()
    assert key.public.hex() == CALLS["public_key"]
    for vector in CALLS["calls"]:
        request, method = bytes.fromhex(vector["request"]), vector["method"]
        message = getattr(fleet_pb2, f"{method.rpartition('/')[2]}Request").FromString(request)
        assert json_format.MessageToDict(message, preserving_proto_field_name=True) == vector["message"]
        if "nonce" in vector:
            metadata = authenticator.sign_challenge(key, method, bytes.fromhex(vector["nonce"]), request)
        else:
            signer, session = authenticator.Signer(key), str(vector["session"])
            uses = [signer.use(method, request, functools.partial(str, session)) for _ in range(vector["counter"])]
            metadata = uses[-1].metadata
        scope = {"headers": [(name.encode(), value.encode()) for name, value in vector["headers"].items()]}
        assert dict(context.read_metadata(scope)) == dict(metadata)
        if method.endswith("/Upload"):
            assert context.read_first(scope) == request
        signature = bytes.fromhex(vector["signature"])
        assert dict(metadata)[auth.METADATA_SIGNATURE] == signature
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(CALLS["public_key"]))
        public.verify(signature, bytes.fromhex(vector["payload"]))


@pytest.mark.parametrize("vector", MODELS["trained"], ids=lambda vector: vector["name"])
def test_the_client_makes_these_updates_and_the_server_accepts_them(vector: Any, tmp_path: Any) -> None:
    base, expected = Parameters.from_bytes(bytes.fromhex(vector["base"])), bytes.fromhex(vector["update"])
    trained = make_vectors.train(base)
    assert trained.to_bytes().hex() == vector["trained"]
    result = TrainResult(parameters=trained, num_examples=7.0)
    assert b"".join(result.to_pieces(base)) == expected
    assert hashlib.sha256(expected).hexdigest() == vector["update_digest"]
    (tmp_path / "base").write_bytes(bytes.fromhex(vector["base"]))
    assert isinstance(report_validation.validate_content(expected, tmp_path / "base"), float)


def test_files_that_are_no_models_are_refused() -> None:
    for vector in MODELS["refused"]:
        with pytest.raises(ModelError):
            Parameters.from_bytes(bytes.fromhex(vector["file"]))


def test_tickets_are_read_or_refused() -> None:
    for vector in TICKETS["read"]:
        text = vector.pop("text")
        assert auth.Ticket.from_text(text) == auth.Ticket(**vector)
    for vector in TICKETS["refused"]:
        with pytest.raises(TicketError):
            auth.Ticket.from_text(vector["text"])
