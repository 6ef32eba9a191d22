"""The addresses of pages and actions, the actions of the forms, and the pages of failures.

An action returns the address of the page to show next. It raises `InputError` for a form with a mistake.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from urllib.parse import quote

import grpc

from fedplat import errors, texts
from fedplat.dashboard.pages import jobs, lists, rounds
from fedplat.dashboard.rendering import Page
from fedplat.dashboard.source import NotFoundError, PageSource, Visit, parse_number, refusal_code

Form = Mapping[str, str]
Action = Callable[[Visit, Form], str]


class InputError(Exception):
    """A form with a mistake; the message is for the person who filled it in."""


def start_job(visit: Visit, form: Form) -> str:
    """Start a job."""
    return _change(visit, "start")


def pause_job(visit: Visit, form: Form) -> str:
    """Pause a job."""
    return _change(visit, "pause")


def resume_job(visit: Visit, form: Form) -> str:
    """Resume a paused job."""
    return _change(visit, "resume")


def cancel_job(visit: Visit, form: Form) -> str:
    """Cancel a job, if the form has its name."""
    _check_name(form, visit.source.show_job(visit.names["job"]).name, "job")
    return _change(visit, "cancel")


def roll_back_job(visit: Visit, form: Form) -> str:
    """Make a job continue from an older version, if the form has its name."""
    job = visit.source.show_job(visit.names["job"])
    try:
        version = parse_number(form.get("version", "").strip())
    except NotFoundError as exc:
        raise InputError("The version is not a number; enter one of the versions of this job, such as 3.") from exc
    _check_name(form, job.name, "job")
    visit.server.rollback(visit.names["job"], version)
    return _job_address(visit)


def revoke_client(visit: Visit, form: Form) -> str:
    """Revoke a client, if the form has its id."""
    client = visit.names["client"]
    _check_name(form, client, "client")
    visit.server.revoke_client(client)
    return f"/clients/{quote(client, safe='')}"


def revoke_enrollment(visit: Visit, form: Form) -> str:
    """Revoke an enrollment token, if the form has its id; the clients that enrolled with it stay."""
    enrollment = visit.names["enrollment"]
    _check_name(form, enrollment, "enrollment")
    visit.server.revoke_enrollment(enrollment)
    return "/enrollments"


def _change(visit: Visit, action: str) -> str:
    visit.server.change_job(visit.names["job"], action)
    return _job_address(visit)


def _job_address(visit: Visit) -> str:
    return f"/jobs/{quote(visit.names['job'], safe='')}"


def _check_name(form: Form, expected: str, noun: str) -> None:
    entered = form.get("name", "").strip()
    if entered != expected:
        raise InputError(
            f"Nothing was changed: you entered {texts.quote(entered)}, but the {noun} is {texts.quote(expected)}. "
            "Enter exactly that to confirm."
        )


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
    PageRoute("/fleet", lists.show_fleet),
    PageRoute("/clients", lists.list_clients),
    PageRoute("/clients/{client}", lists.show_client),
    PageRoute("/privacy", lists.show_privacy),
    PageRoute("/audit", lists.list_audit),
    PageRoute("/enrollments", lists.list_enrollments),
    PageRoute("/operators", lists.list_operators),
    PageRoute("/alerts", lists.list_alerts),
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
ACTIONS: Mapping[str, Action] = {
    "/jobs/{job}/start": start_job,
    "/jobs/{job}/pause": pause_job,
    "/jobs/{job}/resume": resume_job,
    "/jobs/{job}/cancel": cancel_job,
    "/jobs/{job}/rollback": roll_back_job,
    "/clients/{client}/revoke": revoke_client,
    "/enrollments/{enrollment}/revoke": revoke_enrollment,
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
    if isinstance(error, errors.ServerUnreachableError):
        return _page(503, "The server does not answer", str(error))
    if isinstance(error, errors.ServerRefusedError):
        code = refusal_code(error)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            raise SignedOutError from error
        status, title = _STATUSES.get(code, (502, "The server refused the request")) if code else (502, "Refused")
        return _page(status, title, str(error))
    if isinstance(error, NotFoundError):
        return _page(404, "Not found", "this address names no page here; use the menu")
    if isinstance(error, InputError):
        return _page(422, "Not confirmed", str(error))
    if isinstance(error, errors.FedplatError):
        return _page(500, "The data cannot be read", str(error))
    raise error


def _page(status: int, title: str, text: str) -> Page:
    sentence = f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "?")) else ".")
    return Page("failure.html", title, {"text": sentence, "is_away": status == 503}, status=status, is_live=False)
