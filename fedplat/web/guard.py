"""The checks and headers of every request.

Cross-site writes are refused by the rule of Go 1.25 (`net/http.CrossOriginProtection`), for all methods but GET and
HEAD: the browser says `Sec-Fetch-Site: same-origin`, or, if it is too old for that header, `Origin` is the own one. The
host name must be known, against DNS rebinding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedplat.http_connections import host_name

MAX_BODY_BYTES = 64 * 1024
"""The largest form."""
_MAX_FIELDS = 20
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
TLS_HEADERS: Mapping[str, str] = {"Strict-Transport-Security": "max-age=31536000"}
"""Those of pages with TLS: for a year, browsers use plain HTTP for no port of this host."""
_SAFE_METHODS = frozenset({"GET", "HEAD"})


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A request that is refused before it reaches the app."""

    status: int
    text: str


@dataclasses.dataclass(frozen=True)
class Guard:
    """Refuses requests to unknown hosts, cross-site writes and large bodies; adds the security headers.

    `hosts` are the host names of the pages, in lower case and without a port.
    """

    app: ASGIApp
    hosts: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                added = {**HEADERS, **TLS_HEADERS} if scope["scheme"] == "https" else HEADERS
                for name, value in added.items():
                    headers[name] = value
                if "cache-control" not in headers:
                    headers["Cache-Control"] = "no-store"
            await send(message)

        refusal = self.check(scope)
        if refusal is not None:
            response = PlainTextResponse(refusal.text + "\n", refusal.status)
            await response(scope, receive, send_with_headers)
            return
        await self.app(scope, receive, send_with_headers)

    def check(self, scope: Scope) -> Refusal | None:
        """Return why a request is refused, or None."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or host_name(host) not in self.hosts:
            names = ", ".join(sorted(self.hosts))
            return Refusal(421, f"these pages are not known by that host name; use one of: {names}")
        if scope["method"] not in _SAFE_METHODS:
            if not _is_same_origin(headers, f"{scope['scheme']}://{host}"):
                return Refusal(403, "this request came from another site; use the forms of the pages themselves")
            length = headers.get("content-length", "")
            if not length.isascii() or not length.isdecimal():
                return Refusal(411, "the request has no Content-Length; expected a form with one")
            if len(length) > 9 or int(length) > MAX_BODY_BYTES:
                return Refusal(413, f"the form is too large; expected at most {MAX_BODY_BYTES} bytes")
        return None


def _is_same_origin(headers: Headers, own: str) -> bool:
    site = headers.get("sec-fetch-site")
    return site == "same-origin" if site is not None else headers.get("origin") == own


async def read_form(request: Request) -> dict[str, str]:
    """Read an urlencoded form; the guard has bounded its size."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise HTTPException(415, "expected a form, application/x-www-form-urlencoded")
    body = await request.body()
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS))
    except ValueError as exc:  # also UnicodeDecodeError
        raise HTTPException(400, "the form is not valid") from exc
