"""The protocol over HTTP/1.1: the unary form of the Connect protocol, and plain octets for the two methods of files.

A call is `POST /SERVICE/METHOD` with the serialized message as its body. Metadata are headers of the same names, and
signatures cover the same bytes as with gRPC. A refusal is a status of HTTP with a JSON object, and its trailing
metadata are headers with a prefix (https://connectrpc.com/docs/protocol/, "Unary-Response").

`Download` answers with the octets of the file from the requested offset on. `Upload` has its first message, the header
that is signed, in a header of the request, and octets as its body.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

PROTO: Final = "application/proto"
OCTETS: Final = "application/octet-stream"
JSON: Final = "application/json"
UPLOAD_HEADER: Final = "fedplat-request-bin"
"""The request header with the first message of an upload, in base64."""
TIMEOUT_HEADER: Final = "connect-timeout-ms"
VERSION_HEADER: Final = "connect-protocol-version"
TRAILER_PREFIX: Final = "trailer-"
"""What precedes the name of trailing metadata in a response."""
MAX_REFUSAL_BYTES: Final = 64 * 2**10


class RefusalBody(msgspec.Struct, frozen=True):
    """The body of a response without a message."""

    code: str
    message: str = ""


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
