"""The protocol over HTTP/1.1: the forms of the Connect protocol, and plain octets for the files of clients.

A call is `POST /SERVICE/METHOD` with the serialized message as its body. Metadata are headers of the same names, and
signatures cover the same bytes as with gRPC. A refusal is a status of HTTP with a JSON object, and its trailing
metadata are headers with a prefix (https://connectrpc.com/docs/protocol/, "Unary-Response").

`Download` answers with the octets of the file from the requested offset on. `Upload` has its first message, the header
that is signed, in a header of the request, and octets as its body. These are the `OCTET_METHODS`.

Other methods with a stream of messages, which only operators call, have the streaming form of the Connect protocol: the
bodies of the request and of the response are envelopes, each a byte of flags, a length of 4 bytes (big-endian) and a
message. The last envelope of a response has the flag `LAST` and a JSON object, with the error of a call that fails.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from fedplat.wire.v1 import fleet_pb2

PROTO: Final = "application/proto"
OCTETS: Final = "application/octet-stream"
JSON: Final = "application/json"
STREAM: Final = "application/connect+proto"
"""The content type of envelopes."""
_FLEET = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name
UPLOAD_METHOD: Final = f"/{_FLEET}/Upload"
DOWNLOAD_METHOD: Final = f"/{_FLEET}/Download"
OCTET_METHODS: Final = frozenset({UPLOAD_METHOD, DOWNLOAD_METHOD})
"""The methods with a stream of messages that is one of octets here."""
UPLOAD_HEADER: Final = "fedplat-request-bin"
"""The request header with the first message of an upload, in base64."""
TIMEOUT_HEADER: Final = "connect-timeout-ms"
VERSION_HEADER: Final = "connect-protocol-version"
TRAILER_PREFIX: Final = "trailer-"
"""What precedes the name of trailing metadata in a response."""
MAX_REFUSAL_BYTES: Final = 64 * 2**10
LAST: Final = 2
"""The flag of the last envelope of a response. No other flag is used: bit 0 would mark a compressed message."""
HEAD_BYTES: Final = 5
"""The bytes of an envelope before its message."""


class RefusalBody(msgspec.Struct, frozen=True):
    """The body of a response without a message."""

    code: str
    message: str = ""


class LastEnvelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of the last envelope: the refusal of a call that has failed, and its trailing metadata."""

    error: RefusalBody | None = None
    metadata: Mapping[str, Sequence[str]] = {}


class Status(NamedTuple):
    """A status of gRPC in the Connect protocol: its name there, and the status of HTTP."""

    code: str
    http: int


STATUSES: Final[Mapping[str, Status]] = {
    "CANCELLED": Status("canceled", 499),
    "UNKNOWN": Status("unknown", 500),
    "INVALID_ARGUMENT": Status("invalid_argument", 400),
    "DEADLINE_EXCEEDED": Status("deadline_exceeded", 504),
    "NOT_FOUND": Status("not_found", 404),
    "ALREADY_EXISTS": Status("already_exists", 409),
    "PERMISSION_DENIED": Status("permission_denied", 403),
    "RESOURCE_EXHAUSTED": Status("resource_exhausted", 429),
    "FAILED_PRECONDITION": Status("failed_precondition", 400),
    "ABORTED": Status("aborted", 409),
    "OUT_OF_RANGE": Status("out_of_range", 400),
    "UNIMPLEMENTED": Status("unimplemented", 501),
    "INTERNAL": Status("internal", 500),
    "UNAVAILABLE": Status("unavailable", 503),
    "DATA_LOSS": Status("data_loss", 500),
    "UNAUTHENTICATED": Status("unauthenticated", 401),
}
"""The statuses of gRPC by name (https://connectrpc.com/docs/protocol/, "Error Codes")."""
NAMES: Final[Mapping[str, str]] = {status.code: name for name, status in STATUSES.items()}
"""The names of gRPC by those of the Connect protocol."""


def encode_value(value: str | bytes) -> str:
    """Return a value of metadata as a header has it: bytes in base64 without padding."""
    return base64.b64encode(value).rstrip(b"=").decode() if isinstance(value, bytes) else value


def decode_binary(text: str) -> bytes:
    """Return the bytes of a header whose name ends with `-bin`; padding is optional. Raises `ValueError`."""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error as exc:
        raise ValueError("it is not base64") from exc


def enclose(message: bytes, flags: int = 0) -> bytes:
    """Return a message in its envelope.

    >>> enclose(b"abc").hex(), read_head(enclose(b"", LAST))
    ('0000000003616263', (2, 0))
    """
    return struct.pack(">BI", flags, len(message)) + message


def read_head(head: bytes) -> tuple[int, int]:
    """Return the flags and the length of the envelope that begins with these `HEAD_BYTES` bytes."""
    flags, size = struct.unpack(">BI", head)
    return flags, size
