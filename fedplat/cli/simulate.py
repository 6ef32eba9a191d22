"""`fedplat simulate`: a job and its fleet, simulated in virtual time."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from fedplat.cli import formats, progress
from fedplat.cli.output import Output
from fedplat.cli.session import FAILED, INTERRUPTED, JsonOption, reporting
from fedplat.errors import JobFileError, MissingExtraError
from fedplat.simulation import api
from fedplat.simulation.api import Run
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.report import data as data_report
from fedplat.simulation.run_folder import CHECKPOINT_S, RunFolderOptions
from fedplat.simulation.scenario import file as files
from fedplat.simulation.scenario.file import SimulationFile
from fedplat.simulation.setup import load_data
from fedplat.user_code import wrap_errors

NUM_GROUPS = 3


def simulate(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Simulation file (TOML): a job and [simulation].")],
    training: Annotated[
        bool | None,
        typer.Option("--training/--no-training", help="Train, or simulate scheduling only.", show_default=False),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="Engine: auto, loop, processes, ray, vmap or a plugin.")
    ] = "",
    workers: Annotated[int | None, typer.Option(help="Number of training processes; 0: one per core.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed to use instead of the file's simulation.seed.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds to use instead of the file's.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the file; repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Folder for the results. Default: runs/NAME.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the output folder.")] = False,
    plots: Annotated[
        bool | None, typer.Option("--plots/--no-plots", help="Draw plots. Default: if matplotlib is installed.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write event files for TensorBoard.")] = False,
    mlflow: Annotated[
        str,
        typer.Option("--mlflow", metavar="URI", help="Tracking server, database or folder of MLflow for the rounds."),
    ] = "",
    checkpoint_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds between checkpoints, from which a run can be resumed.")
    ] = CHECKPOINT_S,
    show_data: Annotated[
        bool, typer.Option("--show-data", help="Show how data is split over clients, and exit.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate a job and its fleet in virtual time."""
    with reporting(context, as_json) as out:
        chosen = _changes(training, engine, workers, seed, rounds) + (changes or [])
        read = read_file(file, chosen)
        if show_data:
            _show_data(out, read)
            return
        default = Path("runs") / read.job.name
        folder = output or (folders.latest(default) if resume else folders.free(default))
        run_folder = RunFolderOptions(folder, resume, tensorboard, checkpoint_s, mlflow=mlflow, warn=_warner(out))
        try:
            run = _run(out, read, run_folder)
        except KeyboardInterrupt as exc:
            out.note(f"stopped; resume with: {_command(file, run_folder, chosen)}")
            raise typer.Exit(INTERRUPTED) from exc
        _draw(out, run, run_folder.folder, plots)
        _print(out, run, run_folder.folder)
        if run.result.problem:
            out.error(f"{run.result.job} is not complete: {run.result.problem}")
            raise typer.Exit(FAILED)


def _changes(
    training: bool | None, engine: str, workers: int | None, seed: int | None, rounds: int | None
) -> list[str]:
    """Convert options to changes of the file's keys."""
    named = {
        "rounds": rounds,
        "simulation.seed": seed,
        "simulation.engine": engine or None,
        "simulation.workers": workers,
        "simulation.training": None if training is None else str(training).lower(),
    }
    return [f"{key}={value}" for key, value in named.items() if value is not None]


def read_file(file: Path, changes: list[str]) -> SimulationFile:
    """Read a simulation file or a job file. Raises `JobFileError`, with the file's name in each line."""
    try:
        return files.read(file, changes)
    except JobFileError as exc:
        raise JobFileError("\n".join(f"{file}: {line}" for line in str(exc).splitlines())) from exc


def _command(file: Path, run_folder: RunFolderOptions, changes: list[str]) -> str:
    """Return the command that resumes a run."""
    words = ["fedplat", "simulate", str(file), "--resume", "--output", str(run_folder.folder)]
    for change in changes:
        words += ["--set", change]
    words += ["--tensorboard"] if run_folder.tensorboard else []
    words += ["--mlflow", run_folder.mlflow] if run_folder.mlflow else []
    return shlex.join(words)


def _warner(out: Output) -> Callable[[str], object]:
    return lambda text: out.note(f"warning: {text}")


def _run(out: Output, file: SimulationFile, run_folder: RunFolderOptions) -> Run:
    board = progress.ProgressEstimate(file.job.name, file.job.rounds, file.simulation.target_metric, time.monotonic)
    on_progress: Callable[[str], object] = (lambda text: None) if out.as_json else out.note
    with wrap_errors("the training"), api.prepare(file, on_progress=on_progress) as setup:
        if not out.as_json:
            out.note(_introduction(file, setup.engine, setup.workers, setup.simulation.fleet.num_clients, run_folder))
        with progress.showing(out, board) as observe:
            return api.execute(file, setup, observe, run_folder, board.begin)


def _introduction(
    file: SimulationFile, engine: str, workers: int, num_clients: int, run_folder: RunFolderOptions
) -> str:
    how = f"engine {engine}" + (f", {workers} workers" if workers > 1 else "") if workers else "no training"
    what = f"{file.job.name}: {file.job.rounds} rounds, {num_clients:,} clients, {file.job.selection.goal} reports each"
    return f"{what}; {how}, seed {file.simulation.seed}; {run_folder.folder}"


def _show_data(out: Output, file: SimulationFile) -> None:
    federation = load_data(file)
    if federation is None:
        raise JobFileError("simulation.data: missing; expected a table that describes the data to show")
    if out.as_json:
        out.json(data_report.facts(federation))
        return
    for line in data_report.lines(federation, shutil.get_terminal_size().columns):
        out.line(line)


def _draw(out: Output, run: Run, folder: Path, plots: bool | None) -> None:
    if plots is False:
        return
    try:
        run.save_plots(folder)
    except MissingExtraError as exc:
        if plots:
            raise
        out.note(str(exc))


def _print(out: Output, run: Run, folder: Path) -> None:
    result, summary, computed = run.result, run.summary, run.computed
    if out.as_json:
        numbers = {key: value for key, value in run.to_dict().items() if key not in ("attempts", "simulation")}
        out.json(json.loads(msgspec.json.encode({**numbers, "output": str(folder)})))
        return
    totals = result.totals
    fields = {
        "status": result.status + (f" ({result.reason})" if result.reason else ""),
        "virtual time": f"{formats.duration(totals.duration_s)} for {totals.rounds} rounds"
        + (f" and {totals.abandoned} abandoned attempts" if totals.abandoned else ""),
        "assignments": f"{totals.assigned:,}: "
        + ", ".join(
            f"{count:,} {state.lower()}" for state, count in sorted(totals.counts.items(), key=lambda x: -x[1])
        ),
        "clients": f"{totals.distinct_clients:,} of {result.num_clients:,} were assigned",
        "traffic": f"{formats.size(totals.bytes_down)} down, {formats.size(totals.bytes_up)} up",
    }
    if summary.best is not None and summary.last is not None:
        fields[summary.metric] = (
            f"{summary.last.value:.4f} at the end, best {summary.best.value:.4f} in round {summary.best.round}"
        )
    if (scored := summary.federated) is not None:
        fields["on clients"] = (
            f"{summary.metric} {scored.value:.4f} on data held out from their training, round {scored.round}"
        )
    if summary.target:
        fields[f"{summary.metric} {summary.target:g}"] = (
            "not reached"
            if summary.rounds_to_target is None or summary.seconds_to_target is None
            else f"after {summary.rounds_to_target:.1f} rounds, {formats.duration(summary.seconds_to_target)}"
        )
    if (cost := run.privacy) is not None:
        fields["privacy"] = (
            f"epsilon {cost.epsilon:.4g} at delta {cost.delta:g} for {cost.releases} releases, noise multiplier "
            f"{cost.noise_multiplier:g}"
        )
    if run.secure is not None:
        fields["secure sums"] = run.secure.describe()
    if groups := [group for group in result.groups if abs(group.over - 1.0) > 0.05]:
        groups.sort(key=lambda group: -abs(group.over - 1.0))
        shown = (f"{group.name} has {group.over:.2f} times its share" for group in groups[:NUM_GROUPS])
        fields["participation"] = ", ".join(shown)
    fields["computed"] = f"in {formats.duration(computed.wall_s)}, {computed.updates_per_s:.3g} client updates/s"
    fields["results"] = str(folder)
    out.fields(fields)
