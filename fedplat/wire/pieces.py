"""Messages that carry a piece of a file, encoded without the copies that protobuf makes.

`Chunk`, and all messages of an upload except the first, have a single bytes field: a tag, a length and the bytes
(https://protobuf.dev/programming-guides/encoding/#length-types). Writing them here takes one copy, and reading none;
the generated classes take three and two, which is a third of gRPC's own cost for the bytes.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from fedplat.wire.v1 import fleet_pb2, model_pb2

Bytes: TypeAlias = bytes | bytearray | memoryview

CHUNK: Final = model_pb2.Chunk.DESCRIPTOR.fields_by_name["data"].number
"""Field number of `Chunk.data`."""
UPLOAD: Final = fleet_pb2.UploadRequest.DESCRIPTOR.fields_by_name["data"].number
"""Field number of `UploadRequest.data`."""

_LENGTH_DELIMITED = 2
_MAX_VARINT = 5
"""Maximum bytes of an encoded length, enough for lengths far above the limit of a message."""


def frame_field(field: int, data: Bytes) -> bytes:
    """Encode a message whose only field is `data`.

    >>> frame_field(CHUNK, b"abc") == model_pb2.Chunk(data=b"abc").SerializeToString()
    True
    """
    head, length = bytearray([field << 3 | _LENGTH_DELIMITED]), len(data)
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return b"".join((head, data))


def unframe_field(field: int, message: bytes) -> memoryview | None:
    """Return the bytes of a message with this field only; None for any other, which must be parsed by protobuf.

    >>> bytes(unframe_field(CHUNK, frame_field(CHUNK, b"abc")))
    b'abc'
    >>> unframe_field(UPLOAD, frame_field(CHUNK, b"abc"))
    """
    if not message or message[0] != field << 3 | _LENGTH_DELIMITED:
        return None
    length = 0
    for position, byte in enumerate(message[1 : 1 + _MAX_VARINT]):
        length |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            start = 2 + position
            return memoryview(message)[start:] if start + length == len(message) else None
    return None
