"""Broken HTTP/1.1 over raw sockets: what the port of HTTP receives from anyone who finds it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from support.raw_client import CHALLENGE

CHALLENGE_PATH = "/fedplat.wire.v1.Fleet/GetChallenge"
BODY = CHALLENGE.SerializeToString()
_HEADERS = {"host": "server", "content-type": "application/proto"}


def request(headers: Mapping[str, str], body: bytes = BODY, path: str = CHALLENGE_PATH, method: str = "POST") -> bytes:
    """A request with exactly these headers, after the usual two."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in {**_HEADERS, **headers}.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


def _with(*lines: str, body: bytes = BODY) -> bytes:
    """A request with these further lines of its head, which may repeat a name."""
    head = "".join(f"{line}\r\n" for line in lines)
    return f"POST {CHALLENGE_PATH} HTTP/1.1\r\nhost: a\r\ncontent-type: application/proto\r\n{head}\r\n".encode() + body


SECOND = request({"content-length": str(len(BODY))})
"""A request that hides in the body of another one."""
SMUGGLING: dict[str, bytes] = {
    "two lengths": _with(f"content-length: {len(BODY)}", f"content-length: {len(BODY + SECOND)}", body=BODY + SECOND),
    "two lengths in one": _with(f"content-length: {len(BODY)}, {len(BODY + SECOND)}", body=BODY + SECOND),
    "length and chunks": _with(
        f"content-length: {len(SECOND) + 5}", "transfer-encoding: chunked", body=b"0\r\n\r\n" + SECOND
    ),
    "two codings": _with("transfer-encoding: chunked", "transfer-encoding: identity", body=b"0\r\n\r\n" + SECOND),
    "an odd coding": _with("transfer-encoding: xchunked", body=b"0\r\n\r\n" + SECOND),
    "a space before the colon": _with("content-length : 0", body=SECOND),
    "a length with a sign": _with(f"content-length: +{len(BODY)}", body=BODY + SECOND),
    "a hexadecimal length": _with("content-length: 0x0", body=SECOND),
    "a length with an underscore": _with("content-length: 1_0", body=SECOND),
    "a negative chunk": _with("transfer-encoding: chunked", body=b"-1\r\n" + SECOND),
    "a chunk of odd digits": _with("transfer-encoding: chunked", body=b"0x0\r\n\r\n" + SECOND),
    "a NUL in a header": _with("x-a: \0", f"content-length: {len(BODY)}", body=BODY + SECOND),
}
"""Requests of which two programs could find different ends: a proxy and the server would disagree whose the rest is."""

_SHAPES: list[Callable[[random.Random], bytes]] = [
    lambda rng: rng.randbytes(rng.randint(1, 4000)),
    lambda rng: rng.choice(list(SMUGGLING.values())),
    lambda rng: SECOND[: rng.randint(1, len(SECOND))],
    lambda rng: SECOND * rng.randint(2, 50),
    lambda rng: request({"x": "y" * rng.choice((100, 20_000, 200_000)), "content-length": "0"}, b""),
    lambda rng: request({f"x-{n}": "y" for n in range(rng.choice((50, 500)))} | {"content-length": "0"}, b""),
    lambda rng: request({"content-length": str(rng.choice((0, 10, 2**31, 2**63, 10**30)))}, rng.randbytes(100)),
    lambda rng: request({"transfer-encoding": "chunked"}, b"%x\r\n" % rng.choice((0, 10, 2**31, 2**64))),
    lambda rng: request({"transfer-encoding": "chunked"}, b"5;" + b"x" * rng.choice((10, 50_000)) + b"\r\nabcde\r\n"),
    lambda rng: request({"transfer-encoding": "chunked"}, b"0\r\nx: " + b"y" * rng.choice((10, 50_000))),
    lambda rng: request({"expect": rng.choice(("100-continue", "x")), "content-length": "5"}, b""),
    lambda rng: request({"upgrade": rng.choice(("h2c", "websocket")), "connection": "upgrade"}, b""),
    lambda rng: request({"content-length": "0"}, b"", rng.choice(("*", "http://a/", "//", "/%00", "/" + "x" * 20_000))),
    lambda rng: request({"content-length": "0"}, b"", method=rng.choice(("GET", "CONNECT", "TRACE", "X" * 500))),
    lambda rng: request({"fedplat-nonce-bin": rng.randbytes(30).hex(), "content-length": str(len(BODY))}),
    lambda rng: request({"connect-timeout-ms": rng.choice(("0", "-1", "x", "9" * 10)), "content-length": "0"}, b""),
    lambda rng: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(rng.randint(0, 100)),
    lambda rng: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(508),
    lambda rng: b"GET / HTTP/1.1\n\n" * rng.randint(1, 5),
]


def draw(rng: random.Random) -> bytes:
    """The bytes of the next broken connection."""
    return rng.choice(_SHAPES)(rng)
