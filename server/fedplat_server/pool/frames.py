"""What travels between the daemon and rank 0: a length, and a record as msgpack."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Literal

import msgspec

_LENGTH = struct.Struct("<I")
_MOST = 2**30


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Rank 0 has taken a connection: how many ranks there are, and what they compute on."""

    num_ranks: int
    device: str


class Begin(msgspec.Struct, tag="begin", frozen=True):
    """The daemon wants a work of this name; there is one for each connection. `backend` is as in a job's `[pool]`."""

    work: str
    request: bytes
    backend: Literal["auto", "gloo", "nccl"] = "auto"


class Message(msgspec.Struct, tag="message", frozen=True):
    """More for the work, from the daemon."""

    content: bytes


class End(msgspec.Struct, tag="end", frozen=True):
    """The daemon has no more for the work, and waits for its result."""


class Note(msgspec.Struct, tag="note", frozen=True):
    """What the ranks tell before the work is done."""

    content: bytes


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """The result of a work."""

    content: bytes


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """Why a work cannot be done; perhaps because there is too little memory for it on an accelerator."""

    text: str
    out_of_memory: bool = False


Frame = Hello | Begin | Message | End | Note | Reply | Refused
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encoded(frame: Frame) -> bytes:
    """A frame as bytes."""
    content = msgspec.msgpack.encode(frame)
    return _LENGTH.pack(len(content)) + content


async def read(connection: socket.socket) -> Frame:
    """The next frame. Raises `ConnectionError` at the end of the connection, and when what came is no frame."""
    [length] = _LENGTH.unpack(await _read_exactly(connection, _LENGTH.size))
    return _decoded(await _read_exactly(connection, _checked(length)))


async def _read_exactly(connection: socket.socket, size: int) -> bytes:
    loop, content = asyncio.get_running_loop(), bytearray(size)
    view = memoryview(content)
    while view:
        view = view[_counted(await loop.sock_recv_into(connection, view)) :]
    return bytes(content)


def receive(connection: socket.socket) -> Frame:
    """What `read` does, for a thread."""
    [length] = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return _decoded(_exactly(connection, _checked(length)))


def _exactly(connection: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        view = view[_counted(connection.recv_into(view)) :]
    return bytes(content)


def _counted(count: int) -> int:
    if not count:
        raise ConnectionResetError("the connection has ended")
    return count


def _checked(length: int) -> int:
    if length > _MOST:
        raise ConnectionError(f"a frame of {length} bytes; expected at most {_MOST}")
    return length


def _decoded(content: bytes) -> Any:
    try:
        return _decoder.decode(content)
    except msgspec.DecodeError as exc:
        raise ConnectionError(f"what came is no frame of the pool: {exc}") from exc
