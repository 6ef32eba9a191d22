"""The protocol between the daemon and the process of a ServerApp: msgpack frames over its standard input and output.

The daemon sends one `StartRun`, then an `AdvanceRun` for each set of messages, and answers each `ListClients`. The
process answers `StartRun` and `AdvanceRun` with `NextMessages`, `RunEnded` or `RunFailed`. Files are named by path.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from typing import BinaryIO, TypeVar

import msgspec

MAX_FRAME_BYTES = 256 * 2**20
_LENGTH = struct.Struct(">I")
_Frame = TypeVar("_Frame")


class StartRun(msgspec.Struct, tag="start", frozen=True):
    """Start the app, or continue an earlier run: from its state, and the message that was on its way, both files."""

    name: str
    folder: str
    run_config: dict[str, bool | int | float | str]
    state: str = ""
    message: str = ""
    max_weight_factor: float = 0.0


class AdvanceRun(msgspec.Struct, tag="advance", frozen=True):
    """Continue the app with the replies to its last messages: their files by client, and why others have failed.

    The remaining clients were too late.

    The process writes the messages that the app sends next to `message`, and what a new process would need to continue
    to `state`; an app that could only begin anew has an empty state.
    """

    replies: Mapping[str, str]
    failures: Mapping[str, str]
    message: str
    state: str


class ListClients(msgspec.Struct, tag="list", frozen=True):
    """Ask which clients may work for the app now."""


class ListedClients(msgspec.Struct, tag="listed", frozen=True):
    """The ids of the clients that may work for the app now."""

    clients: tuple[str, ...]


class RunStarted(msgspec.Struct, tag="started", frozen=True):
    """The app is imported. `clients` are those that an earlier run knew; `continues`: it continues that run."""

    clients: tuple[str, ...] = ()
    continues: bool = False


class NextMessages(msgspec.Struct, tag="messages", frozen=True):
    """The app waits for replies of these clients. `refused`: as in `AttemptAggregated`."""

    cohort: tuple[str, ...]
    message_type: str
    metrics: dict[str, float]
    refused: dict[str, str] = {}


class RunEnded(msgspec.Struct, tag="ended", frozen=True):
    """The app has ended. Its final model is written to `AdvanceRun.message`, if `has_model`."""

    metrics: dict[str, float]
    has_model: bool
    refused: dict[str, str] = {}


class RunFailed(msgspec.Struct, tag="failed", frozen=True):
    """The app has raised an exception, or cannot be run."""

    text: str


Request = StartRun | AdvanceRun | ListedClients
Answer = RunStarted | NextMessages | RunEnded | RunFailed | ListClients
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def write_frame(file: BinaryIO, frame: msgspec.Struct) -> None:
    """Write a frame to a pipe."""
    content = msgspec.msgpack.encode(frame)
    file.write(_LENGTH.pack(len(content)) + content)
    file.flush()


def read_frame(file: BinaryIO) -> Request | None:
    """Read a frame of the daemon; None at the end of the pipe."""
    prefix = file.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        return None
    return _requests.decode(file.read(_LENGTH.unpack(prefix)[0]))


async def send_frame(writer: asyncio.StreamWriter, frame: msgspec.Struct) -> None:
    """Send a frame to the process."""
    content = msgspec.msgpack.encode(frame)
    writer.write(_LENGTH.pack(len(content)) + content)
    await writer.drain()


async def receive_frame(reader: asyncio.StreamReader) -> Answer:
    """Receive a frame of the process. Raises `EOFError` if the process has ended, `ValueError` for no frame."""
    prefix = await reader.readexactly(_LENGTH.size)
    if (size := _LENGTH.unpack(prefix)[0]) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    return _answers.decode(await reader.readexactly(size))
