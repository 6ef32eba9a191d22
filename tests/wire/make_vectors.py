"""Writes the golden vectors of docs/protocol.md: what a client in any language sends and computes, byte for byte.

    python tests/wire/make_vectors.py

`tickets.json`: lines, and what they say or why they are refused. `calls.json`: requests with the bytes that are signed,
their signatures, and their headers over HTTP/1.1, made with a known key. `models.json`: model files, what a training
that adds 1 to every floating-point entry makes of them, and the file of its update; and files that a client refuses.

Bytes are in hexadecimal. `tests/wire/test_vectors.py` compares them with what the product makes and accepts.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf import json_format
from google.protobuf.message import Message

from fedplat import wire
from fedplat.model import FLOATING, Parameters
from fedplat.wire import auth, http
from fedplat.wire.v1 import fleet_pb2, model_pb2

FOLDER = Path(__file__).resolve().parent / "vectors"
SEED = bytes(range(32))
NONCE = bytes(range(56))
SESSION = "c2Vzc2lvbiBvZiB0aGUgdmVjdG9ycw"
TOKEN = "dG9rZW4gb2YgdGhlIHZlY3RvcnMgICAgICAgICAgICA"
FLEET = "/fedplat.wire.v1.Fleet/"
PEM = "-----BEGIN CERTIFICATE-----\nMAo=\n-----END CERTIFICATE-----\n"
ARRAYS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "one tensor": ("keep", {"weight": np.array([[0.5, -1.25, 3.0], [1e-3, 1e7, 0.0]], np.float32)}),
    "a scalar": ("keep", {"bias": np.array(0.1, np.float32)}),
    "an empty tensor": ("keep", {"none": np.zeros((0, 3), np.float32), "w": np.array([1.0], np.float32)}),
    "bfloat16": ("keep", {"w": np.array([1.0, 0.0078125, 255.0, 256.0, -3.140625], ml_dtypes.bfloat16)}),
    "float16": ("keep", {"w": np.array([1.0, 0.0009765625, 2047.0, 2049.0, 6e-8, -0.333], np.float16)}),
    "mixed types": (
        "max",
        {
            "mask": np.array([True, False, True]),
            "steps": np.array([7], np.int64),
            "b": np.array([0.1, 0.2], np.float64),
            "a": np.array([1.5], np.float32),
            "half": np.array([0.25], np.float16),
            "small": np.array([-1, 5], np.int8),
            "brain": np.array([2.0], ml_dtypes.bfloat16),
            "count": np.array([3], np.int32),
        },
    ),
    "tensors of the server": (
        "keep",
        {"w": np.array([1.0, 2.0], np.float32), "server/m": np.array([9.0, 9.0], np.float32)},
    ),
    "names": (
        "keep",
        {"10": np.array([1.0], np.float32), "2": np.array([2.0], np.float32), 'a "ü"\t/\\\x01': np.ones(1, np.float32)},
    ),
}
"""Models: their carry rule and their tensors."""


def calls() -> list[tuple[str, Message]]:
    """The methods that a client needs, each with a request; the first ones are proofs, and the others in a session."""
    key = Ed25519PrivateKey.from_private_bytes(SEED)
    update = make_file(*ARRAYS["one tensor"]).to_bytes()
    digest = hashlib.sha256(update).hexdigest()
    header = fleet_pb2.UploadHeader(token=TOKEN, digest=digest, size_bytes=len(update), offset=64)
    return [
        (
            "Enroll",
            fleet_pb2.EnrollRequest(
                population="demo",
                labels={"region": "eu"},
                idempotency_key="00112233445566778899aabbccddeeff",
                protocol_version=wire.PROTOCOL_VERSION,
                software_version="vectors",
                token="c2VjcmV0",
                public_key=key.public_key().public_bytes_raw(),
            ),
        ),
        (
            "OpenSession",
            fleet_pb2.OpenSessionRequest(client_id="c-0123456789abcdef", protocol_version=wire.PROTOCOL_VERSION),
        ),
        (
            "CheckIn",
            fleet_pb2.CheckInRequest(
                protocol_version=wire.PROTOCOL_VERSION, software_version="vectors", trainers=["linear"], wait_s=25.0
            ),
        ),
        ("Download", fleet_pb2.DownloadRequest(digest=digest, offset=1_048_576)),
        ("Upload", fleet_pb2.UploadRequest(header=header)),
        ("QueryUpload", fleet_pb2.QueryUploadRequest(token=TOKEN, digest=digest)),
        ("Heartbeat", fleet_pb2.HeartbeatRequest(token=TOKEN, progress=0.5, wait_s=5.0)),
        (
            "Report",
            fleet_pb2.ReportRequest(
                token=TOKEN, digest=digest, num_examples=7.0, metrics={"loss": 0.25}, update=update
            ),
        ),
        (
            "Fail",
            fleet_pb2.FailRequest(
                token=TOKEN, reason=model_pb2.REASON_UNKNOWN_TRAINER, text="the client has no trainer 'linear'"
            ),
        ),
    ]


def make_call(counter: int, method: str, message: Message) -> dict[str, Any]:
    """Return one call: its request, what is signed, and how it is sent over HTTP/1.1."""
    key, path, request = Ed25519PrivateKey.from_private_bytes(SEED), FLEET + method, message.SerializeToString()
    is_proof = method in ("Enroll", "OpenSession")
    payload = (
        auth.proof_payload(path, NONCE, request) if is_proof else auth.call_payload(path, SESSION, counter, request)
    )
    signature = key.sign(payload)
    metadata: dict[str, str | bytes] = {auth.METADATA_SIGNATURE: signature}
    metadata |= (
        {auth.METADATA_NONCE: NONCE}
        if is_proof
        else {auth.METADATA_SESSION: SESSION, auth.METADATA_COUNTER: str(counter)}
    )
    headers = {name: http.encode_value(value) for name, value in metadata.items()}
    if method == "Upload":
        headers |= {"content-type": http.OCTETS, http.UPLOAD_HEADER: http.encode_value(request)}
    else:
        headers |= {"content-type": http.PROTO}
    return {
        "method": path,
        "message": json_format.MessageToDict(message, preserving_proto_field_name=True),
        "request": request.hex(),
        **({"nonce": NONCE.hex()} if is_proof else {"session": SESSION, "counter": counter}),
        "payload": payload.hex(),
        "signature": signature.hex(),
        "headers": headers,
    }


def make_file(carry: Any, arrays: Mapping[str, Any]) -> Parameters:
    """Return a model."""
    return Parameters.from_arrays(dict(arrays), carry)


def train(base: Parameters) -> Parameters:
    """Return a model whose floating-point entries are larger by 1, rounded to their type."""
    trained = base.copy()
    for spec in trained.schema.tensors:
        if spec.dtype in FLOATING:
            values = trained[spec.name]
            values[...] = (values.astype(np.float64 if spec.dtype == "F64" else np.float32) + 1).astype(values.dtype)
    return trained


def make_model(name: str, carry: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model, the trained one, and the update."""
    base = make_file(carry, arrays)
    trained = train(base)
    update = trained.uploaded.minus(base.uploaded).to_bytes()
    return {
        "name": name,
        "base": base.to_bytes().hex(),
        "base_digest": hashlib.sha256(base.to_bytes()).hexdigest(),
        "trained": trained.to_bytes().hex(),
        "update": update.hex(),
        "update_digest": hashlib.sha256(update).hexdigest(),
    }


def refused_models() -> list[dict[str, str]]:
    """Files that are no models."""

    def file(header: object, body: bytes) -> str:
        text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
        return (len(text).to_bytes(8, "little") + text + body).hex()

    def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}

    four = bytes(4)
    twice = (
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    )
    return [
        {"why": "the file ends within its first 8 bytes", "file": "0000"},
        {"why": "the header is longer than the file", "file": (2**20).to_bytes(8, "little").hex()},
        {"why": "the header is not JSON", "file": file(b"{", b"")},
        {"why": "the range of a tensor does not fit its shape", "file": file({"w": entry("F32", [2], 0, 4)}, four)},
        {"why": "there are bytes that belong to no tensor", "file": file({"w": entry("F32", [1], 0, 4)}, bytes(8))},
        {"why": "there is a gap between two tensors", "file": file({"w": entry("F32", [1], 4, 8)}, bytes(8))},
        {"why": "the type is unknown", "file": file({"w": entry("F8", [4], 0, 4)}, four)},
        {"why": "a key occurs twice", "file": file(twice, four)},
        {
            "why": "the carry rule is unknown",
            "file": file({"__metadata__": {"fedplat.carry": "sum"}, "w": entry("F32", [1], 0, 4)}, four),
        },
    ]


def tickets() -> dict[str, Any]:
    """Lines, with what they say; and lines that are refused."""
    secret = "c2VjcmV0LW9mLXRoZS12ZWN0b3Jz"
    given = [
        auth.Ticket("fed.example.org:7443", "demo", secret, True),
        auth.Ticket("127.0.0.1:7443", "demo", secret),
        auth.Ticket("[2001:db8::1]:7443", "demo", secret, True, PEM * 6),
        auth.Ticket("fed.example.org:7443", "demo", secret, True, PEM, "fed.example.org:443"),
    ]
    read = [{"text": each.to_text(), **msgspec.structs.asdict(each)} for each in given]
    later = msgspec.msgpack.encode(
        {"server": "h:1", "population": "demo", "secret": secret, "later": [1, {"a": None}], "http": "h:2"}
    )
    empty = auth.Ticket("h:1", "demo", secret, False, "", "h:2")
    read.append({"text": _line("fpt2.", later), **msgspec.structs.asdict(empty)})
    refused = {
        "it is of another version": "fpt3." + given[0].to_text()[5:],
        "it is cut": given[0].to_text()[:-4],
        "it is not base64": "fpt1.??",
        "it has no server": _line("fpt1.", msgspec.msgpack.encode(["", "demo", secret, True, ""])),
        "the server has no port": _line("fpt1.", msgspec.msgpack.encode(["h", "demo", secret, True, ""])),
        "an array has more fields": _line("fpt1.", msgspec.msgpack.encode(["h:1", "demo", secret, True, "", "x"])),
    }
    return {"read": read, "refused": [{"why": why, "text": text} for why, text in refused.items()]}


def _line(prefix: str, content: bytes) -> str:
    return prefix + base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def make() -> dict[str, Any]:
    """The content of each file."""
    key = Ed25519PrivateKey.from_private_bytes(SEED)
    return {
        "tickets.json": tickets(),
        "calls.json": {
            "seed": SEED.hex(),
            "public_key": key.public_key().public_bytes_raw().hex(),
            "calls": [make_call(number, *each) for number, each in enumerate(calls(), 1)],
        },
        "models.json": {
            "trained": [make_model(name, *each) for name, each in ARRAYS.items()],
            "refused": refused_models(),
        },
    }


def to_text(content: Any) -> str:
    """The text of a file."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Writes the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, content in make().items():
        (FOLDER / name).write_text(to_text(content), "utf-8")


if __name__ == "__main__":
    main()
