"""`fedplat job ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fedplat.admin import AdminClient
from fedplat.admin.patience import Patience
from fedplat.admin.submission import Submission, clone, submit
from fedplat.cli import following, formats, job_description, job_files, job_lists, job_result, lists
from fedplat.cli.options import JsonOption, ServerOption, TimeoutOption
from fedplat.cli.output import Output, to_record
from fedplat.cli.session import FAILED, WRONG_USAGE, CommandSession, JobArgument, own_timeout_s, reporting, session
from fedplat.command_line.with_typer import make_group
from fedplat.errors import FedplatError, JobFileError, MissingExtraError
from fedplat.job import JobSpec, calibrate, warnings
from fedplat.rounds.protocols.base import find_training
from fedplat.simulation.scenario import feasible
from fedplat.simulation.scenario import file as simulation_file
from fedplat.simulation.scenario import schema as job_schema
from fedplat.texts import format_count
from fedplat.wire.v1 import admin_pb2

app = make_group("Submit, follow and control jobs.")

LARGE_BYTES = 10 * 2**30
"""Size of all versions of a job above which it should limit them."""
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Job file (TOML).")]
StartOption = Annotated[bool, typer.Option("--start/--no-start", help="Start the job, or leave it a draft.")]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Watch the job until it ends.")]
KeyOption = Annotated[
    str,
    typer.Option(
        "--idempotency-key",
        metavar="KEY",
        help="Key of 8 to 200 characters; submitting again with it returns the same job.",
    ),
]


@app.command("submit")
def submit_job(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    file: FileArgument,
    start: StartOption = True,
    follow: FollowOption = False,
    idempotency_key: KeyOption = "",
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
    following.print_state(command.output, job)
    return job


def follow_if(command: CommandSession, job: admin_pb2.Job, *, follow: bool) -> None:
    """Watch a job until it ends, or print how to."""
    if follow:
        following.watch_until_end(command, job)
    elif not command.output.as_json:
        command.output.note(f"watch it with: fedplat job watch {job.job_id}")


@app.command("clone")
def clone_job(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    job: JobArgument,
    start: StartOption = True,
    follow: FollowOption = False,
    idempotency_key: KeyOption = "",
    timeout: TimeoutOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a job once more, with the same job file and initial model.

    The model is version 0 of the job, so the server must still have it (retention.versions).
    """
    with session(context, server, as_json, own_timeout_s(context, timeout)) as command:
        with command.output.transfer("copying the model") as progress:
            cloned = clone(
                command.client,
                job,
                start=start,
                idempotency_key=idempotency_key,
                progress=progress,
                patience=command.patience,
            )
        following.print_state(command.output, cloned)
        follow_if(command, cloned, follow=follow)


@app.command("check")
def check_job(context: typer.Context, file: FileArgument, as_json: JsonOption = False) -> None:
    """Check a job file and its initial model without a server."""
    with reporting(context, as_json) as output:
        try:
            submission = _load(file)
            described = simulation_file.read(file)
            with simulation_file.naming(file):
                feasible.check_file(described)
            _calibrate(output, file, submission.spec)
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
                    "warnings": warnings(spec, submission.parameters),
                    "name": spec.name,
                    "num_rounds": spec.rounds,
                    "num_tensors": len(schema.tensors),
                    "model_size_bytes": schema.file_size_bytes,
                    "digest": submission.digest,
                    "disclosures": find_training(spec).list_disclosures(spec),
                }
            )
            return
        output.line(
            f"{file} is a valid job: {spec.name}, {format_count(spec.rounds, 'round')} for population "
            f"{spec.population}, {find_training(spec).describe_cohort(spec)}; "
            f"its model has {format_count(len(schema.tensors), 'tensor')} ({formats.size(schema.file_size_bytes)})"
        )
        output.line(f"digest of the file and the model: {submission.digest}")
        if disclosures := find_training(spec).list_disclosures(spec):
            output.line("what leaves each client:")
            for line in disclosures:
                output.line(f"  {line}")
        _warn(output, submission)


@app.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of job files, for editors: begin a file with `#:schema ./job.schema.json`."""
    typer.echo(job_schema.format_schema(), nl=False)


app.command("list", cls=lists.WatchableCommand)(job_lists.list_jobs)
app.command("show")(job_lists.show_job)
app.command("describe")(job_description.describe_job)
app.command("result")(job_result.show_result)
app.command("rounds", cls=lists.WatchableCommand)(job_lists.list_rounds)
app.command("assignments", cls=lists.WatchableCommand)(job_lists.list_assignments)
app.command("watch")(following.watch_job)
app.command("logs")(following.show_logs)
app.command("wait")(following.wait_for_job)


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


@app.command("delete")
def delete_job(
    context: typer.Context,
    job: JobArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a job that has ended, with its models, rounds and history, for good.

    What its clients have spent on private releases stays in the ledger of their population.
    """
    with session(context, server, as_json) as command:
        if not yes and (command.output.as_json or not sys.stdin.isatty()):
            raise typer.BadParameter("a job is deleted for good, and there is no terminal to confirm it: add --yes")
        found = command.client.show_job(job)
        kept = f"job {found.name} ({found.job_id}) with its {format_count(found.model.version + 1, 'version')}"
        if not yes and not typer.confirm(f"Delete {kept} for good?", err=True):
            raise typer.Exit(FAILED)
        done = command.client.delete(found.job_id)
        if command.output.as_json:
            command.output.json(to_record(done))
            return
        command.output.line(f"deleted {kept}; its files go within minutes")
        if done.num_releases:
            releases = format_count(done.num_releases, "private release")
            command.output.line(f"{releases} of it stay in the ledger of population {found.population}")


@app.command("set")
def set_job(
    context: typer.Context,
    job: JobArgument,
    changes: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="Key of [retention] or [retry], and its new value.")
    ],
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change how many files a job keeps, or when it gives up, such as retention.versions=5. It applies at once."""
    with session(context, server, as_json) as command:
        _control(command, lambda client, name: client.set_job(name, changes), job)
        if command.output.is_for_people:
            command.output.note(f"set {', '.join(changes)}")


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
        following.print_state(command.output, done.job)
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


def _calibrate(output: Output, file: Path, spec: JobSpec) -> None:
    """Raise `JobFileError` if the server could not calibrate the noise of a private job."""
    try:
        calibrate(spec)
    except MissingExtraError as exc:
        output.note(f"warning: whether the noise can be calibrated was not checked: {exc}")
    except JobFileError as exc:
        raise JobFileError(f"{file}: {exc}") from exc


def _load(file: Path, server_plugins: frozenset[tuple[str, str]] = frozenset()) -> Submission:
    with simulation_file.naming(file):
        return job_files.load(file, server_plugins)


def _warn(output: Output, submission: Submission) -> None:
    for warning in warnings(submission.spec, submission.parameters):
        output.note(f"warning: {warning}")
    total = submission.spec.rounds * submission.parameters.schema.file_size_bytes
    if not submission.spec.retention.versions and total > LARGE_BYTES:
        output.note(
            f"warning: retention.versions = 0: the {submission.spec.rounds:,} versions of the model need "
            f"{formats.size(total)} of the server's disk; set the number of versions to keep, such as 20"
        )


def _control(command: CommandSession, change: Callable[[AdminClient, str], admin_pb2.Job], job: str) -> None:
    following.print_state(command.output, change(command.client, job))
