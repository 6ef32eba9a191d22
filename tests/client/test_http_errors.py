"""What a client says of answers that are not the server's: each is one sentence, and none is taken for a refusal."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator

import grpc
import pytest

from fedplat.wire import http_channel
from fedplat.wire.http_requests import HttpError

PAGE = b"<html><body><h1>Blocked by policy</h1></body></html>"


def answered(head: str, body: bytes = PAGE) -> bytes:
    return f"HTTP/1.1 {head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


CASES = {
    "an error page": (answered("502 Bad Gateway\r\ncontent-type: text/html"), "with the HTTP status 502"),
    "a page instead of an answer": (answered("200 OK\r\ncontent-type: text/html"), "with the HTTP status 200"),
    "a limit": (answered("413 Too Large\r\ncontent-type: text/html"), "client_max_body_size"),
    "JSON of something else": (answered("403 Forbidden\r\ncontent-type: application/json", b"[1]"), "HTTP status 403"),
    "no HTTP": (b"\0\0\4\0\0\0\0\0\0" * 3, "does not speak HTTP/1.1"),
    "nothing": (b"", "the connection was closed"),
    "the beginning of an answer": (answered("200 OK\r\ncontent-type: application/proto")[:-5], "was closed"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Generator[tuple[str, str]]:
    """The address of a server that answers one connection so, and a part of the sentence."""
    answer, sentence = CASES[request.param]
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", sentence
        thread.join()


def test_what_is_not_the_server_is_no_answer(case: tuple[str, str]) -> None:
    address, sentence = case
    with http_channel.connect(address, tls=False) as channel, pytest.raises(HttpError) as caught:
        channel.unary_unary("/service/Method", response_deserializer=bytes)(b"", timeout=30.0)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert sentence in caught.value.details()
    assert not caught.value.trailing_metadata()
