"""The actions of the forms. Each is one call of the server, which checks the role and writes the audit log.

An action returns the address of the page to show next. It raises `InputError` for a form with a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import quote

from fedplat import texts
from fedplat.dashboard.visit import NotFoundError, Visit, parse_number

Form = Mapping[str, str]
Action = Callable[[Visit, Form], str]


class InputError(Exception):
    """A form with a mistake; the message is for the person who filled it in."""


def start(visit: Visit, form: Form) -> str:
    """Start a job."""
    return _change(visit, "start")


def pause(visit: Visit, form: Form) -> str:
    """Pause a job."""
    return _change(visit, "pause")


def resume(visit: Visit, form: Form) -> str:
    """Resume a paused job."""
    return _change(visit, "resume")


def cancel(visit: Visit, form: Form) -> str:
    """Cancel a job, if the form has its name."""
    _check_name(form, visit.source.show_job(visit.names["job"]).name, "job")
    return _change(visit, "cancel")


def roll_back(visit: Visit, form: Form) -> str:
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
