"""Signing in and out: the form, the cookie of a session, and the bounds of the attempts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from fedplat import errors, fair_places
from fedplat.web.guard import read_form
from fedplat.web.sessions import LONGEST_S, BrowserSession, BrowserSessions, Login, LoginError, SourceT

LOGIN_LIMITS = fair_places.PlaceLimits(total=24, per_network=24, waiting_per_network=64, wait_s=10.0)
"""Attempts to sign in: a token or a code has too many bits to be guessed, so these only bound the calls to a server.

A server delays at most 16 refusals of one caller at a time (`operator_access.MAX_PENDING`) and refuses further ones at
once. So wrong tokens hold 16 of these places, and valid ones find another.
"""


@dataclasses.dataclass(frozen=True)
class LoginForm:
    """The form to sign in: its field, the mistake of the last attempt, the code, and the path of the next page."""

    field: str
    problem: str
    code: str
    next: str


class SignIn(Generic[SourceT]):
    """The addresses `/login` and `/logout` of an app. `render` returns the page of the form.

    `cookie` is the name of the cookie. Browsers send cookies of one host to all its ports, so programs on one machine
    need different names.
    """

    def __init__(
        self,
        login: Login[SourceT],
        sessions: BrowserSessions[SourceT],
        cookie: str,
        render: Callable[[LoginForm], str],
    ) -> None:
        self.login, self.cookie = login, cookie
        self._sessions, self._render = sessions, render
        self._attempts = fair_places.FairPlaces(lambda: LOGIN_LIMITS)
        self._threads = ThreadPoolExecutor(LOGIN_LIMITS.total, thread_name_prefix="login")

    def stop(self) -> None:
        """End all sessions."""
        self._sessions.close_all()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def routes(self) -> list[Route]:
        """Return the routes of these addresses."""
        return [
            Route("/login", self._show_login),
            Route("/login", self._sign_in, methods=["POST"]),
            Route("/logout", self._sign_out, methods=["POST"]),
        ]

    def find(self, request: Request, *, is_use: bool = True) -> BrowserSession[SourceT] | None:
        """Return the session of a request; with `is_use`, its idle time starts again."""
        return self._sessions.find(request.cookies.get(self.cookie, ""), is_use=is_use)

    def close(self, request: Request) -> None:
        """End the session of a request."""
        self._sessions.close(request.cookies.get(self.cookie, ""))

    def leave(self, request: Request, next_path: str = "") -> Response:
        """End the session of a request and lead to the login, which continues at a path."""
        self.close(request)
        path = "/login" if next_path in ("", "/") else f"/login?{urlencode({'next': next_path})}"
        response = RedirectResponse(path, 303)
        if self.cookie in request.cookies:
            response.delete_cookie(self.cookie, secure=True, httponly=True, samesite="strict", path="/")
        return response

    async def _show_login(self, request: Request) -> Response:
        code = request.query_params.get("code", "")[:100] if self.login.field == "code" else ""
        return self._page(request.query_params.get("next", ""), code=code)

    def _page(self, next_path: str, problem: str = "", *, code: str = "", status: int = 200) -> Response:
        return HTMLResponse(self._render(LoginForm(self.login.field, problem, code, _own_path(next_path))), status)

    async def _sign_in(self, request: Request) -> Response:
        form = await read_form(request)
        address = request.client.host if request.client is not None else ""
        next_path = form.get("next", "")
        secret = form.get(self.login.field, "").strip()
        try:
            async with self._attempts.place(fair_places.groups_of(address)):
                loop = asyncio.get_running_loop()
                source = await loop.run_in_executor(self._threads, self.login.sign_in, secret)
        except fair_places.PlacesFullError:
            problem = "Too many others are signing in; try again in a few seconds."
            response = self._page(next_path, problem, status=429)
            response.headers["Retry-After"] = "2"
            return response
        except LoginError as exc:
            session = self.find(request) if self.login.field == "code" else None
            if session is not None:  # the address with its code was opened again
                return RedirectResponse(_own_path(next_path) or session.source.home, 303)
            return self._page(next_path, str(exc), status=403)
        except errors.FedplatError as exc:
            return self._page(next_path, f"{str(exc)[:1].upper()}{str(exc)[1:]}.", status=503)
        self.close(request)
        response = RedirectResponse(_own_path(next_path) or source.home, 303)
        session_id = self._sessions.open(source)
        response.set_cookie(
            self.cookie, session_id, max_age=int(LONGEST_S), secure=True, httponly=True, samesite="strict", path="/"
        )
        return response

    async def _sign_out(self, request: Request) -> Response:
        return self.leave(request)


def _own_path(path: str) -> str:
    """Return a path of this site to continue at; empty if it could lead to another one."""
    is_own = path.startswith("/") and not path.startswith(("//", "/\\", "/login", "/logout")) and path.isprintable()
    return path if is_own and len(path) <= 2000 else ""
