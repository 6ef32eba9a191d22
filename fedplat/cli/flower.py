"""`fedplat flower`: run Flower apps."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from fedplat import errors, texts
from fedplat.admin.submission import Submission
from fedplat.cli import formats, jobs
from fedplat.cli.options import JsonOption, TimeoutOption
from fedplat.cli.output import Output
from fedplat.cli.session import FAILED, INTERRUPTED, own_timeout_s, reporting, session
from fedplat.command_line.with_typer import make_group
from fedplat.simulation.clients.fleet import MAX_CLIENTS
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.run_folder import RunFolderOptions

if TYPE_CHECKING:
    from fedplat.simulation.api import Run
    from fedplat.simulation.flower import MessageSetResult

_SERVER_ROUND = "server-round"
"""The metric with the round of a Flower strategy, which has two sets of messages: to train, and to evaluate."""
app = make_group("Run Flower apps unchanged.")


@app.callback()
def group() -> None:
    """Keep `run` a command of its own, while it is the only one."""


@app.command("run")
def run(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(metavar="APP_DIR", help="Folder of the Flower app, with its pyproject.toml.")
    ],
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", metavar="KEY=VALUE", help="Change a value of the app's run config; repeatable."),
    ] = None,
    num_clients: Annotated[
        int, typer.Option(min=0, max=MAX_CLIENTS, help="Number of clients; 0: the app's num-supernodes.")
    ] = 0,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of the run. Default: 0.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, max=4096, help="Number of processes for clients; 0: one per core.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Folder for the results. Default: runs/NAME.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the log lines of flwr.")] = False,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="HOST:PORT", help="Run the app as a job of this server, with real clients."),
    ] = None,
    population: Annotated[
        str | None,
        typer.Option("--population", metavar="NAME", help="With --server: population of clients. Default: the file's."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", "-f", help="With --server: watch the job until it ends.")
    ] = True,
    idempotency_key: Annotated[
        str, typer.Option(metavar="KEY", help="With --server: key of 8 to 200 characters, as of fedplat job submit.")
    ] = "",
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a Flower app with simulated clients, in virtual time, or as a job of a server (--server)."""
    if server is not None:
        given = {"--num-clients": num_clients, "--seed": seed, "--workers": workers, "--dir": output}
        _refuse_options(context, as_json, [name for name, value in given.items() if value], "with --server")
        with session(context, server, as_json, own_timeout_s(context, timeout)) as command:
            submitted = jobs.submit_and_report(
                command, _make_submission(folder, run_config or (), population), idempotency_key=idempotency_key
            )
            jobs.follow_if(command, submitted, follow=follow)
        return
    given = {"--population": population, "--idempotency-key": idempotency_key, "--timeout": timeout}
    _refuse_options(context, as_json, [name for name, value in given.items() if value], "without --server")
    with reporting(context, as_json) as out:
        from fedplat.simulation import flower

        options = flower.AppOptions(run_config or (), num_clients, seed, workers, verbose)
        read, file = flower.read(folder, options)
        run_folder = RunFolderOptions(output or folders.free(Path("runs") / file.job.name))
        if not out.as_json:
            count = file.simulation.fleet.num_clients
            out.note(
                f"{read.name}: {count:,} client{'s' * (count != 1)}, seed {file.simulation.seed}; {run_folder.folder}"
            )
        lines = _Lines(out)
        try:
            # What an app prints is not part of the result.
            with contextlib.redirect_stdout(sys.stderr):
                done = flower.execute(read, file, lines.add, run_folder, shows_logs=verbose)
        except KeyboardInterrupt as exc:
            out.note("stopped")
            raise typer.Exit(INTERRUPTED) from exc
        _print(out, done, run_folder.folder, lines)
        if done.result.problem:
            out.error(done.result.problem)
            raise typer.Exit(FAILED)


def _refuse_options(context: typer.Context, as_json: bool, names: list[str], where: str) -> None:
    if names:
        with reporting(context, as_json):
            raise errors.JobFileError(f"{', '.join(names)}: expected no such option {where}")


def _make_submission(folder: Path, run_config: Sequence[str], population: str | None) -> Submission:
    """Return the job of an app: the server runs the ServerApp that its operator has installed under the same name."""
    from fedplat.flower.app import read_app
    from fedplat.simulation import flower

    app = read_app(folder).with_run_config(run_config)
    file = flower.read_file(app, population=population, on_server=True)
    return Submission(file.job_text(), file.job, flower.make_initial())


class _Lines:
    """A line for each set of messages; none with JSON, except for failures of clients."""

    def __init__(self, out: Output) -> None:
        self.num_failures = 0
        self.metrics: dict[str, float] = {}
        """The last value of each metric."""
        self._out = out

    def add(self, sent: MessageSetResult) -> None:
        """Print a set of messages whose replies have arrived."""
        self.num_failures += len(sent.failures)
        self.metrics |= sent.metrics
        # The line of an abandoned attempt has the failure, too.
        if sent.failures and (self._out.as_json or sent.failures[0].partition(": ")[2] not in sent.problem):
            first = sent.failures[0]
            more = f", and {len(sent.failures) - 1} more" if len(sent.failures) > 1 else ""
            self._out.note(f"{_place(sent)}: {first}{more}")
        if self._out.as_json:
            return
        counts = [f"{sent.num_replies} of {sent.num_messages} replies"]
        counts += [f"{sent.num_late} late"] if sent.num_late else []
        counts += [f"{sent.num_failed} failed"] if sent.num_failed else []
        words = [f"{_place(sent):<15}", f"{sent.message_type:<8}", ", ".join(counts)]
        others = {name: value for name, value in sent.metrics.items() if name != _SERVER_ROUND}
        words += [sent.problem or formats.metrics(others, {})]
        self._out.note("  ".join(words).rstrip())


def _place(sent: MessageSetResult) -> str:
    """Return the round of the strategy, as the app counts them; of an app without one, that of the job."""
    number = sent.metrics.get(_SERVER_ROUND)
    return f"messages {sent.round}" if number is None else f"server-round {number:g}"


def _print(out: Output, run: Run, folder: Path, lines: _Lines) -> None:
    result, computed = run.result, run.computed
    if out.as_json:
        numbers = {key: value for key, value in run.to_dict().items() if key not in ("attempts", "simulation")}
        numbers |= {"metrics": folders.finite(lines.metrics), "output": str(folder)}
        out.json(json.loads(msgspec.json.encode(numbers)))
        return
    totals = result.totals
    fields = {
        "status": result.status,
        "virtual time": f"{formats.duration(totals.duration_s)} for {totals.rounds} sets of messages"
        + (f" and {texts.format_count(totals.abandoned, 'abandoned attempt')}" if totals.abandoned else ""),
        "replies": f"{totals.counts.get('MERGED', 0):,} of {totals.assigned:,}",
        "clients": f"{totals.distinct_clients:,} of {result.num_clients:,} received messages",
        "traffic": f"{formats.size(totals.bytes_down)} down, {formats.size(totals.bytes_up)} up",
    }
    if lines.metrics:
        fields["last metrics"] = formats.metrics(lines.metrics, {})
    fields["computed"] = f"in {formats.duration(computed.wall_s)}, {computed.updates_per_s:.3g} replies/s"
    fields["final model"] = (
        f"{folder / folders.MODEL}, {formats.size(run.model.schema.file_size_bytes)}"
        if run.model is not None
        else "none: the app has returned no arrays from a strategy's start()"
    )
    fields["results"] = str(folder)
    out.fields(fields)
