"""The web app: sessions, pages, live updates and actions, on any `PageSource`."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from fedplat import errors
from fedplat.dashboard import live, routes
from fedplat.dashboard.rendering import ASSETS, Frame, Page, Renderer, format_event, format_signal
from fedplat.dashboard.routes import Action, SignedOutError, describe_failure
from fedplat.dashboard.source import NotFoundError, PageSource, Visit
from fedplat.web import guard
from fedplat.web.rendering import asset_route
from fedplat.web.sessions import BrowserSession, BrowserSessions, Clock, Login
from fedplat.web.sign_in import LoginForm, SignIn
from fedplat.wire.v1 import admin_pb2

COOKIE = "__Host-fedplat-session"
RENDER_EVERY_S = 0.25
"""Minimum interval between updates of a page."""


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

    def __init__(self, login: Login[PageSource], hosts: frozenset[str], clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.sessions: BrowserSessions[PageSource] = BrowserSessions(clock, owns_sources=login.owns_sources)
        self.signing = SignIn(login, self.sessions, COOKIE, self._login_page)
        self.updates = live.LiveUpdates()
        self._renderer = Renderer()
        self._rendered: dict[tuple[BrowserSession[PageSource], str], _Rendered] = {}
        self._locks: dict[tuple[BrowserSession[PageSource], str], asyncio.Lock] = {}
        self.app = Starlette(
            routes=self._routes(),
            middleware=[Middleware(guard.Guard, hosts=hosts)],
            exception_handlers={HTTPException: self._on_http_error},
        )

    def stop(self) -> None:
        """End all streams and sessions."""
        self.updates.stop()
        self.signing.stop()

    def _routes(self) -> list[Route]:
        found = [asset_route(ASSETS), *self.signing.routes()]
        for page in routes.PAGES:
            found.append(Route(page.path, self._page_endpoint(page.function)))
        for path, action in routes.ACTIONS.items():
            found.append(Route(path, self._action_endpoint(action), methods=["POST"]))
        return found

    def _login_page(self, form: LoginForm) -> str:
        page = Page("login.html", "Sign in", dataclasses.asdict(form), is_live=False)
        return self._renderer.page(page, Frame("/login", self.signing.login.name))

    def _page_endpoint(self, function: routes.PageFunction) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            session = self.signing.find(request, is_use="live" not in request.query_params)
            if session is None:
                if "live" in request.query_params:
                    return StreamingResponse(_once(format_signal("signed-out")), media_type="text/event-stream")
                return self.signing.leave(request, _address(request))
            if "live" in request.query_params:
                return self._stream(request, session, function)
            try:
                page, frame = await run_in_threadpool(self._fetch, session, request, function)
            except SignedOutError:
                return self.signing.leave(request, _address(request))
            content = await run_in_threadpool(self._renderer.page, page, frame)
            return HTMLResponse(content, page.status)

        return serve

    def _action_endpoint(self, action: Action) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            session = self.signing.find(request)
            if session is None:
                return self.signing.leave(request)
            form = await guard.read_form(request)

            def act() -> str:
                status = session.source.status()
                return action(_visit(session, status, request), form)

            try:
                return RedirectResponse(await run_in_threadpool(act), 303)
            except Exception as exc:
                try:
                    page = describe_failure(exc)
                except SignedOutError:
                    return self.signing.leave(request)
            frame = await run_in_threadpool(self._bare_frame, session, request)
            return HTMLResponse(self._renderer.page(page, frame), page.status)

        return serve

    def _fetch(
        self, session: BrowserSession[PageSource], request: Request, function: routes.PageFunction
    ) -> tuple[Page, Frame]:
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
        session = self.signing.find(request)
        if error.status_code == 404 and session is not None and not request.url.path.startswith("/static/"):
            frame = await run_in_threadpool(self._bare_frame, session, request)
            return HTMLResponse(self._renderer.page(describe_failure(NotFoundError()), frame), 404)
        return PlainTextResponse(f"{error.detail}\n", error.status_code, headers=error.headers)

    def _bare_frame(self, session: BrowserSession[PageSource], request: Request) -> Frame:
        """Return the frame of a page about a failure: the server may not answer."""
        try:
            status = session.source.status()
        except errors.FedplatError:
            status = None
        return self._frame(session, request, status)

    def _frame(
        self, session: BrowserSession[PageSource], request: Request, status: admin_pb2.GetStatusResponse | None
    ) -> Frame:
        source = session.source
        return Frame(
            address=_address(request),
            source_name=source.name,
            is_simulation=source.is_simulation,
            is_signed_in=True,
            status=status,
            sections=routes.list_sections(source, status.role if status is not None else ""),
        )

    def _stream(self, request: Request, session: BrowserSession[PageSource], function: routes.PageFunction) -> Response:
        async def events() -> AsyncIterator[bytes]:
            job = request.path_params.get("job", "")
            sent: dict[str, str] = {}
            opened = self._clock()
            with session.count_stream() as is_admitted:
                if not is_admitted:
                    return
                async with self.updates.listen(session, job) as listener:
                    while not self.updates.is_stopping:
                        if self.signing.find(request, is_use=False) is None:
                            yield format_signal("signed-out")
                            return
                        try:
                            parts = await self._parts(request, session, function, job, opened)
                        except SignedOutError:
                            self.signing.close(request)
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
        self,
        request: Request,
        session: BrowserSession[PageSource],
        function: routes.PageFunction,
        job: str,
        opened: float,
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


def _visit(session: BrowserSession[PageSource], status: admin_pb2.GetStatusResponse, request: Request) -> Visit:
    return Visit(session.source, status, request.url.path, request.path_params, dict(request.query_params))


def _address(request: Request) -> str:
    """Return the path and query of a page, without the parameter of its stream."""
    url = request.url.remove_query_params("live")
    return f"{url.path}?{url.query}" if url.query else url.path


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content
