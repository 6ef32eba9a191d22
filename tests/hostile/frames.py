"""Broken HTTP/2 over raw sockets: what a gRPC server receives from anyone who finds its port."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import struct
from collections.abc import Callable

from faults.proxy import split

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
BOMB = gzip.compress(bytes(32 * 2**20), 9)
"""32 MiB in about 32 KiB: less than a window, more than the largest message."""
ANSWER_S = 0.05
"""How long to wait for an answer; the server may close the connection, answer or send nothing."""


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """A frame of RFC 9113, section 4.1; `length` may be wrong."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def hpack(fields: dict[str, bytes]) -> bytes:
    """Header fields, each a literal without indexing (RFC 7541, section 6.2.2)."""
    return b"".join(b"\x00" + _text(name.encode()) + _text(value) for name, value in fields.items())


def _text(content: bytes) -> bytes:
    size = len(content)
    if size < 127:
        return bytes([size]) + content
    size, encoded = size - 127, bytearray([127])
    while size >= 128:
        encoded.append(size % 128 + 128)
        size //= 128
    return bytes([*encoded, size]) + content


def fields(path: str) -> dict[str, bytes]:
    """The header fields of a gRPC call."""
    return {
        ":method": b"POST",
        ":scheme": b"http",
        ":path": path.encode(),
        ":authority": b"server",
        "te": b"trailers",
        "content-type": b"application/grpc",
    }


def call(path: str, more: dict[str, bytes] | None = None) -> bytes:
    """The beginning of a connection and of a gRPC call on stream 1."""
    return PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, 4, 1, hpack({**fields(path), **(more or {})}))


def message(content: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    """A gRPC message; `length` may be wrong."""
    return bytes([compressed]) + struct.pack(">I", len(content) if length is None else length) + content


REPORT = "/fedplat.wire.v1.Fleet/Report"
_SHAPES: list[Callable[[random.Random], bytes]] = [
    lambda rng: rng.randbytes(rng.randint(1, 4000)),
    lambda rng: PREFACE[: rng.randint(1, len(PREFACE))],
    lambda rng: PREFACE + rng.randbytes(rng.randint(1, 4000)),
    lambda rng: PREFACE + frame(SETTINGS, 0, 0, rng.randbytes(7)),
    lambda rng: PREFACE + frame(SETTINGS, 0, 0, b"") + frame(rng.randrange(20), rng.randrange(256), 1, b"", 2**24 - 1),
    lambda rng: PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, 5, 1, rng.randbytes(200)),
    lambda rng: PREFACE + frame(SETTINGS, 0, 0, b"") + frame(CONTINUATION, 4, 1, rng.randbytes(20)),
    lambda rng: PREFACE + frame(SETTINGS, 0, 0, b"") + frame(DATA, 1, rng.choice((0, 1, 2)), rng.randbytes(100)),
    lambda rng: PREFACE + frame(SETTINGS, 0, 0, b"") + frame(PING, 0, 0, bytes(8)) * 300,
    lambda rng: PREFACE + frame(SETTINGS, 0, 0, b"") * 300,
    lambda rng: call(REPORT) + frame(RST_STREAM, 0, 1, bytes(4)) + frame(DATA, 1, 1, rng.randbytes(50)),
    lambda rng: (
        call(REPORT) + frame(WINDOW_UPDATE, 0, rng.choice((0, 1)), struct.pack(">I", rng.choice((0, 2**31 - 1))))
    ),
    lambda rng: call(REPORT) + frame(DATA, 1, 1, message(b"x", length=2**32 - 1)),
    lambda rng: call(REPORT) + frame(DATA, 1, 1, message(b"x" * 50, length=10)),
    lambda rng: call(REPORT) + frame(DATA, 1, 1, message(rng.randbytes(100), compressed=rng.choice((1, 2, 255)))),
    lambda rng: call(REPORT, {"grpc-encoding": b"gzip"}) + _in_frames(message(BOMB, compressed=1)),
    lambda rng: call(REPORT, {"grpc-encoding": b"gzip"}) + frame(DATA, 1, 1, message(rng.randbytes(99), compressed=1)),
    lambda rng: call(REPORT, {"x" * 200: b"y" * rng.choice((100, 20_000))}),
    lambda rng: call(REPORT, {"authorization": rng.randbytes(30)}) + frame(DATA, 1, 1, message(b"")),
    lambda rng: call(REPORT, {"grpc-timeout": rng.choice((b"x", b"-1S", b"99999999999999H"))}),
    lambda rng: call(rng.randbytes(30).hex()),
    lambda rng: b"GET / HTTP/1.1\r\nHost: server\r\n\r\n" * rng.randint(1, 5),
    lambda rng: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(508),
]


def draw(rng: random.Random) -> bytes:
    """The bytes of the next broken connection."""
    return rng.choice(_SHAPES)(rng)


def _in_frames(content: bytes, size: int = 16_384) -> bytes:
    parts = [content[start : start + size] for start in range(0, len(content), size)]
    return b"".join(frame(DATA, int(part is parts[-1]), 1, part) for part in parts)


async def send(address: str, content: bytes) -> None:
    """Sends the bytes over a new connection, and reads the server's answer if it comes soon."""
    reader, writer = await asyncio.open_connection(*split(address))
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(content)
        await writer.drain()
        async with asyncio.timeout(ANSWER_S):
            await reader.read(-1)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
