"""Signing in with the token of an operator."""

from __future__ import annotations

import re
from typing import Literal

from fedplat.dashboard.source import AdminSource, PageSource, refusal_code
from fedplat.errors import ServerRefusedError
from fedplat.web.sessions import LoginError

_TOKEN = re.compile(r"fedplat_op_[A-Za-z0-9_-]{43}")


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
