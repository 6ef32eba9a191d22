"""The two ways to sign in: an operator's token, or a single-use code of the process that serves the pages."""

from __future__ import annotations

import re
from typing import Literal, Protocol

from fedplat.dashboard.server_source import AdminSource, refusal_code
from fedplat.dashboard.sessions import LoginCodes
from fedplat.dashboard.source import PageSource
from fedplat.errors import ServerRefusedError

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
                "That code is not valid any more: a code is valid once, for 60 seconds. Press Enter in the terminal of "
                "fedplat dashboard for a new one."
            )
        return self._source
