"""A host that opens streams by the thousand and keeps them: each has all of its message but the last byte.

The bytes follow the windows that the server grants, as those of any HTTP/2 client do, so that the server takes as many
as it ever would. No credential is needed for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import struct

from faults.proxy import split
from hostile import frames
from hostile.frames import DATA, HEADERS, PING, RST_STREAM, SETTINGS, WINDOW_UPDATE

DEFAULT_WINDOW = 65_535
FRAME_BYTES = 16_384
INITIAL_WINDOW_SETTING = 4
END_STREAM, END_HEADERS, ACK = 1, 4, 1


@dataclasses.dataclass
class _Stream:
    """A stream of ours: what it may still send, and what it still wants to."""

    window: int
    missing: int
    began: bool = False


class Holder:
    """One connection with many streams that never end."""

    def __init__(self, path: str, num_streams: int, message_bytes: int, *, acknowledges: bool = True) -> None:
        self._path = path
        self._num_streams = num_streams
        self._message_bytes = message_bytes
        self._acknowledges = acknowledges
        self._window = DEFAULT_WINDOW
        self._initial = DEFAULT_WINDOW
        self._streams: dict[int, _Stream] = {}
        self._wake = asyncio.Event()
        self.num_sent_bytes = 0
        self.most_held_bytes = self._held_bytes = 0  # of all streams that are still open
        self.num_ended = 0
        self.is_over = False

    @property
    def num_begun(self) -> int:
        """Streams that were opened."""
        return self.num_ended + sum(stream.began for stream in self._streams.values())

    @property
    def num_held(self) -> int:
        """Streams that the server has not ended."""
        return 0 if self.is_over else len(self._streams)

    async def run(self, address: str, source: str | None = None) -> None:
        """Holds the streams until cancelled or until the server ends the connection; `source`: our own address."""
        local = (source, 0) if source is not None else None
        host, port = split(address)
        reader, writer = await asyncio.open_connection(host, port, local_addr=local)
        listening = asyncio.ensure_future(self._listen(reader, writer))
        try:
            with contextlib.suppress(OSError):
                writer.write(frames.PREFACE + frames.frame(SETTINGS, 0, 0, b""))
                for number in range(self._num_streams):
                    self._streams[2 * number + 1] = _Stream(self._initial, self._message_bytes - 1)
                while not listening.done():
                    self._wake.clear()
                    await self._push(writer)
                    waiting = asyncio.ensure_future(self._wake.wait())
                    await asyncio.wait([listening, waiting], return_when=asyncio.FIRST_COMPLETED)
                    waiting.cancel()
        finally:
            self.is_over = True
            listening.cancel()
            writer.close()

    async def _push(self, writer: asyncio.StreamWriter) -> None:
        """Sends what the windows allow: first the heads of all streams."""
        for number, stream in list(self._streams.items()):
            if not stream.began:
                stream.began = True
                head = frames.hpack(frames.fields(self._path))
                writer.write(frames.frame(HEADERS, END_HEADERS, number, head))
                self._send(writer, number, stream, struct.pack(">BI", 0, self._message_bytes - 5))
            await writer.drain()
        for number, stream in list(self._streams.items()):
            while (
                number in self._streams and (size := min(FRAME_BYTES, stream.missing, stream.window, self._window)) > 0
            ):
                self._send(writer, number, stream, bytes(size))
                await writer.drain()

    def _send(self, writer: asyncio.StreamWriter, number: int, stream: _Stream, content: bytes) -> None:
        writer.write(frames.frame(DATA, 0, number, content))
        stream.window -= len(content)
        stream.missing -= len(content)
        self._window -= len(content)
        self.num_sent_bytes += len(content)
        self._held_bytes += len(content)
        self.most_held_bytes = max(self.most_held_bytes, self._held_bytes)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(9)
                size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                number = int.from_bytes(head[5:], "big")
                self._take(kind, flags, number, await reader.readexactly(size), writer)
                self._wake.set()

    def _take(self, kind: int, flags: int, number: int, content: bytes, writer: asyncio.StreamWriter) -> None:
        if kind == SETTINGS and not flags & ACK:
            if self._acknowledges:
                self._obey(content)
                writer.write(frames.frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            writer.write(frames.frame(PING, ACK, 0, content))
        elif kind == WINDOW_UPDATE:
            grown = int.from_bytes(content, "big")
            if number == 0:
                self._window += grown
            elif number in self._streams:
                self._streams[number].window += grown
        elif kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self._end(number)

    def _end(self, number: int) -> None:
        if (stream := self._streams.pop(number, None)) is not None:
            self.num_ended += 1
            self._held_bytes -= self._message_bytes - 1 - stream.missing

    def _obey(self, settings: bytes) -> None:
        for place in range(0, len(settings), 6):
            name, value = struct.unpack(">HI", settings[place : place + 6])
            if name == INITIAL_WINDOW_SETTING:
                for stream in self._streams.values():
                    stream.window += value - self._initial
                self._initial = value
