"""`fedplat simulate`: a job and its fleet on this machine, in virtual time."""

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
from fedplat.cli.session import INTERRUPTED, JsonOption, reporting
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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A simulation file (TOML): a job and [simulation].")],
    training: Annotated[
        bool | None,
        typer.Option("--training/--no-training", help="Train, or study scheduling alone.", show_default=False),
    ] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="auto, loop, processes, ray or vmap.")] = "",
    workers: Annotated[int | None, typer.Option(help="Processes that train; 0: as many as there are cores.")] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the file's simulation.seed.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Instead of the file's rounds.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change any key of the file; repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Where results go; else runs/NAME.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")] = False,
    plots: Annotated[
        bool | None, typer.Option("--plots/--no-plots", help="Draw pictures; else if matplotlib is there.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write event files for TensorBoard.")] = False,
    checkpoint_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds between two points that a run that was stopped can go on from.")
    ] = CHECKPOINT_S,
    show_data: Annotated[bool, typer.Option("--show-data", help="Show who has which data, and leave.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate a job and its fleet in virtual time, with the production coordinator."""
    with reporting(context, as_json) as out:
        chosen = _changes(training, engine, workers, seed, rounds) + (changes or [])
        read = read_file(file, chosen)
        if show_data:
            _show_data(out, read)
            return
        default = Path("runs") / read.job.name
        folder = output or (folders.latest(default) if resume else folders.free(default))
        keep = RunFolderOptions(folder, resume, tensorboard, checkpoint_s)
        try:
            run = _run(out, read, keep)
        except KeyboardInterrupt as exc:
            out.note(f"stopped; go on with: {_command(file, keep, chosen)}")
            raise typer.Exit(INTERRUPTED) from exc
        _draw(out, run, keep.folder, plots)
        _print(out, run, keep.folder)


def _changes(
    training: bool | None, engine: str, workers: int | None, seed: int | None, rounds: int | None
) -> list[str]:
    """Options that stand for keys."""
    named = {
        "rounds": rounds,
        "simulation.seed": seed,
        "simulation.engine": engine or None,
        "simulation.workers": workers,
        "simulation.training": None if training is None else str(training).lower(),
    }
    return [f"{key}={value}" for key, value in named.items() if value is not None]


def read_file(file: Path, changes: list[str]) -> SimulationFile:
    """Reads a simulation file, or a job file. Raises `JobFileError`, whose lines name the file."""
    try:
        return files.read(file, changes)
    except JobFileError as exc:
        raise JobFileError("\n".join(f"{file}: {line}" for line in str(exc).splitlines())) from exc


def _command(file: Path, keep: RunFolderOptions, changes: list[str]) -> str:
    """What goes on with a run."""
    words = ["fedplat", "simulate", str(file), "--resume", "--output", str(keep.folder)]
    for change in changes:
        words += ["--set", change]
    return shlex.join([*words, "--tensorboard"] if keep.tensorboard else words)


def _run(out: Output, file: SimulationFile, keep: RunFolderOptions) -> Run:
    board = progress.ProgressEstimate(file.job.name, file.job.rounds, file.simulation.target_metric, time.monotonic)
    tell: Callable[[str], object] = (lambda text: None) if out.as_json else out.note
    with wrap_errors("the training"), api.prepare(file, tell=tell) as setup:
        if not out.as_json:
            out.note(_introduction(file, setup.engine, setup.workers, setup.simulation.fleet.num_clients, keep))
        with progress.showing(out, board) as observe:
            return api.execute(file, setup, observe, keep, board.begin)


def _introduction(file: SimulationFile, engine: str, workers: int, num_clients: int, keep: RunFolderOptions) -> str:
    how = f"engine {engine}" + (f", {workers} workers" if workers > 1 else "") if workers else "no training"
    what = f"{file.job.name}: {file.job.rounds} rounds, {num_clients:,} clients, {file.job.selection.goal} reports each"
    return f"{what}; {how}, seed {file.simulation.seed}; {keep.folder}"


def _show_data(out: Output, file: SimulationFile) -> None:
    federation = load_data(file)
    if federation is None:
        raise JobFileError("simulation.data: there is no such table, and so no data to show")
    if out.as_json:
        out.json(data_report.facts(federation))
        return
    for line in data_report.lines(federation, shutil.get_terminal_size().columns):
        out.line(line)


def _draw(out: Output, run: Run, folder: Path, wanted: bool | None) -> None:
    if wanted is False:
        return
    try:
        run.plot(folder)
    except MissingExtraError as exc:
        if wanted:
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
        "clients": f"{totals.distinct_clients:,} of {result.num_clients:,} were assigned work",
        "traffic": f"{formats.size(totals.bytes_down)} down, {formats.size(totals.bytes_up)} up",
    }
    if summary.best is not None and summary.last is not None:
        fields[summary.metric] = (
            f"{summary.last.value:.4f} at the end, best {summary.best.value:.4f} in round {summary.best.round}"
        )
    if (scored := summary.federated) is not None:
        fields["on clients"] = (
            f"{summary.metric} {scored.value:.4f} on what they keep from training, round {scored.round}"
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
    if groups := [group for group in result.groups if abs(group.over - 1.0) > 0.05]:
        groups.sort(key=lambda group: -abs(group.over - 1.0))
        shown = (f"{group.name} has {group.over:.2f} of its share" for group in groups[:NUM_GROUPS])
        fields["participation"] = ", ".join(shown)
    fields["computed"] = f"in {formats.duration(computed.wall_s)}, {computed.updates_per_s:.3g} client updates/s"
    fields["results"] = str(folder)
    out.fields(fields)
