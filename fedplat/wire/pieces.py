"""Messages that carry a piece of a file, without the copies that protobuf makes.

`Chunk`, and all of an upload's messages but the first, have one field of bytes: a tag, a length and the bytes
themselves (https://protobuf.dev/programming-guides/encoding/#length-types). Written here they cost one copy, and read
none; the generated classes cost three and two, which is a third of what gRPC itself spends on the bytes.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from fedplat.wire.v1 import fleet_pb2, model_pb2

Bytes: TypeAlias = bytes | bytearray | memoryview

CHUNK: Final = model_pb2.Chunk.DESCRIPTOR.fields_by_name["data"].number
"""The field of a `Chunk`."""
UPLOAD: Final = fleet_pb2.UploadRequest.DESCRIPTOR.fields_by_name["data"].number
"""The field of an `UploadRequest`."""

_LENGTH_DELIMITED = 2
_MAX_VARINT = 5
"""Bytes of a length: what it can say is far above the limit of a message."""


def frame_field(field: int, data: Bytes) -> bytes:
    """The message whose only field is `data`.

    >>> framed(CHUNK, b"abc") == model_pb2.Chunk(data=b"abc").SerializeToString()
    True
    """
    head, length = bytearray([field << 3 | _LENGTH_DELIMITED]), len(data)
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return b"".join((head, data))


def unframe_field(field: int, message: bytes) -> memoryview | None:
    """The bytes of a message whose only field this is; None for any other, whose parsing is left to protobuf.

    >>> bytes(unframed(CHUNK, framed(CHUNK, b"abc")))
    b'abc'
    >>> unframed(UPLOAD, framed(CHUNK, b"abc"))
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
