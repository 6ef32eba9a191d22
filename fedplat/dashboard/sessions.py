"""The checks and headers of every request, and sessions of signed-in operators, in memory only.

Cross-site writes are refused by the rule of Go 1.25 (`net/http.CrossOriginProtection`), for all methods but GET and
HEAD: the browser says `Sec-Fetch-Site: same-origin`, or, if it is too old for that header, `Origin` is the own one. The
host name must be known, against DNS rebinding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from typing import Literal, Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedplat.dashboard.source import AdminSource, PageSource, refusal_code
from fedplat.errors import ServerRefusedError
from fedplat.http_connections import host_name

Clock = Callable[[], float]
IDLE_S, LONGEST_S = 3600.0, 12 * 3600.0
"""A session ends after an hour without a request, and after twelve hours in any case."""
MAX_SESSIONS = 256
MAX_STREAMS = 32
"""Open streams of live updates of one session."""
CODE_S = 60.0
"""How long a single-use code is valid."""
_ID_BYTES = 32
_CODE_BYTES = 16


@dataclasses.dataclass(eq=False)
class BrowserSession:
    """A signed-in operator. `source` has the operator's token, and makes all calls of the session."""

    source: PageSource
    created: float
    used: float
    num_streams: int = 0

    @contextlib.contextmanager
    def count_stream(self) -> Generator[bool]:
        """Count an open stream; yield whether the session may have one more."""
        self.num_streams += 1
        try:
            yield self.num_streams <= MAX_STREAMS
        finally:
            self.num_streams -= 1


class BrowserSessions:
    """The open sessions, by the hash of their ids. Beyond `MAX_SESSIONS` the one that was used longest ago ends."""

    def __init__(self, clock: Clock, *, owns_sources: bool = True) -> None:
        self._clock = clock
        self._owns_sources = owns_sources
        self._sessions: OrderedDict[bytes, BrowserSession] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, source: PageSource) -> str:
        """Open a session, and return its id: 256 random bits for the cookie."""
        session_id = secrets.token_urlsafe(_ID_BYTES)
        now = self._clock()
        with self._lock:
            self._remove_ended(now)
            while len(self._sessions) >= MAX_SESSIONS:
                self._close(self._sessions.popitem(last=False)[1])
            self._sessions[_hash(session_id)] = BrowserSession(source, now, now)
        return session_id

    def find(self, session_id: str, *, is_use: bool = True) -> BrowserSession | None:
        """Return an open session; with `is_use`, its idle time starts again."""
        now, key = self._clock(), _hash(session_id)
        with self._lock:
            self._remove_ended(now)
            session = self._sessions.get(key)
            if session is not None and is_use:
                session.used = now
                self._sessions.move_to_end(key)
            return session

    def close(self, session_id: str) -> None:
        """End a session, if it is open."""
        with self._lock:
            session = self._sessions.pop(_hash(session_id), None)
        if session is not None:
            self._close(session)

    def close_all(self) -> None:
        """End all sessions."""
        with self._lock:
            sessions = list(self._sessions.values())
            self._sessions.clear()
        for session in sessions:
            self._close(session)

    def _remove_ended(self, now: float) -> None:
        ended = [
            key
            for key, session in self._sessions.items()
            if now - session.used > IDLE_S or now - session.created > LONGEST_S
        ]
        for key in ended:
            self._close(self._sessions.pop(key))

    def _close(self, session: BrowserSession) -> None:
        if self._owns_sources:
            session.source.close()


class LoginCodes:
    """Single-use codes of which only the last one is valid, for `CODE_S` seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._code, self._expires = b"", 0.0

    def make(self) -> str:
        """Return a new code; the previous one is no longer valid."""
        code = secrets.token_urlsafe(_CODE_BYTES)
        with self._lock:
            self._code, self._expires = _hash(code), self._clock() + CODE_S
        return code

    def use(self, code: str) -> bool:
        """Return whether a code is valid; it is not from now on."""
        with self._lock:
            is_valid = secrets.compare_digest(self._code, _hash(code)) and self._clock() <= self._expires
            if is_valid:
                self._code = b""
            return is_valid


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


_TOKEN = re.compile(r"fedplat_op_[A-Za-z0-9_-]{43}")


class LoginError(Exception):
    """A token or a code that was not accepted; the message is for the person who entered it."""


class Login(Protocol):
    """How operators sign in. `owns_sources` is true if each session has its own source, which ends with it."""

    @property
    def field(self) -> Literal["token", "code"]:
        """The field of the form."""
        ...

    @property
    def owns_sources(self) -> bool:
        """True if each session has its own source."""
        ...

    @property
    def name(self) -> str:
        """The server or the run that the pages show."""
        ...

    def sign_in(self, secret: str) -> PageSource:
        """Return the source of a new session. Raises `LoginError`, or `ServerUnreachableError`."""
        ...


class TokenLogin:
    """Operators enter their own tokens, which the server checks."""

    field: Literal["token", "code"] = "token"
    owns_sources = True

    def __init__(self, source: AdminSource) -> None:
        self._source = source

    @property
    def name(self) -> str:
        """The address of the server."""
        return self._source.name

    def sign_in(self, secret: str) -> PageSource:
        """Return a source with this token, if the server accepts it."""
        if _TOKEN.fullmatch(secret) is None:  # the server would refuse it after a delay
            raise LoginError("That is not an operator's token; it begins with fedplat_op_ and has 54 characters.")
        source = self._source.with_token(secret)
        try:
            source.status()
        except ServerRefusedError as exc:
            source.close()
            if refusal_code(exc) is None:
                raise
            raise LoginError(f"The server did not accept the token: {exc}.") from exc
        except BaseException:
            source.close()
            raise
        return source


class CodeLogin:
    """The process prints single-use codes; all sessions share its source."""

    field: Literal["token", "code"] = "code"
    owns_sources = False

    def __init__(self, source: PageSource, codes: LoginCodes) -> None:
        self._source, self._codes = source, codes

    @property
    def name(self) -> str:
        """The server or the run that the pages show."""
        return self._source.name

    def sign_in(self, secret: str) -> PageSource:
        """Return the source of the process, for a valid code."""
        if not self._codes.use(secret):
            raise LoginError(
                "That code is not valid any more: a code is valid once, for 60 seconds. Press Enter in the terminal "
                "that has printed it for a new one."
            )
        return self._source


MAX_BODY_BYTES = 64 * 1024
"""The largest form."""
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
"""Those of a dashboard with TLS: for a year, browsers use plain HTTP for no port of this host."""
_SAFE_METHODS = frozenset({"GET", "HEAD"})


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A request that is refused before it reaches the app."""

    status: int
    text: str


@dataclasses.dataclass(frozen=True)
class Guard:
    """Refuses requests to unknown hosts, cross-site writes and large bodies; adds the security headers.

    `hosts` are the host names of the dashboard, in lower case and without a port.
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
            return Refusal(421, f"this dashboard is not known by that host name; use one of: {names}")
        if scope["method"] not in _SAFE_METHODS:
            if not _is_same_origin(headers, f"{scope['scheme']}://{host}"):
                return Refusal(403, "this request came from another site; use the forms of the dashboard itself")
            length = headers.get("content-length", "")
            if not length.isascii() or not length.isdecimal():
                return Refusal(411, "the request has no Content-Length; expected a form with one")
            if len(length) > 9 or int(length) > MAX_BODY_BYTES:
                return Refusal(413, f"the form is too large; expected at most {MAX_BODY_BYTES} bytes")
        return None


def _is_same_origin(headers: Headers, own: str) -> bool:
    site = headers.get("sec-fetch-site")
    return site == "same-origin" if site is not None else headers.get("origin") == own
