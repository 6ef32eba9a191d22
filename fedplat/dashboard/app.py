"""The web app: sessions, pages, live updates and actions, on any `PageSource`."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from fedplat import errors, fair_places
from fedplat.dashboard import live, routes, sessions
from fedplat.dashboard.rendering import ASSETS, Frame, Page, Renderer, format_event, format_signal
from fedplat.dashboard.routes import Action, SignedOutError, describe_failure
from fedplat.dashboard.sessions import LONGEST_S, BrowserSession, BrowserSessions, Clock, Login, LoginError
from fedplat.dashboard.source import NotFoundError, Visit
from fedplat.wire.v1 import admin_pb2

COOKIE = "__Host-fedplat-session"
RENDER_EVERY_S = 0.25
"""Minimum interval between updates of a page."""
LOGIN_LIMITS = fair_places.PlaceLimits(total=24, per_network=24, waiting_per_network=64, wait_s=10.0)
"""Attempts to sign in: a token or a code has too many bits to be guessed, so these only bound the calls to the server.

The server delays at most 16 refusals of one caller at a time (`operator_access.MAX_PENDING`) and refuses further ones
at once. So wrong tokens hold 16 of these places, and valid ones find another.
"""
_MAX_FIELDS = 20
_YEAR_S = 31_536_000


@dataclasses.dataclass(frozen=True)
class _Rendered:
    """The live parts of a page, which all streams of a session for the same address share, and when they were made."""

    version: int
    began: float
    ended: float
    parts: Mapping[str, str]

    def is_for(self, version: int, opened: float, now: float) -> bool:
        """Return whether a stream that was `opened` then may send them: its page may be newer than they are."""
        return self.version == version and self.began >= opened and now - self.ended < RENDER_EVERY_S


class Dashboard:
    """The pages of one login. `app` is the ASGI app; `stop` ends its streams.

    `hosts` are the names under which browsers may reach it, without ports.
    """

    def __init__(self, login: Login, hosts: frozenset[str], clock: Clock = time.monotonic) -> None:
        self._login, self._clock = login, clock
        self.sessions = BrowserSessions(clock, owns_sources=login.owns_sources)
        self.updates = live.LiveUpdates()
        self._attempts = fair_places.FairPlaces(lambda: LOGIN_LIMITS)
        self._login_threads = ThreadPoolExecutor(LOGIN_LIMITS.total, thread_name_prefix="login")
        self._renderer = Renderer()
        self._rendered: dict[tuple[BrowserSession, str], _Rendered] = {}
        self._locks: dict[tuple[BrowserSession, str], asyncio.Lock] = {}
        self.app = Starlette(
            routes=self._routes(),
            middleware=[Middleware(sessions.Guard, hosts=hosts)],
            exception_handlers={HTTPException: self._on_http_error},
        )

    def stop(self) -> None:
        """End all streams and sessions."""
        self.updates.stop()
        self.sessions.close_all()
        self._login_threads.shutdown(wait=False, cancel_futures=True)

    def _routes(self) -> list[Route]:
        found = [
            Route("/static/{digest}/{name}", _serve_asset),
            Route("/login", self._show_login),
            Route("/login", self._sign_in, methods=["POST"]),
            Route("/logout", self._sign_out, methods=["POST"]),
        ]
        for page in routes.PAGES:
            found.append(Route(page.path, self._page_endpoint(page.function)))
        for path, action in routes.ACTIONS.items():
            found.append(Route(path, self._action_endpoint(action), methods=["POST"]))
        return found

    def _session(self, request: Request, *, is_use: bool = True) -> BrowserSession | None:
        return self.sessions.find(request.cookies.get(COOKIE, ""), is_use=is_use)

    async def _show_login(self, request: Request) -> Response:
        code = request.query_params.get("code", "")[:100] if self._login.field == "code" else ""
        return self._login_page(request.query_params.get("next", ""), code=code)

    def _login_page(self, next_path: str, problem: str = "", *, code: str = "", status: int = 200) -> Response:
        data = {"field": self._login.field, "problem": problem, "code": code, "next": _own_path(next_path)}
        page = Page("login.html", "Sign in", data, is_live=False)
        frame = Frame("/login", self._login.name)
        return HTMLResponse(self._renderer.page(page, frame), status)

    async def _sign_in(self, request: Request) -> Response:
        form = await _read_form(request)
        address = request.client.host if request.client is not None else ""
        next_path = form.get("next", "")
        secret = form.get(self._login.field, "").strip()
        try:
            async with self._attempts.place(fair_places.groups_of(address)):
                loop = asyncio.get_running_loop()
                source = await loop.run_in_executor(self._login_threads, self._login.sign_in, secret)
        except fair_places.PlacesFullError:
            problem = "Too many others are signing in; try again in a few seconds."
            response = self._login_page(next_path, problem, status=429)
            response.headers["Retry-After"] = "2"
            return response
        except LoginError as exc:
            session = self._session(request) if self._login.field == "code" else None
            if session is not None:  # the address with its code was opened again
                return RedirectResponse(_own_path(next_path) or session.source.home, 303)
            return self._login_page(next_path, str(exc), status=403)
        except errors.FedplatError as exc:
            return self._login_page(next_path, f"{str(exc)[:1].upper()}{str(exc)[1:]}.", status=503)
        self.sessions.close(request.cookies.get(COOKIE, ""))
        response = RedirectResponse(_own_path(next_path) or source.home, 303)
        session_id = self.sessions.open(source)
        response.set_cookie(
            COOKIE, session_id, max_age=int(LONGEST_S), secure=True, httponly=True, samesite="strict", path="/"
        )
        return response

    async def _sign_out(self, request: Request) -> Response:
        return self._to_login(request, "")

    def _to_login(self, request: Request, next_path: str) -> Response:
        """End the session and return to the login."""
        self.sessions.close(request.cookies.get(COOKIE, ""))
        path = "/login"
        if next_path not in ("", "/"):
            path = str(
                request.url_for("_show_login").include_query_params(next=next_path).replace(netloc="", scheme="")
            )
        response = RedirectResponse(path, 303)
        if COOKIE in request.cookies:
            response.delete_cookie(COOKIE, secure=True, httponly=True, samesite="strict", path="/")
        return response

    def _page_endpoint(self, function: routes.PageFunction) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            session = self._session(request, is_use="live" not in request.query_params)
            if session is None:
                if "live" in request.query_params:
                    return StreamingResponse(_once(format_signal("signed-out")), media_type="text/event-stream")
                return self._to_login(request, _address(request))
            if "live" in request.query_params:
                return self._stream(request, session, function)
            try:
                page, frame = await run_in_threadpool(self._fetch, session, request, function)
            except SignedOutError:
                return self._to_login(request, _address(request))
            content = await run_in_threadpool(self._renderer.page, page, frame)
            return HTMLResponse(content, page.status)

        return serve

    def _action_endpoint(self, action: Action) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            session = self._session(request)
            if session is None:
                return self._to_login(request, "/")
            form = await _read_form(request)

            def act() -> str:
                status = session.source.status()
                return action(_visit(session, status, request), form)

            try:
                return RedirectResponse(await run_in_threadpool(act), 303)
            except Exception as exc:
                try:
                    page = describe_failure(exc)
                except SignedOutError:
                    return self._to_login(request, "/")
            frame = await run_in_threadpool(self._bare_frame, session, request)
            return HTMLResponse(self._renderer.page(page, frame), page.status)

        return serve

    def _fetch(self, session: BrowserSession, request: Request, function: routes.PageFunction) -> tuple[Page, Frame]:
        """Return a page with its frame; a page about the failure if it cannot be made. Raises `SignedOutError`."""
        try:
            status = session.source.status()
            visit = _visit(session, status, request)
            return function(visit), self._frame(session, request, status)
        except Exception as exc:
            page = describe_failure(exc)  # raises what is a mistake of this program again
        return page, self._bare_frame(session, request)

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        session = self._session(request)
        if error.status_code == 404 and session is not None and not request.url.path.startswith("/static/"):
            frame = await run_in_threadpool(self._bare_frame, session, request)
            return HTMLResponse(self._renderer.page(describe_failure(NotFoundError()), frame), 404)
        return PlainTextResponse(f"{error.detail}\n", error.status_code, headers=error.headers)

    def _bare_frame(self, session: BrowserSession, request: Request) -> Frame:
        """Return the frame of a page about a failure: the server may not answer."""
        try:
            status = session.source.status()
        except errors.FedplatError:
            status = None
        return self._frame(session, request, status)

    def _frame(self, session: BrowserSession, request: Request, status: admin_pb2.GetStatusResponse | None) -> Frame:
        source = session.source
        return Frame(
            address=_address(request),
            source_name=source.name,
            is_simulation=source.is_simulation,
            is_signed_in=True,
            status=status,
            sections=routes.list_sections(source, status.role if status is not None else ""),
        )

    def _stream(self, request: Request, session: BrowserSession, function: routes.PageFunction) -> Response:
        async def events() -> AsyncIterator[bytes]:
            job = request.path_params.get("job", "")
            sent: dict[str, str] = {}
            opened = self._clock()
            with session.count_stream() as is_admitted:
                if not is_admitted:
                    return
                async with self.updates.listen(session, job) as listener:
                    while not self.updates.is_stopping:
                        if self._session(request, is_use=False) is None:
                            yield format_signal("signed-out")
                            return
                        try:
                            parts = await self._parts(request, session, function, job, opened)
                        except SignedOutError:
                            self.sessions.close(request.cookies.get(COOKIE, ""))
                            yield format_signal("signed-out")
                            return
                        changed = {name: html for name, html in parts.items() if sent.get(name) != html}
                        sent.update(changed)
                        yield format_event(changed) if changed else b": still there\n\n"
                        await asyncio.sleep(RENDER_EVERY_S)
                        await listener.wait(live.TICK_S)

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    async def _parts(
        self, request: Request, session: BrowserSession, function: routes.PageFunction, job: str, opened: float
    ) -> Mapping[str, str]:
        """Return the live parts of a page, rendered once for all streams of the session that show it."""
        key = (session, _address(request))
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            version = self.updates.version(job)
            known = self._rendered.get(key)
            began = self._clock()
            if known is not None and known.is_for(version, opened, began):
                return known.parts

            def render() -> Mapping[str, str]:
                page, frame = self._fetch(session, request, function)
                if page.status != 200:
                    return {"live_banner": self._renderer.parts(page, frame)["live_banner"]}
                return self._renderer.parts(page, frame)

            parts = await run_in_threadpool(render)
            self._rendered[key] = _Rendered(version, began, self._clock(), parts)
        if not lock.locked():
            self._forget()
        return parts

    def _forget(self) -> None:
        """Keep the memory of the streams bounded: forget what is too old to be shared."""
        now = self._clock()
        for old in [key for key, each in self._rendered.items() if now - each.ended > 2 * live.TICK_S]:
            del self._rendered[old]
            self._locks.pop(old, None)


def _visit(session: BrowserSession, status: admin_pb2.GetStatusResponse, request: Request) -> Visit:
    return Visit(session.source, status, request.url.path, request.path_params, dict(request.query_params))


def _address(request: Request) -> str:
    """Return the path and query of a page, without the parameter of its stream."""
    url = request.url.remove_query_params("live")
    return f"{url.path}?{url.query}" if url.query else url.path


def _own_path(path: str) -> str:
    """Return a path of this site to continue at; empty if it could lead to another one."""
    is_own = path.startswith("/") and not path.startswith(("//", "/\\", "/login", "/logout")) and path.isprintable()
    return path if is_own and len(path) <= 2000 else ""


async def _read_form(request: Request) -> dict[str, str]:
    """Read an urlencoded form; the guard has bounded its size."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise HTTPException(415, "expected a form, application/x-www-form-urlencoded")
    body = await request.body()
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS))
    except ValueError as exc:  # also UnicodeDecodeError
        raise HTTPException(400, "the form is not valid") from exc


async def _serve_asset(request: Request) -> Response:
    asset = ASSETS.get(request.path_params["name"])
    if asset is None or asset.address != request.url.path:
        raise HTTPException(404, "there is no such file; reload the page")
    headers = {"Cache-Control": f"public, max-age={_YEAR_S}, immutable", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(asset.compressed, headers={**headers, "Content-Encoding": "gzip"}, media_type=asset.media_type)
    return Response(asset.content, headers=headers, media_type=asset.media_type)


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content
