"""Pieces of files on the wire, against the protobuf library."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from fedplat.wire import messages
from fedplat.wire.v1 import fleet_pb2, model_pb2

HEADER = fleet_pb2.UploadRequest(header=fleet_pb2.UploadHeader(token="t")).SerializeToString()
# Bytes as protobuf could write them, and as no writer should.
HEADS = st.sampled_from([b"\x0a", b"\x12", b"\x18", b"\x1a", b"\x18\x07\x12", b""])
MESSAGES = st.builds(b"".join, st.tuples(HEADS, st.binary(max_size=11), st.binary(max_size=300)))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**21, 2**21 + 1])
def test_a_piece_is_the_message_that_protobuf_would_write(size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    for given_as in (data[:size], bytearray(data[:size]), memoryview(data)[:size]):
        assert messages.frame_field(messages.CHUNK, given_as) == (
            model_pb2.Chunk(data=data[:size]).SerializeToString() or b"\n\0"
        )
        upload = fleet_pb2.UploadRequest(data=data[:size]).SerializeToString()
        assert messages.frame_field(messages.UPLOAD, given_as) == upload
        assert messages.unframe_field(messages.UPLOAD, upload) == data[:size]
        part = fleet_pb2.UploadRequest.FromString(messages.frame_part(size, given_as))
        assert (part.data, part.position) == (data[:size], size)
        assert messages.unframe_part(messages.frame_part(size, given_as)) == (size, data[:size])


@given(MESSAGES)
@example(b"")
@example(fleet_pb2.UploadRequest(data=b"abc").SerializeToString())
@example(HEADER)
@example(b"\x12\x01ab")  # more than it says
@example(b"\x12\x03ab")  # less
@example(b"\x12\x82\x80\x00ab")  # a length that is longer than it need be
@example(b"\x12" + b"\x80" * 11)  # no length at all
@example(b"\x12\x00" + HEADER)
@example(fleet_pb2.UploadRequest(data=b"abc", position=2**64 - 1).SerializeToString())
@example(messages.frame_part(2**64 - 1, b"abc"))
@example(messages.frame_part(2**64, b"abc"))  # protobuf has 64 bits
def test_what_is_read_without_protobuf_is_what_protobuf_reads(message: bytes) -> None:
    data, part = messages.unframe_field(messages.UPLOAD, message), messages.unframe_part(message)
    if data is None and part is None:
        return
    try:
        request = fleet_pb2.UploadRequest.FromString(message)
    except DecodeError:
        pytest.fail("protobuf refuses it")
    assert request.WhichOneof("part") == "data"
    if part is not None:
        assert (request.position, request.data) == (part[0], bytes(part[1]))
    elif data is not None:
        assert (request.HasField("position"), request.data) == (False, bytes(data))


def test_a_piece_is_not_copied() -> None:
    message = messages.frame_field(messages.CHUNK, b"x" * 1000)
    found = messages.unframe_field(messages.CHUNK, message)
    assert found is not None
    assert found.obj is message
