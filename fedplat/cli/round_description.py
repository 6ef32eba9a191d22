"""`fedplat round describe`: one attempt with its funnel, and why clients did not contribute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from fedplat.admin.funnel import largest_loss, list_facts
from fedplat.cli import assignments, formats, funnel, watch
from fedplat.cli.output import Output, to_record
from fedplat.cli.session import CommandSession, FormatOption, JobArgument, JsonOption, ServerOption, session
from fedplat.texts import format_count
from fedplat.wire.v1 import admin_pb2

app = typer.Typer(no_args_is_help=True, help="Describe a round of a job.", rich_markup_mode=None)
NUM_ASSIGNMENTS = 10
NUM_LABELS = 40
_LOST = ("FAILED", "REJECTED", "LATE")


@app.callback()
def rounds() -> None:
    """Describe a round of a job. The rounds of a job are listed by: fedplat job rounds JOB."""


@app.command("describe")
def describe_round(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    job: JobArgument,
    round_: Annotated[int, typer.Argument(metavar="ROUND", min=1, max=2**32 - 1, help="Number of the round.")],
    attempt: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Attempt at the round. Default: the last.")
    ] = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Describe a round: its funnel, the reasons why clients did not contribute, and outcomes by label."""
    with session(context, server, as_json, form=form) as command:
        found = command.client.show_round(job, round_, attempt or 0)
        lost = _list_lost(command, job, found.round)
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
    output.table(funnel.COLUMNS, funnel.rows(attempt), "")
    if sentence := largest_loss(attempt):
        output.sentence(sentence)


def _list_lost(command: CommandSession, job: str, attempt: admin_pb2.Round) -> Sequence[admin_pb2.AssignmentDetails]:
    request = admin_pb2.ListAssignmentsRequest(
        job=job, round=attempt.round, attempt=attempt.attempt, states=_LOST, page_size=NUM_ASSIGNMENTS
    )
    return command.client.page(request).assignments[:NUM_ASSIGNMENTS]


def _print(
    output: Output,
    job: admin_pb2.Job,
    found: admin_pb2.RoundDetails,
    lost: Sequence[admin_pb2.AssignmentDetails],
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
        columns = [column for column in assignments.OF_JOB.select(False) if column.name not in ("#ROUND", "#TRY")]
        rows = [tuple(column.cell(one) for column in columns) for one in lost]
        output.table([column.name for column in columns], rows, "", folds=True)


def _reason(reason: admin_pb2.ReasonCount) -> tuple[str, ...]:
    text = reason.text + (f"; a client wrote: {reason.example}" if reason.example else "")
    return str(reason.count), reason.state, reason.reason or formats.NOTHING, text
