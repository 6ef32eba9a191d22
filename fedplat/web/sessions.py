"""Sessions of signed-in people, in memory only, and the single-use codes that a program prints."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from typing import Generic, Literal, Protocol, TypeVar

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


class SessionSource(Protocol):
    """What a session shows. `home` is the path of the first page after signing in."""

    @property
    def name(self) -> str:
        """The name of what is shown, such as the address of a server."""
        ...

    @property
    def home(self) -> str:
        """The path of the first page."""
        ...

    def close(self) -> None:
        """Close what it has opened."""
        ...


SourceT = TypeVar("SourceT", bound=SessionSource)
SourceT_co = TypeVar("SourceT_co", bound=SessionSource, covariant=True)


@dataclasses.dataclass(eq=False)
class BrowserSession(Generic[SourceT]):
    """A signed-in person. `source` has that person's token, if there is one, and makes all calls of the session."""

    source: SourceT
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


class BrowserSessions(Generic[SourceT]):
    """The open sessions, by the hash of their ids. Beyond `MAX_SESSIONS` the one that was used longest ago ends."""

    def __init__(self, clock: Clock, *, owns_sources: bool = True) -> None:
        self._clock = clock
        self._owns_sources = owns_sources
        self._sessions: OrderedDict[bytes, BrowserSession[SourceT]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, source: SourceT) -> str:
        """Open a session, and return its id: 256 random bits for the cookie."""
        session_id = secrets.token_urlsafe(_ID_BYTES)
        now = self._clock()
        with self._lock:
            self._remove_ended(now)
            while len(self._sessions) >= MAX_SESSIONS:
                self._close(self._sessions.popitem(last=False)[1])
            self._sessions[_hash(session_id)] = BrowserSession(source, now, now)
        return session_id

    def find(self, session_id: str, *, is_use: bool = True) -> BrowserSession[SourceT] | None:
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

    def _close(self, session: BrowserSession[SourceT]) -> None:
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


class LoginError(Exception):
    """A token or a code that was not accepted; the message is for the person who entered it."""


class Login(Protocol[SourceT_co]):
    """How people sign in. `owns_sources` is true if each session has its own source, which ends with it."""

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
        """The name of what the pages show."""
        ...

    def sign_in(self, secret: str) -> SourceT_co:
        """Return the source of a new session. Raises `LoginError`, or `ServerUnreachableError`."""
        ...


class CodeLogin(Generic[SourceT]):
    """The process prints single-use codes; all sessions share its source."""

    field: Literal["token", "code"] = "code"
    owns_sources = False

    def __init__(self, source: SourceT, codes: LoginCodes) -> None:
        self._source, self._codes = source, codes

    @property
    def name(self) -> str:
        """The name of what the pages show."""
        return self._source.name

    def sign_in(self, secret: str) -> SourceT:
        """Return the source of the process, for a valid code."""
        if not self._codes.use(secret):
            raise LoginError(
                "That code is not valid any more: a code is valid once, for 60 seconds. Press Enter in the terminal "
                "that has printed it for a new one."
            )
        return self._source
