"""`fedplat round describe`, and lists of assignments: one attempt, its funnel, and why clients did not contribute."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated

import typer

from fedplat.admin import AdminClient, descriptions
from fedplat.admin.descriptions import largest_loss, list_facts
from fedplat.cli import formats, lists, options, watch
from fedplat.cli.output import ListColumn, ListLayout, Output, to_record
from fedplat.cli.session import FormatOption, JobArgument, session
from fedplat.command_line.with_typer import make_group
from fedplat.texts import format_count
from fedplat.wire.v1 import admin_pb2

app = make_group("Describe a round of a job.")
NUM_ASSIGNMENTS = 10
NUM_LABELS = 40
_LOST = ("FAILED", "REJECTED", "LATE")


@app.callback()
def rounds() -> None:
    """Describe a round of a job. The rounds of a job are listed by: fedplat job rounds JOB."""


@app.command("describe")
@app.command("show", hidden=True)
def describe_round(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    job: JobArgument,
    round_: Annotated[int, typer.Argument(metavar="ROUND", min=1, max=2**32 - 1, help="Number of the round.")],
    attempt: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Attempt at the round. Default: the last.")
    ] = None,
    form: FormatOption = None,
    server: options.ServerOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Describe a round: its funnel, the reasons why clients did not contribute, and outcomes by label."""
    with session(context, server, as_json, form=form) as command:
        found = command.client.show_round(job, round_, attempt or 0)
        request = admin_pb2.ListAssignmentsRequest(
            job=job, round=found.round.round, attempt=found.round.attempt, states=_LOST, page_size=NUM_ASSIGNMENTS
        )
        lost = command.client.page(request).assignments[:NUM_ASSIGNMENTS]
        if command.output.as_json:
            command.output.json(to_record(found) | {"assignments": [to_record(one) for one in lost]})
        elif not command.output.is_for_people:
            command.output.line(str(found.round.round))
        else:
            _print(command.output, command.client.show_job(job), found, lost)


def print_reasons(output: Output, found: admin_pb2.RoundDetails) -> None:
    """Print why the clients of an attempt did not contribute, and its outcome by label."""
    if found.reasons:
        output.heading("Why clients did not contribute")
        columns = ("#CLIENTS", "STATE", "REASON", "MEANING")
        output.table(columns, [_reason(reason) for reason in found.reasons], "", folds=True)
    if found.labels:
        output.heading("By label")
        rows = [
            (count.name, count.value, str(count.assigned), str(count.reported), str(count.merged))
            for count in found.labels[:NUM_LABELS]
        ]
        output.table(("LABEL", "VALUE", "#ASSIGNED", "#REPORTED", "#MERGED"), rows, "")
        if len(found.labels) > NUM_LABELS:
            output.note(f"{NUM_LABELS} of {len(found.labels)} values of labels; all: --output json")


def print_funnel(output: Output, attempt: admin_pb2.Round) -> None:
    """Print the funnel of an attempt, and its largest loss as a sentence."""
    output.heading(f"Round {attempt.round}, attempt {attempt.attempt}: from checked in to merged")
    output.table(FUNNEL_COLUMNS, funnel_rows(attempt), "")
    if sentence := largest_loss(attempt):
        output.sentence(sentence)


def _print(
    output: Output, job: admin_pb2.Job, found: admin_pb2.RoundDetails, lost: Sequence[admin_pb2.AssignmentDetails]
) -> None:
    attempt = found.round
    phase = formats.attempt_phase(attempt.phase).lower()
    fields = {
        "job": f"{job.name} ({job.job_id})",
        "round": f"{formats.rounds(attempt.round, job)}, attempt {attempt.attempt} of {found.num_attempts}, "
        f"{formats.attempt_kind(attempt.kind, job)} from version {attempt.base_version}",
        "phase": phase + (f": {attempt.reason}" if attempt.reason else ""),
        "opened": formats.moment(attempt.opened_unix_s)
        + (f", took {formats.duration(attempt.seconds)}" if attempt.seconds else ""),
        "wanted": f"{format_count(attempt.target, 'client')} and {format_count(attempt.goal, 'report')}; "
        f"at least {format_count(attempt.minimum, 'report')}",
        "received": watch.format_update_size(attempt),
        "metrics": formats.metrics(attempt.client_metrics, attempt.server_metrics) or formats.NOTHING,
    }
    if attempt.HasField("progress"):
        fields["progress"] = formats.progress(attempt.progress)
    output.fields(fields | list_facts(attempt))
    print_funnel(output, attempt)
    print_reasons(output, found)
    if lost:
        output.heading("Assignments that were lost")
        columns = [column for column in OF_JOB.select(False) if column.name not in ("#ROUND", "#TRY")]
        rows = [tuple(column.cell(one) for column in columns) for one in lost]
        output.table([column.name for column in columns], rows, "", folds=True)


def _reason(reason: admin_pb2.ReasonCount) -> tuple[str, ...]:
    text = reason.text + (f"; a client wrote: {reason.example}" if reason.example else "")
    return str(reason.count), reason.state, reason.reason or formats.NOTHING, text


class AssignmentStateChoice(enum.StrEnum):
    """A state of an assignment, as `AssignmentDetails.state` names it."""

    TRAINING = "TRAINING"
    ADVERTISED = "ADVERTISED"
    SHARED = "SHARED"
    UPLOADING = "UPLOADING"
    REPORTED = "REPORTED"
    MERGED = "MERGED"
    LATE = "LATE"
    FAILED = "FAILED"
    REJECTED = "REJECTED"
    SURPLUS = "SURPLUS"
    DROPPED = "DROPPED"


StateOption = Annotated[
    list[AssignmentStateChoice] | None,
    typer.Option("--state", case_sensitive=False, help="Only assignments in this state; repeatable."),
]
_Details = admin_pb2.AssignmentDetails


def _time(details: _Details) -> str:
    if not details.ended_unix_s or not details.assigned_unix_s:
        return formats.NOTHING
    return formats.duration(details.ended_unix_s - details.assigned_unix_s)


def assignment_outcome(details: _Details) -> str:
    """Format why an assignment ended, or how far it is."""
    if details.HasField("progress"):
        return f"{details.progress:.0%} done"
    name = details.reason if details.reason != details.state else ""
    reason = ": ".join(part for part in (name, details.text) if part)
    if details.into_round and (details.into_round, details.into_attempt) != (details.round, details.attempt):
        reason = f"merged in round {details.into_round}" + (f"; {reason}" if reason else "")
    return reason


def _optional(details: _Details, field: str) -> str:
    return f"{getattr(details, field):.4g}" if details.HasField(field) else formats.NOTHING  # pyright: ignore[reportArgumentType]


_COMMON: Sequence[ListColumn[_Details]] = (
    ListColumn("#ROUND", lambda one: str(one.round)),
    ListColumn("#TRY", lambda one: str(one.attempt)),
    ListColumn("KIND", lambda one: formats.attempt_kind(one.kind), is_wide=True),
    ListColumn("STATE", lambda one: one.state),
    ListColumn("ASSIGNED", lambda one: formats.moment(one.assigned_unix_s)),
    ListColumn("DOWNLOADED", lambda one: formats.moment(one.downloaded_unix_s), is_wide=True),
    ListColumn("UPLOADING", lambda one: formats.moment(one.uploading_unix_s), is_wide=True),
    ListColumn("#TIME", _time),
    ListColumn("#BASE", lambda one: str(one.base_version), is_wide=True),
    ListColumn("#RECEIVED", lambda one: formats.size(one.update_bytes) if one.update_bytes else "-", is_wide=True),
    ListColumn("#EXAMPLES", lambda one: _optional(one, "num_examples"), is_wide=True),
    ListColumn("#NORM", lambda one: _optional(one, "norm"), is_wide=True),
    ListColumn("#STALE", lambda one: _optional(one, "staleness"), is_wide=True),
    ListColumn("METRICS", lambda one: formats.metrics(one.metrics, {}), is_wide=True),
    ListColumn("REASON", assignment_outcome),
)
OF_JOB = ListLayout[_Details](lambda one: one.client_id, (ListColumn("CLIENT", lambda one: one.client_id), *_COMMON))
OF_CLIENT = ListLayout[_Details](
    lambda one: one.job_id,
    (ListColumn("JOB", lambda one: one.job_id, is_wide=True), ListColumn("NAME", lambda one: one.job_name), *_COMMON),
)


def state_names(states: Sequence[AssignmentStateChoice] | None) -> list[str]:
    """Return the names of the states that an option was given with."""
    return [state.value for state in states or ()]


def assignment_query(
    client: AdminClient, request: admin_pb2.ListAssignmentsRequest, empty: str
) -> lists.Query[_Details]:
    """Return the query of a list of assignments. The server sends the latest attempt first."""
    return lists.Query(client.page, request, lambda page: page.assignments, empty)


FUNNEL_COLUMNS = ("STAGE", "#CLIENTS", "#LOST", "")
_BAR_WIDTH = 30


def funnel_rows(attempt: admin_pb2.Round) -> list[tuple[str, ...]]:
    """Return the cells of `COLUMNS` for each stage."""
    found = descriptions.funnel_stages(attempt)
    largest = max((stage.count or 0 for stage in found), default=0)
    cells: list[tuple[str, ...]] = []
    before: int | None = None
    for at, stage in enumerate(found):
        lost = (
            before - stage.count
            if before is not None and stage.count is not None and at > descriptions.FIRST_OF_COHORT
            else 0
        )
        bar = "#" * round(_BAR_WIDTH * (stage.count or 0) / largest) if largest else ""
        shown = formats.NOTHING if stage.count is None else f"{stage.count:,}"
        cells.append((stage.name, shown, f"-{lost:,}" if lost > 0 else "", bar))
        before = stage.count if stage.count is not None else before
    return cells
