"""The ASGI application: requests become calls of the same handlers as gRPC's, see `fedplat.wire.http`.

Nothing of a body is read before the call is admitted, and what is read is bounded as with gRPC. A method without a form
(see `forms`) is refused.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping

import grpc
from grpc import aio

from fedplat.wire import http
from fedplat_server.rpc import interceptor
from fedplat_server.rpc.http import context
from fedplat_server.rpc.http.context import HttpCall, Receive, RequestBody, Scope
from fedplat_server.rpc.http.forms import Form
from fedplat_server.rpc.http.response import Headers, RequestProblem, Response, Send
from fedplat_server.rpc.interceptor import Handler

MAX_HEADER_BYTES = 16 * 2**10
"""Maximum bytes of the headers of a request."""
_CODINGS = (b"content-encoding", b"connect-content-encoding")
_TIMEOUT = re.compile(r"[0-9]{1,10}")
_ALLOWED_HEADERS = (
    "content-type, connect-protocol-version, connect-timeout-ms, fedplat-session, fedplat-counter, "
    "fedplat-signature-bin, fedplat-nonce-bin, fedplat-request-bin, traceparent"
)
_EXPOSED_HEADERS = "trailer-fedplat-code, trailer-fedplat-retry-s"
_PREFLIGHT_S = 7200
"""How long browsers may remember that they may call: the longest time that Chromium accepts."""


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


_CLOSE = ((b"connection", b"close"),)
_NO_METHOD = RequestProblem(
    501, "there is no such method over HTTP; operators need the server's --http-operators, or gRPC", "unimplemented"
)


class Application:
    """Serves the methods of `forms`, which are given by their paths.

    `find` returns their handlers, and `wrap` is that of the interceptor of all calls. `is_public` returns whether a
    method needs no credential: a connection without a success of another one is that of a newcomer. `origins` are those
    of web pages that may call from a browser.
    """

    def __init__(
        self,
        forms: Mapping[str, Form],
        find: Callable[[grpc.HandlerCallDetails], Handler | None],
        wrap: Callable[[Handler, str], Handler],
        is_public: Callable[[str], bool],
        origins: Collection[str] = (),
    ) -> None:
        self._forms = forms
        self._find = find
        self._wrap = wrap
        self._is_public = is_public
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        assert scope["type"] == "http"
        headers: dict[bytes, bytes] = dict(scope["headers"])
        response = Response(send, self._share(headers), scope["extensions"]["fedplat.cut"])
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await _allow(response, is_allowed=headers.get(b"origin", b"").decode("latin-1") in self._origins)
            return
        path = scope["path"]
        form = self._forms.get(path)
        problem = _check_head(scope, headers) or _check_content(headers, form)
        handler = self._find(_Details(path)) if problem is None else None
        if form is None or handler is None:
            await response.refuse(problem or _NO_METHOD)
            return
        handler, body = self._wrap(handler, path), RequestBody(receive, scope["extensions"]["fedplat.take_body"])
        try:
            incoming = form.read(scope, body, interceptor.max_bytes(path))
            call = HttpCall(scope, incoming, handler.request_deserializer)
        except context.BadHeaderError as exc:
            await response.refuse(RequestProblem(400, str(exc)))
            return
        timeout = headers.get(http.TIMEOUT_HEADER.encode())
        call.limit_time(int(timeout) / 1000.0 if timeout is not None else None)
        try:
            is_success = await _exchange(form, handler, call, response)
            if is_success and not self._is_public(path):
                scope["extensions"]["fedplat.recognise"]()
        except asyncio.CancelledError:
            if not body.is_gone:
                raise
            if (task := asyncio.current_task()) is not None and task.cancelling():
                task.uncancel()
        finally:
            await body.close()
            call.end()

    def _share(self, headers: dict[bytes, bytes]) -> Headers:
        """Return the headers that show a response to a web page, if it is one of those that may call."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not self._origins:
            return []
        vary = (b"vary", b"origin")
        if origin not in self._origins:
            return [vary]
        return [
            (b"access-control-allow-origin", origin.encode()),
            (b"access-control-expose-headers", _EXPOSED_HEADERS.encode()),
            vary,
        ]


def _check_head(scope: Scope, headers: dict[bytes, bytes]) -> RequestProblem | None:
    """Return what is wrong with the head of a request, of whatever method."""
    if sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["raw_path"]) > MAX_HEADER_BYTES:
        return RequestProblem(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
    if b"content-length" in headers and b"transfer-encoding" in headers:
        # A proxy may go by the other one, and take the rest for the next request (RFC 9112, section 6.1).
        return RequestProblem(400, "expected a content-length or a transfer-encoding, not both", headers=_CLOSE)
    if scope["method"] != "POST":
        return RequestProblem(405, "expected POST: each call is POST /SERVICE/METHOD", headers=((b"allow", b"POST"),))
    if headers.get(http.VERSION_HEADER.encode(), b"1") != b"1":
        return RequestProblem(400, f"{http.VERSION_HEADER} must be 1")
    timeout = headers.get(http.TIMEOUT_HEADER.encode(), b"0").decode("latin-1")
    if not _TIMEOUT.fullmatch(timeout):
        return RequestProblem(400, f"{http.TIMEOUT_HEADER} must be a number of milliseconds, of at most 10 digits")
    return None


def _check_content(headers: dict[bytes, bytes], form: Form | None) -> RequestProblem | None:
    """Return what is wrong with the body of a request, by its headers."""
    if form is None:
        return _NO_METHOD
    content_type = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if content_type != form.content_type:
        return RequestProblem(415, f"the content type of this method is {form.content_type}")
    if any(headers.get(name, b"identity") != b"identity" for name in _CODINGS):
        return RequestProblem(415, "the body must not be compressed")
    return None


async def _allow(response: Response, *, is_allowed: bool) -> None:
    """Answer the question of a browser whether a page may call."""
    if not is_allowed:
        await response.send(403, b"", [])
        return
    headers = [
        (b"access-control-allow-methods", b"POST"),
        (b"access-control-allow-headers", _ALLOWED_HEADERS.encode()),
        (b"access-control-max-age", str(_PREFLIGHT_S).encode()),
    ]
    await response.send(204, b"", headers)


async def _exchange(form: Form, handler: Handler, call: HttpCall, response: Response) -> bool:
    """Call the handler and send its response, or its refusal; return whether it was not refused."""
    try:
        async with asyncio.timeout(call.time_remaining()):
            await form.outgoing.send(handler, call, response)
            return True
    except aio.AbortError:
        await form.outgoing.refuse(call, response, call.code().name, call.details)
    except TimeoutError:
        await form.outgoing.refuse(call, response, "DEADLINE_EXCEEDED", "the caller's time is over")
    return False
