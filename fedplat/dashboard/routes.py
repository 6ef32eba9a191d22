"""The addresses of the pages and of the actions, and the pages of failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import grpc

from fedplat.dashboard.pages import actions, clients, jobs, records, rounds
from fedplat.dashboard.pages.actions import InputError
from fedplat.dashboard.rendering import Page
from fedplat.dashboard.source import PageSource, refusal_code
from fedplat.dashboard.visit import NotFoundError, Visit
from fedplat.errors import FedplatError, ServerRefusedError, ServerUnreachableError

PageFunction = Callable[[Visit], Page]


@dataclasses.dataclass(frozen=True)
class PageRoute:
    """A page."""

    path: str
    function: PageFunction


@dataclasses.dataclass(frozen=True)
class MenuEntry:
    """An entry of the menu, for operators with at least this role."""

    section: str
    path: str
    title: str
    role: str = "viewer"
    for_simulations: bool = False


PAGES = (
    PageRoute("/", jobs.overview),
    PageRoute("/jobs", jobs.list_jobs),
    PageRoute("/jobs/{job}", jobs.show_job),
    PageRoute("/jobs/{job}/charts/{chart}", jobs.show_chart),
    PageRoute("/jobs/{job}/rounds", jobs.list_rounds),
    PageRoute("/jobs/{job}/rounds/{round}", rounds.show_round),
    PageRoute("/fleet", clients.show_fleet),
    PageRoute("/clients", clients.list_clients),
    PageRoute("/clients/{client}", clients.show_client),
    PageRoute("/privacy", records.show_privacy),
    PageRoute("/audit", records.list_audit),
    PageRoute("/enrollments", records.list_enrollments),
    PageRoute("/operators", records.list_operators),
    PageRoute("/alerts", records.list_alerts),
)
MENU = (
    MenuEntry("overview", "/", "Overview", for_simulations=True),
    MenuEntry("jobs", "/jobs", "Jobs", for_simulations=True),
    MenuEntry("fleet", "/fleet", "Fleet"),
    MenuEntry("privacy", "/privacy", "Privacy"),
    MenuEntry("alerts", "/alerts", "Alerts"),
    MenuEntry("audit", "/audit", "Audit log", "operator"),
    MenuEntry("enrollments", "/enrollments", "Enrollments", "operator"),
    MenuEntry("operators", "/operators", "Operators", "admin"),
)
ACTIONS: Mapping[str, actions.Action] = {
    "/jobs/{job}/start": actions.start,
    "/jobs/{job}/pause": actions.pause,
    "/jobs/{job}/resume": actions.resume,
    "/jobs/{job}/cancel": actions.cancel,
    "/jobs/{job}/rollback": actions.roll_back,
    "/clients/{client}/revoke": actions.revoke_client,
    "/enrollments/{enrollment}/revoke": actions.revoke_enrollment,
}
_RANKS = {"": 0, "viewer": 0, "operator": 1, "admin": 2}


def list_sections(source: PageSource, role: str) -> tuple[tuple[str, str, str], ...]:
    """Return the menu of an operator: section, address and title."""
    return tuple(
        (entry.section, entry.path, entry.title)
        for entry in MENU
        if (entry.for_simulations or not source.is_simulation) and _RANKS.get(role, 0) >= _RANKS[entry.role]
    )


_STATUSES = {
    grpc.StatusCode.PERMISSION_DENIED: (403, "Not allowed"),
    grpc.StatusCode.NOT_FOUND: (404, "Not found"),
    grpc.StatusCode.INVALID_ARGUMENT: (400, "Not valid"),
    grpc.StatusCode.FAILED_PRECONDITION: (409, "Not possible now"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "Not possible now"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "Too many requests"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "Not supported by this server"),
}


class SignedOutError(Exception):
    """The server no longer accepts the session's token: its operator was removed, or the token has expired."""


def describe_failure(error: Exception) -> Page:
    """Return the page about a failure. Raises `SignedOutError`, or the error itself if this program has a mistake."""
    if isinstance(error, ServerUnreachableError):
        return _page(503, "The server does not answer", str(error))
    if isinstance(error, ServerRefusedError):
        code = refusal_code(error)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            raise SignedOutError from error
        status, title = _STATUSES.get(code, (502, "The server refused the request")) if code else (502, "Refused")
        return _page(status, title, str(error))
    if isinstance(error, NotFoundError):
        return _page(404, "Not found", "this address names no page here; use the menu")
    if isinstance(error, InputError):
        return _page(422, "Not confirmed", str(error))
    if isinstance(error, FedplatError):
        return _page(500, "The data cannot be read", str(error))
    raise error


def _page(status: int, title: str, text: str) -> Page:
    sentence = f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "?")) else ".")
    return Page("failure.html", title, {"text": sentence, "is_away": status == 503}, status=status, is_live=False)
