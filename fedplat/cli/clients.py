"""`fedplat client ...`: lists of clients, and why jobs do not select one."""

from __future__ import annotations

import collections
import enum
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from fedplat.admin import AdminClient
from fedplat.cli import formats, job_lists, lists, round_description
from fedplat.cli.lists import LimitOption, WatchableCommand, WatchOption
from fedplat.cli.options import JsonOption, ServerOption
from fedplat.cli.output import ListColumn, ListLayout, to_record
from fedplat.cli.round_description import StateOption
from fedplat.cli.session import ClientArgument, CommandSession, FormatOption, session
from fedplat.command_line.with_typer import make_group
from fedplat.config import label_expressions
from fedplat.texts import duration, format_count
from fedplat.wire.v1 import admin_pb2

SILENT_S = 45.0
"""A busy client that was not seen for this time is silent: it has missed three heartbeats and more."""
NUM_ASSIGNMENTS, NUM_COUNTED, NUM_JOBS = 10, 50, 10


_NOT_KNOWN = "not known: it has not checked in since the server started"


def describe(command: CommandSession, client_id: str) -> None:
    """Print a description of a client."""
    output, admin = command.output, command.client
    client = admin.show_client(client_id)
    if output.as_json or not output.is_for_people:
        recent = _recent(admin, client_id)
        if output.as_json:
            output.json({"client": to_record(client), "assignments": [to_record(one) for one in recent.assignments]})
        else:
            output.line(client.client_id)
        return
    recent = _recent(admin, client_id)
    output.fields(describe_fields(client) | {"now": explain(client), "assignments": _summarize(recent)})
    if client.state != "revoked":
        jobs = _running_jobs(admin, client.population)
        output.heading("Running jobs of its population")
        rows = [(job.name, formats.rounds(job.round, job), explain_selection(client, job)) for job in jobs]
        output.table(("NAME", "#ROUND", "SELECTION"), rows, "no job is running, so no client is selected", folds=True)
    if recent.assignments:
        output.heading("Last assignments")
        output.rows(recent.assignments[:NUM_ASSIGNMENTS], round_description.OF_CLIENT, "", folds=True)


def describe_fields(client: admin_pb2.Client) -> dict[str, str]:
    """Return the fields of `fedplat client show`."""
    progress = f", {client.progress:.0%} done" if client.HasField("progress") else ""
    return {
        "client": client.client_id,
        "population": client.population,
        "state": client.state + (f" with job {client.job_id}{progress}" if client.job_id else ""),
        "last seen": formats.moment(client.last_seen_unix_s),
        "enrolled": formats.moment(client.enrolled_unix_s)
        + (f" with token {client.enrollment_id}" if client.enrollment_id else ""),
        "version": client.software_version or formats.NOTHING,
        "trainers": ", ".join(client.trainers) or _NOT_KNOWN,
        **({"evaluators": ", ".join(client.evaluators)} if client.evaluators else {}),
        "labels": formats.labels(client.labels) or "none",
    }


def describe_silence(client: admin_pb2.Client, now_s: float | None = None) -> str:
    """Return the time since a busy client's last message, as `, silent for 75 s`; empty if it is short."""
    silent_s = (time.time() if now_s is None else now_s) - client.last_seen_unix_s
    is_silent = client.state == "busy" and client.last_seen_unix_s and silent_s > SILENT_S
    return f", silent for {duration(silent_s)}" if is_silent else ""


def explain(client: admin_pb2.Client, now_s: float | None = None) -> str:
    """Return in a sentence what a client does now, and what an operator can do."""
    now = time.time() if now_s is None else now_s
    seen = client.last_seen_unix_s
    match client.state:
        case "waiting":
            return "it is connected and waits for work"
        case "busy":
            if describe_silence(client, now):
                last = formats.ago(seen, now)
                return f"it has work of job {client.job_id}, but was last seen {last}: it may have stopped"
            return f"it works for job {client.job_id}; it was seen {formats.ago(seen, now)}"
        case "away" if client.job_id:
            return (
                f"its trainer has not returned from a task of job {client.job_id} that has ended, so it takes no other "
                f"task; it was seen {formats.ago(seen, now)}. If the trainer hangs, restart its fedplat-client"
            )
        case "away":
            since = f"was seen {formats.ago(seen, now)}" if seen else "was not seen since the server started"
            return f"it is not connected; it {since}. Check that its fedplat-client runs and reaches the server"
        case "revoked":
            return (
                "an operator revoked it; the server refuses its requests; to take part again it must enroll as another "
                "client, with a new ticket and another data directory"
            )
        case _:  # from a newer server
            return client.state


def explain_selection(client: admin_pb2.Client, job: admin_pb2.Job) -> str:
    """Return why a running job does not select a client, or that it may."""
    spec = job_lists.read_spec(job)
    if spec is None:
        return "unknown: this version of fedplat cannot read the job file"
    where = spec.selection.where
    if not label_expressions.compile_expression(where)(client.labels):
        return f"never: the job selects clients with {where}, and its labels do not match"
    if client.job_id == job.job_id:
        return "selected now"
    if client.trainers and spec.trainer not in client.trainers:
        return f"never: it does not have the trainer {spec.trainer}, but {', '.join(client.trainers)}"
    condition = "" if client.trainers else f" if it has the trainer {spec.trainer}"
    text = f"eligible by its labels{condition}; a round takes {spec.selection.target}"
    if spec.selection.min_separation:
        text += f", and a client rests for {format_count(spec.selection.min_separation, 'round')} after each of its own"
    return text


def _running_jobs(admin: AdminClient, population: str) -> Sequence[admin_pb2.Job]:
    request = admin_pb2.ListJobsRequest(
        statuses=[admin_pb2.JOB_STATUS_RUNNING], population=population, newest_first=True, page_size=NUM_JOBS
    )
    return [admin.show_job(job.job_id) for job in admin.page(request).jobs[:NUM_JOBS]]


def _recent(admin: AdminClient, client_id: str) -> admin_pb2.ListAssignmentsResponse:
    request = admin_pb2.ListAssignmentsRequest(client_id=client_id, page_size=NUM_COUNTED)
    return admin.page(request)


def _summarize(recent: admin_pb2.ListAssignmentsResponse) -> str:
    """Count the states of the latest assignments, and name the most frequent reason of those that were lost."""
    found = recent.assignments
    if not found:
        return "none yet"
    states = collections.Counter(one.state for one in found)
    counted = ", ".join(f"{count} {state}" for state, count in states.most_common())
    total = f"the last {len(found)} of {recent.total:,}: " if recent.total > len(found) else ""
    reasons = collections.Counter(one.reason for one in found if one.reason)
    text = f"; most often because of {reasons.most_common(1)[0][0]}" if reasons else ""
    return total + counted + text


app = make_group("List, describe and revoke clients.")


class ClientStateChoice(enum.StrEnum):
    """A state of a client, as `Client.state` names it."""

    WAITING = "waiting"
    BUSY = "busy"
    AWAY = "away"
    REVOKED = "revoked"


LAYOUT = ListLayout[admin_pb2.Client](
    lambda client: client.client_id,
    (
        ListColumn("CLIENT", lambda client: client.client_id),
        ListColumn("POPULATION", lambda client: client.population),
        ListColumn("STATE", lambda client: _state(client)),
        ListColumn("JOB", lambda client: client.job_id or formats.NOTHING, is_wide=True),
        ListColumn("LAST SEEN", lambda client: formats.moment(client.last_seen_unix_s)),
        ListColumn("ENROLLED", lambda client: formats.moment(client.enrolled_unix_s), is_wide=True),
        ListColumn("ENROLLMENT", lambda client: client.enrollment_id or formats.NOTHING, is_wide=True),
        ListColumn("VERSION", lambda client: client.software_version or formats.NOTHING, is_wide=True),
        ListColumn("TRAINERS", lambda client: ", ".join(client.trainers) or formats.NOTHING, is_wide=True),
        ListColumn("LABELS", lambda client: formats.labels(client.labels)),
    ),
)


@app.command("list", cls=WatchableCommand)
def list_clients(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    population: Annotated[str, typer.Option(metavar="NAME", help="Only clients of this population.")] = "",
    state: Annotated[
        ClientStateChoice | None,
        typer.Option(case_sensitive=False, help="Only clients in this state.", show_default=False),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only clients with this label; repeatable.")
    ] = None,
    search: Annotated[str, typer.Option(metavar="TEXT", help="Only clients whose id contains this text.")] = "",
    limit: LimitOption = None,
    watch: WatchOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the enrolled clients."""
    labels = _parse_labels(label or [])
    filtered = bool(state or labels or search)
    with session(context, server, as_json, form=form) as command:
        query = lists.Query[admin_pb2.Client](
            command.client.page,
            admin_pb2.ListClientsRequest(
                population=population, state=state.value if state else "", labels=labels, search=search
            ),
            lambda page: page.clients,
            "no clients match" if filtered else "no clients are enrolled" + (f" in {population}" if population else ""),
        )
        lists.show(command, query, LAYOUT, limit, watch)


@app.command("show")
def show_client(
    context: typer.Context,
    client: ClientArgument,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a client."""
    with session(context, server, as_json, form=form) as command:
        found = command.client.show_client(client)
        command.output.show(found, found.client_id, lambda: describe_fields(found))


@app.command("describe")
def describe_client(
    context: typer.Context,
    client: ClientArgument,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Describe a client: its state and its assignments, and why jobs do not select it."""
    with session(context, server, as_json, form=form) as command:
        describe(command, client)


@app.command("assignments", cls=WatchableCommand)
def list_assignments(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    client: ClientArgument,
    state: StateOption = None,
    limit: LimitOption = None,
    watch: WatchOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the assignments of a client, the latest first."""
    request = admin_pb2.ListAssignmentsRequest(client_id=client, states=round_description.state_names(state))
    with session(context, server, as_json, form=form) as command:
        query = round_description.assignment_query(
            command.client, request, f"there are no such assignments of {client}"
        )
        lists.show(command, query, round_description.OF_CLIENT, limit, watch)


@app.command("revoke")
def revoke(
    context: typer.Context, client: ClientArgument, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Revoke a client for good.

    The server refuses its requests from now on. Its enrollment token stays valid; revoke it separately with
    fedplat enrollment revoke.
    """
    with session(context, server, as_json) as command:
        revoked = command.client.revoke_client(client)
        if command.output.as_json:
            command.output.json(to_record(revoked))
            return
        command.output.line(f"{revoked.client_id} is {revoked.state}")
        if revoked.enrollment_id:
            command.output.note(
                f"its enrollment token may still be valid; revoke it with: "
                f"fedplat enrollment revoke {revoked.enrollment_id}"
            )


def _parse_labels(pairs: list[str]) -> dict[str, str]:
    """Parse NAME=VALUE. Raises `typer.BadParameter`."""
    labels: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"--label {pair!r}: expected NAME=VALUE, such as region=eu")
        if labels.setdefault(name, value) != value:
            raise typer.BadParameter(f"--label {pair!r}: {name} has two values; a client has one value of each label")
    return labels


def _state(client: admin_pb2.Client) -> str:
    progress = f" {client.progress:.0%}" if client.HasField("progress") else ""
    return client.state + progress + describe_silence(client)
