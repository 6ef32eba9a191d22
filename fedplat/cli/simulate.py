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

from fedplat import errors, texts
from fedplat.cli import options, progress, session
from fedplat.cli.output import Output
from fedplat.config.user_code import wrap_errors
from fedplat.simulation import api
from fedplat.simulation.api import Run
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.report import data as data_report
from fedplat.simulation.run_folder import CHECKPOINT_S, RunFolderOptions
from fedplat.simulation.scenario import file as files
from fedplat.simulation.scenario.file import SimulationFile
from fedplat.simulation.setup import load_data


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
    as_json: options.JsonOption = False,
) -> None:
    """Simulate a job and its fleet in virtual time."""
    with session.reporting(context, as_json) as out:
        chosen = _changes(training, engine, workers, seed, rounds) + (changes or [])
        read = files.read(file, chosen)
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
            raise typer.Exit(session.INTERRUPTED) from exc
        _draw(out, run, run_folder.folder, plots)
        _print(out, run, run_folder.folder)
        if run.result.problem:
            out.error(f"{run.result.job} is not complete: {run.result.problem}")
            raise typer.Exit(session.FAILED)


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
    counts = ((file.job.rounds, "round"), (num_clients, "client"), (file.job.selection.goal, "report"))
    what = f"{file.job.name}: {', '.join(texts.format_count(number, noun) for number, noun in counts)} each"
    return f"{what}; {how}, seed {file.simulation.seed}; {run_folder.folder}"


def _show_data(out: Output, file: SimulationFile) -> None:
    federation = load_data(file)
    if federation is None:
        raise errors.JobFileError("simulation.data: missing; expected a table that describes the data to show")
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
    except errors.MissingExtraError as exc:
        if plots:
            raise
        out.note(str(exc))


def _print(out: Output, run: Run, folder: Path) -> None:
    if out.as_json:
        numbers = {key: value for key, value in run.to_dict().items() if key not in ("attempts", "simulation")}
        out.json(json.loads(msgspec.json.encode({**numbers, "output": str(folder)})))
        return
    out.fields(run.describe() | {"results": str(folder)})
