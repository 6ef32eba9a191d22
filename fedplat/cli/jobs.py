"""`fedplat job ...`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fedplat.admin import AdminClient
from fedplat.cli import formats, watch
from fedplat.cli.output import Output, to_record
from fedplat.cli.patience import Patience
from fedplat.cli.session import (
    FAILED,
    INTERRUPTED,
    WRONG_USAGE,
    CommandSession,
    JobArgument,
    JsonOption,
    LimitOption,
    ServerOption,
    TimeoutOption,
    own_timeout_s,
    reporting,
    session,
)
from fedplat.cli.submission import Submission, load, submit
from fedplat.codecs.container import options_to_text
from fedplat.errors import FedplatError, JobFileError, ServerUnreachableError
from fedplat.job import JobSpec, warnings
from fedplat.plugins import Plugins
from fedplat.toml import read_record, read_toml
from fedplat.wire.v1 import admin_pb2

app = typer.Typer(no_args_is_help=True, help="Submit, follow and control jobs.", rich_markup_mode=None)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Job file (TOML).")]


@app.command("submit")
def submit_job(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    file: FileArgument,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start the job, or leave it a draft.")] = True,
    follow: Annotated[bool, typer.Option("--watch", help="Watch the job until it ends.")] = False,
    idempotency_key: Annotated[
        str,
        typer.Option(metavar="KEY", help="Key of 8 to 200 characters; submitting again with it returns the same job."),
    ] = "",
    timeout: TimeoutOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a job: upload its initial model, create and start it."""
    with session(context, server, as_json, own_timeout_s(context, timeout)) as command:
        submission = _load_for(command.client, file, command.patience)
        job = submit_and_report(command, submission, start=start, idempotency_key=idempotency_key)
        follow_if(command, job, follow=follow)


def submit_and_report(
    command: CommandSession, submission: Submission, *, start: bool = True, idempotency_key: str = ""
) -> admin_pb2.Job:
    """Submit a job, and print its state and the warnings about it."""
    with command.output.transfer("uploading the model") as progress:
        job = submit(
            command.client,
            submission,
            start=start,
            idempotency_key=idempotency_key,
            progress=progress,
            patience=command.patience,
        )
    _warn(command.output, submission)
    _print_state(command.output, job)
    return job


def follow_if(command: CommandSession, job: admin_pb2.Job, *, follow: bool) -> None:
    """Watch a job until it ends, or print how to."""
    if follow:
        _watch(command, job)
    elif not command.output.as_json:
        command.output.note(f"watch it with: fedplat job watch {job.job_id}")


@app.command("check")
def check_job(context: typer.Context, file: FileArgument, as_json: JsonOption = False) -> None:
    """Check a job file and its initial model without a server."""
    with reporting(context, as_json) as output:
        try:
            submission = _load(file)
        except JobFileError as exc:
            if not output.as_json:
                raise
            output.json({"valid": False, "mistakes": str(exc).splitlines(), "warnings": []})
            raise typer.Exit(WRONG_USAGE) from exc
        spec, schema = submission.spec, submission.parameters.schema
        if output.as_json:
            output.json(
                {
                    "valid": True,
                    "mistakes": [],
                    "warnings": warnings(spec),
                    "name": spec.name,
                    "num_rounds": spec.rounds,
                    "num_tensors": len(schema.tensors),
                    "model_size_bytes": schema.file_size_bytes,
                }
            )
            return
        output.line(
            f"{file} is a valid job: {spec.name}, {spec.rounds} rounds for population {spec.population}, "
            f"{spec.selection.target} clients assigned and {spec.selection.goal} reports needed in each; "
            f"its model has {len(schema.tensors)} tensors ({formats.size(schema.file_size_bytes)})"
        )
        _warn(output, submission)


@app.command("list")
def list_jobs(
    context: typer.Context, limit: LimitOption = None, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """List jobs."""
    with session(context, server, as_json) as command:
        jobs = command.client.iter_jobs(limit)
        if command.output.as_json:
            command.output.records(jobs)
            return
        rows = (
            (
                job.job_id,
                job.name,
                job.population,
                formats.job_status(job.status),
                formats.rounds(job.round, job),
                formats.moment(job.created_unix_s),
                job.reason,
            )
            for job in jobs
        )
        columns = ("JOB", "NAME", "POPULATION", "STATUS", "#ROUND", "CREATED", "REASON")
        command.output.table(columns, rows, "no jobs yet; submit one with: fedplat job submit FILE")


@app.command("show")
def show_job(
    context: typer.Context, job: JobArgument, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Show a job."""
    with session(context, server, as_json) as command:
        found = command.client.show_job(job)
        if command.output.as_json:
            command.output.json(to_record(found))
            return
        fields = {
            "job": found.job_id,
            "name": found.name,
            "population": found.population,
            "status": formats.job_status(found.status) + (f" ({found.reason})" if found.reason else ""),
            "rounds": f"{found.round}{f' of {found.num_rounds}' if found.num_rounds else ''} committed",
            "model": _model(found),
            "updates": _encoding(found),
            "created": formats.moment(found.created_unix_s),
        }
        if found.plugins:
            fields["plugins"] = formats.plugins(found.plugins)
        if found.HasField("current"):
            fields["attempt"] = _sentence(found.current)
            if found.current.HasField("progress"):
                fields["progress"] = formats.progress(found.current.progress)
        command.output.fields(fields)


@app.command("rounds")
def list_rounds(
    context: typer.Context,
    job: JobArgument,
    all_attempts: Annotated[bool, typer.Option("--all", help="Include abandoned attempts.")] = False,
    limit: LimitOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List a job's rounds with participation, duration and metrics."""
    with session(context, server, as_json) as command:
        rounds = command.client.iter_rounds(job, limit, all_attempts=all_attempts)
        if command.output.as_json:
            command.output.records(rounds)
            return
        command.output.table(watch.ROUND_COLUMNS, map(watch.round_row, rounds), "no rounds yet")


@app.command("watch")
def watch_job(
    context: typer.Context,
    job: JobArgument,
    timeout: TimeoutOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a job until it ends.

    The exit status is 0 if the job is completed. Ctrl-C stops watching; the job continues.
    """
    with session(context, server, as_json, own_timeout_s(context, timeout)) as command:
        _watch(command, command.patience.run(command.client, lambda: command.client.show_job(job)))


@app.command("start")
def start_job(
    context: typer.Context, job: JobArgument, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Start a draft job."""
    with session(context, server, as_json) as command:
        _control(command, AdminClient.start, job)


@app.command("pause")
def pause_job(
    context: typer.Context, job: JobArgument, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Pause a running job. Its open attempt is abandoned."""
    with session(context, server, as_json) as command:
        _control(command, AdminClient.pause, job)


@app.command("resume")
def resume_job(
    context: typer.Context, job: JobArgument, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Resume a paused job."""
    with session(context, server, as_json) as command:
        _control(command, AdminClient.resume, job)


@app.command("cancel")
def cancel_job(
    context: typer.Context, job: JobArgument, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Cancel a job for good. Its models are kept."""
    with session(context, server, as_json) as command:
        _control(command, AdminClient.cancel, job)


_RULE_STATES = {
    "kept": "the aggregation rule continues with its state at that version",
    "initial": "the aggregation rule starts without state: that of the version is not kept (retention.states)",
    "latest": "the aggregation rule continues with its latest state, and the privacy budget is not charged",
}


@app.command("rollback")
def rollback_job(
    context: typer.Context,
    job: JobArgument,
    version: Annotated[
        int, typer.Argument(min=0, max=2**32 - 1, metavar="VERSION", help="Older version to continue from.")
    ],
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Roll back a job to an older version. Its open attempt is abandoned."""
    with session(context, server, as_json) as command:
        done = command.client.rollback(job, version)
        if command.output.as_json:
            command.output.json(to_record(done))
            return
        _print_state(command.output, done.job)
        state = _RULE_STATES.get(done.rule_state, "")
        command.output.line(
            f"version {done.job.model.version} has the bytes of version {version}" + (f"; {state}" if state else "")
        )


def _load_for(client: AdminClient, file: Path, patience: Patience) -> Submission:
    """Load a job file, which may name plugins that only the server has: then wait for the server."""
    try:
        return _load(file)
    except JobFileError as exc:
        if ": expected one of " not in str(exc):
            raise  # no mistake is a name that is not known
        try:
            found = frozenset((plugin.kind, plugin.name) for plugin in patience.run(client, client.status).plugins)
        except FedplatError as failure:
            raise JobFileError(
                f"{exc}\nthe server was not asked whether it has plugins of these names: {failure}"
            ) from exc
        if not found:
            raise
    return _load(file, found)


def _load(file: Path, server_plugins: frozenset[tuple[str, str]] = frozenset()) -> Submission:
    try:
        return load(file, server_plugins)
    except JobFileError as exc:
        raise JobFileError("\n".join(f"{file}: {line}" for line in str(exc).splitlines())) from exc


def _warn(output: Output, submission: Submission) -> None:
    for warning in warnings(submission.spec):
        output.note(f"warning: {warning}")


def _control(command: CommandSession, change: Callable[[AdminClient, str], admin_pb2.Job], job: str) -> None:
    _print_state(command.output, change(command.client, job))


def _print_state(output: Output, job: admin_pb2.Job) -> None:
    if output.as_json:
        output.json(to_record(job))
    else:
        reason = f": {job.reason}" if job.reason else ""
        output.line(f"job {job.name} ({job.job_id}) is {formats.job_status(job.status)}{reason}")


def _watch(command: CommandSession, job: admin_pb2.Job) -> None:
    try:
        with watch.view_for(command.output, job) as view:
            # The view has its own: on a terminal only the view can print below its live table.
            patience = Patience(command.patience.timeout_s, view.tell)
            ended = watch.follow(command.client, job.job_id, view, patience)
    except KeyboardInterrupt as exc:
        command.output.note(f"stopped watching; the job continues. Watch it again with: fedplat job watch {job.job_id}")
        raise typer.Exit(INTERRUPTED) from exc
    except ServerUnreachableError as exc:
        exc.add_note(f"the job continues. Watch it again with: fedplat job watch {job.job_id}")
        raise
    if not command.output.as_json:
        _print_state(command.output, ended)
    if ended.status != admin_pb2.JOB_STATUS_COMPLETED:
        raise typer.Exit(FAILED)


def _model(job: admin_pb2.Job) -> str:
    """Describe a job's latest model."""
    model = job.model
    text = f"version {model.version}, {formats.size(model.size_bytes)}, sha256 {model.digest}"
    return text + (f" (restored from version {job.restored_from})" if job.HasField("restored_from") else "")


def _encoding(job: admin_pb2.Job) -> str:
    """Describe the encoding of a job's updates; of the codec of a plugin only the name."""
    absent = frozenset((plugin.kind, plugin.name) for plugin in job.plugins)
    try:
        uplink = read_record(read_toml(job.job_file), JobSpec, plugins=Plugins(absent=absent)).compression.uplink
    except JobFileError:  # from a newer server
        return formats.NOTHING
    return "not compressed" if uplink is None else f"compressed with {options_to_text(uplink)}"


def _sentence(attempt: admin_pb2.Round) -> str:
    text = (
        f"round {attempt.round} attempt {attempt.attempt} {formats.attempt_phase(attempt.phase).lower()}: "
        f"{attempt.assigned} assigned, {attempt.reported} of {attempt.goal} reported, {attempt.late} late, "
        f"{attempt.failed} failed, {attempt.rejected} rejected"
    )
    if attempt.update_bytes and attempt.reported:
        mean = attempt.update_bytes / attempt.reported
        text += f", {formats.size(attempt.update_bytes)} received ({formats.size(mean)} per update)"
    if attempt.max_staleness:
        text += f", {attempt.mean_staleness:.2g} versions behind on average and {attempt.max_staleness} at most"
    return text + (f" ({attempt.reason})" if attempt.reason else "")
