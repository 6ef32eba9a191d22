"""The web app of the owner's page: signing in, pages, downloads and the forms."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import jinja2
import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from fedplat import errors
from fedplat.web import guard, rendering
from fedplat.web.sessions import BrowserSessions, Clock, Login
from fedplat.web.sign_in import LoginForm, SignIn
from fedplat_client import releases
from fedplat_client._consent import decisions
from fedplat_client._page import views
from fedplat_client._page.steward import Steward
from fedplat_client._page.views import FormError, NoPageError, OwnerVisit, StewardPage
from fedplat_client._state import released
from fedplat_client._state.approvals import Decision
from fedplat_client.errors import DataDirectoryInUseError

ASSETS = rendering.load_assets(
    {name: (rendering.STATIC_FOLDER / name,) for name in ("pages.js", "pages.css", "icon.svg")}
)
Form = Mapping[str, str]


@functools.cache
def _environment() -> jinja2.Environment:
    environment = rendering.make_environment("fedplat_client._page", ASSETS)
    filters: dict[str, Any] = environment.filters
    filters |= {"time": _show_time}
    return environment


def _show_time(text: str) -> str:
    """Return a time of the record or of a decision as an element; any other text as it is."""
    try:
        return rendering.moment(datetime.datetime.fromisoformat(text).timestamp())
    except ValueError:
        return text


@dataclasses.dataclass(frozen=True)
class _Frame:
    """What surrounds a page."""

    source_name: str
    is_signed_in: bool = False
    sections: tuple[tuple[str, str, str], ...] = ()
    badges: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])


class StewardApp:
    """The pages of one client's owner. `hosts` are the names under which browsers may reach it, without ports."""

    def __init__(self, login: Login[Steward], hosts: frozenset[str], port: int, clock: Clock = time.monotonic) -> None:
        sessions: BrowserSessions[Steward] = BrowserSessions(clock, owns_sources=login.owns_sources)
        self._signing = SignIn(login, sessions, f"__Host-fedplat-client-{port}", self._login_page)
        found = [rendering.asset_route(ASSETS), *self._signing.routes()]
        found += [Route(path, self._page(view)) for path, view in views.PAGES.items()]
        found += [
            Route("/left.csv", self._download(_write_csv, "text/csv", "released.csv")),
            Route("/report.md", self._download(views.download_markdown, "text/markdown", "report.md")),
            Route("/report.json", self._download(views.download_json, "application/json", "report.json")),
        ]
        found += [Route(path, self._act(action), methods=["POST"]) for path, action in ACTIONS.items()]
        self.app = Starlette(
            routes=found,
            middleware=[Middleware(guard.Guard, hosts=hosts)],
            exception_handlers={HTTPException: self._on_http_error},
        )

    def stop(self) -> None:
        """End all sessions."""
        self._signing.stop()

    def _login_page(self, form: LoginForm) -> str:
        return _render(StewardPage("login.html", "Sign in", {"form": form}), _Frame(self._signing.login.name))

    def _page(self, view: views.PageView) -> Callable[[Request], Awaitable[Response]]:
        def make(steward: Steward, request: Request) -> Response:
            try:
                with steward.lock:
                    page = view(_visit(steward, request))
            except Exception as exc:
                page = _describe_failure(exc)  # raises what is a mistake of this program again
            return _respond(page, steward)

        return self._serve(make)

    def _download(self, write: views.Download, media_type: str, name: str) -> Callable[[Request], Awaitable[Response]]:
        def make(steward: Steward, request: Request) -> Response:
            headers = {"Content-Disposition": f'attachment; filename="{name}"'}
            try:
                content = write(_visit(steward, request))
            except Exception as exc:
                return _respond(_describe_failure(exc), steward)
            return StreamingResponse(iter(content), media_type=f"{media_type}; charset=utf-8", headers=headers)

        return self._serve(make)

    def _serve(self, make: Callable[[Steward, Request], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            session = self._signing.find(request)
            if session is None:
                query = f"?{request.url.query}" if request.url.query else ""
                return self._signing.leave(request, request.url.path + query)
            return await run_in_threadpool(make, session.source, request)

        return serve

    def _act(self, action: Action) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            session = self._signing.find(request)
            if session is None:
                return self._signing.leave(request)
            form, steward = await guard.read_form(request), session.source

            def act() -> Response:
                try:
                    with steward.lock:
                        return RedirectResponse(action(_visit(steward, request), form), 303)
                except Exception as exc:
                    return _respond(_describe_failure(exc), steward)

            return await run_in_threadpool(act)

        return serve

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        session = self._signing.find(request)
        if error.status_code == 404 and session is not None:
            return await run_in_threadpool(_respond, _describe_failure(NoPageError()), session.source)
        return PlainTextResponse(f"{error.detail}\n", error.status_code, headers=error.headers)


def _visit(steward: Steward, request: Request) -> OwnerVisit:
    return OwnerVisit(steward, request.url.path, request.path_params, dict(request.query_params))


def _respond(page: StewardPage, steward: Steward) -> Response:
    return HTMLResponse(_render(page, _Frame(steward.name, True, views.MENU, _count_waiting(steward))), page.status)


def _count_waiting(steward: Steward) -> Mapping[str, int]:
    try:
        with steward.lock:
            offers = steward.list_offers()
    except (errors.FedplatError, OSError):
        return {}
    return {"waiting": sum(each.job is not None and each.standing.verdict == "ask" for each in offers)}


def _render(page: StewardPage, frame: _Frame) -> str:
    return _environment().get_template(page.template).render(page=page, frame=frame, **page.data)


def _write_csv(visit: OwnerVisit) -> Iterable[str]:
    return releases.write_csv(released.read(visit.steward.site.record))


def _describe_failure(error: Exception) -> StewardPage:
    """Return the page about a failure; raise the error itself if this program has a mistake."""
    if isinstance(error, NoPageError):
        return _fail(404, "Not found", "This address names no page here; use the menu.")
    if isinstance(error, FormError):
        return _fail(422, "Not done", str(error))
    if isinstance(error, OSError | msgspec.DecodeError | UnicodeDecodeError):
        return _fail(500, "The record cannot be read", f"{error}; move the file aside.")
    if isinstance(error, errors.FedplatError):
        return _fail(500, "Not possible", f"{str(error)[:1].upper()}{str(error)[1:]}.")
    raise error


def _fail(status: int, title: str, text: str) -> StewardPage:
    return StewardPage("failure.html", title, {"text": text}, status=status)


# --- the forms: each returns the address of the page to show next ---


def approve(visit: OwnerVisit, form: Form) -> str:
    """Approve a job."""

    def make(at: str) -> Decision:
        limits = {name: form.get(name, "").strip() for name in ("max_rounds", "until", "max_epsilon")}
        return decisions.approve(at, visit.steward.files.now().date(), **limits)

    return _decide(visit, form, make)


def reject(visit: OwnerVisit, form: Form) -> str:
    """Reject a job; the reason is for its operator."""
    reason = form.get("reason", "").strip()
    if not reason:
        raise FormError("Nothing was changed: a rejection needs a reason, which the operator of the job sees.")
    return _decide(visit, form, lambda at: decisions.refuse("rejected", at, reason))


def revoke(visit: OwnerVisit, form: Form) -> str:
    """Take an approval back."""
    return _decide(visit, form, lambda at: decisions.refuse("revoked", at, form.get("reason", "").strip()))


def _decide(visit: OwnerVisit, form: Form, make: Callable[[str], Decision]) -> str:
    """Store a decision, unless another one than the page has shown was made meanwhile, as in another window."""
    found = visit.steward.find(views.parse_digest(visit.names["digest"]))
    if found.job is None and found.decision is None:
        raise NoPageError
    if form.get("seen", "") != decisions.mark(found.decision):
        now = found.decision.verdict if found.decision is not None else "not decided"
        raise FormError(
            f"Nothing was changed: since this page was shown, another decision was made, and the job is {now} now. "
            "Open it again."
        )
    try:
        decision = make(decisions.now())
    except ValueError as exc:
        raise FormError(f"Nothing was changed: {exc}.") from exc
    visit.steward.decide(found.digest, decision)
    return f"/jobs/{found.digest}"


def refresh(visit: OwnerVisit, form: Form) -> str:
    """Get the offers of the server; a client that runs does so by itself."""
    with contextlib.suppress(DataDirectoryInUseError):
        visit.steward.fetch()
    return "/"


Action = Callable[[OwnerVisit, Form], str]
ACTIONS: Mapping[str, Action] = {
    "/jobs/{digest}/approve": approve,
    "/jobs/{digest}/reject": reject,
    "/jobs/{digest}/revoke": revoke,
    "/refresh": refresh,
}
