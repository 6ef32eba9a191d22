"""`fedplat simulate` and `fedplat privacy audit`, which simulate a job, and the progress that they show."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedplat import errors, texts
from fedplat.cli import formats, options, output, session
from fedplat.cli.output import Output
from fedplat.config.user_code import wrap_errors
from fedplat.errors import JobFileError
from fedplat.job import planning
from fedplat.simulation import api, privacy_audit
from fedplat.simulation import privacy_audit as audits
from fedplat.simulation.api import Run
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.report import data as data_report
from fedplat.simulation.report.progress import Clock, ProgressEstimate
from fedplat.simulation.run_folder import CHECKPOINT_S, RunFolderOptions
from fedplat.simulation.scenario import file as files
from fedplat.simulation.scenario.file import TABLE, SimulationFile
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
        Path | None, typer.Option("--dir", metavar="DIR", help="Folder for the results. Default: runs/NAME.")
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
    checkpoint_s: options.CheckpointOption = CHECKPOINT_S,
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
            is_begun = (folder / folders.RUN).exists()
            out.note(
                f"stopped; resume with: {_command(file, run_folder, chosen)}"
                if is_begun
                else "stopped before the run began; there is nothing to resume"
            )
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
    words = ["fedplat", "simulate", str(file), "--resume", "--dir", str(run_folder.folder)]
    for change in changes:
        words += ["--set", change]
    words += ["--tensorboard"] if run_folder.tensorboard else []
    words += ["--mlflow", run_folder.mlflow] if run_folder.mlflow else []
    return shlex.join(words)


def _warner(out: Output) -> Callable[[str], object]:
    return lambda text: out.note(f"warning: {text}")


def _run(out: Output, file: SimulationFile, run_folder: RunFolderOptions) -> Run:
    board = ProgressEstimate(file.job.name, file.job.rounds, file.simulation.target_metric, time.monotonic)
    on_progress: Callable[[str], object] = (lambda text: None) if out.as_json else out.note
    with wrap_errors("the training"), api.prepare(file, on_progress=on_progress) as setup:
        if not out.as_json:
            out.note(_introduction(file, setup.engine, setup.workers, setup.simulation.fleet.num_clients, run_folder))
        with showing(out, board) as observe:
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
    fields = run.describe()
    if run.result.problem:  # the error line has the reason
        fields["status"] = run.result.status
    if run.outcome is not None:
        fields["procedure"] = str(folder / folders.OUTCOME)
    out.fields(fields | {"results": str(folder)})


FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds between lines without a terminal: the pauses grow, so that a log of hours stays short."""
_PAUSE_GROWTH = 1.2
_NAME_WIDTH, _BAR_WIDTH = 24, 12
_BAR_FROM_WIDTH = 70
"""A narrower terminal has no room for the bar."""
Event = TypeVar("Event")


def showing(
    output: Output, board: ProgressEstimate
) -> contextlib.AbstractContextManager[Callable[[AttemptResult], None]]:
    """Show progress on stderr, or nothing with JSON; yield the callback for ended attempts."""
    return show_live(output, board.add, lambda: draw_progress(board, output), lambda: _lines(output, board))


@contextlib.contextmanager
def show_live(
    output: Output,
    add: Callable[[Event], None],
    render: Callable[[], Group],
    make_lines: Callable[[], Callable[[Event], None]],
) -> Generator[Callable[[Event], None]]:
    """Show a live picture on a terminal, nothing with JSON, and otherwise lines; yield the callback for events.

    `add` adds an event to what `render` draws; `make_lines` returns a callback that adds it and prints lines.
    """
    if output.as_json:
        yield add
    elif output.messages.is_terminal and not output.messages.is_dumb_terminal:
        with Live(console=output.messages, refresh_per_second=4, get_renderable=render):
            yield add
    else:
        yield make_lines()


def draw_progress(board: ProgressEstimate, output: Output) -> Group:
    """Render the progress as one line that fits the terminal: a bar, and as many numbers as there is room for."""
    width = output.messages.width - 1
    name = formats.printable(board.name)
    if cell_len(name) > _NAME_WIDTH:
        name = set_cell_size(name, _NAME_WIDTH - 3).rstrip() + "..."
    rounds = f"{board.round}/{board.num_rounds}"
    cells: list[Text | ProgressBar] = [Text(name, style="bold"), Text(rounds)]
    used = cell_len(name) + len(rounds) + 2 * 2
    if width >= _BAR_FROM_WIDTH:
        done = min(board.round, board.num_rounds)
        cells.insert(1, ProgressBar(total=max(1, board.num_rounds), completed=done, width=_BAR_WIDTH))
        used += _BAR_WIDTH + 2
    line = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(len(cells) + 1):
        line.add_column(no_wrap=True)
    line.add_row(*cells, Text("  ".join(fit(show_numbers(board), width - used)), overflow="ellipsis"))
    return Group(line)


def show_numbers(board: ProgressEstimate) -> list[tuple[int, str]]:
    """Return the numbers of the line in their order, each with its rank: 0 for the most important one."""
    found = [(0, f"{name} {value:.4g}") for name, value in board.score.items()]
    if board.best is not None:
        found.append((3, f"best {board.best:.4g}"))
    found.append((2, f"{board.speed():.3g} clients/s"))
    if math.isfinite(board.left_s()) and board.round < board.num_rounds:
        found.append((1, f"{formats.duration(board.left_s())} left"))
    else:
        found.append((1, f"{formats.duration(board.elapsed_s())} so far"))
    if lost := board.late + board.failed:
        found.append((4, f"{lost:,} lost"))
    found.append((5, f"virtual {formats.duration(board.now_s)}"))
    return found


def fit(ranked: Sequence[tuple[int, str]], width: int) -> list[str]:
    """Return the texts that fit a width when they are joined by two spaces, dropping the least important ones."""
    kept = list(ranked)
    while kept and sum(cell_len(text) + 2 for _, text in kept) - 2 > width:
        kept.remove(max(kept))
    return [text for _, text in kept]


def _lines(output: Output, board: ProgressEstimate, clock: Clock = time.monotonic) -> Callable[[AttemptResult], None]:
    """Print a line for the last round, and for others after a pause that grows from line to line."""
    due_at, pause_s = -math.inf, FIRST_PAUSE_S

    def add(record: AttemptResult) -> None:
        nonlocal due_at, pause_s
        board.add(record)
        now = clock()
        if now >= due_at or (board.round >= board.num_rounds and record.kind == "TRAIN"):
            due_at, pause_s = now + pause_s, min(LONGEST_PAUSE_S, pause_s * _PAUSE_GROWTH)
            output.note(board.sentence())

    return add


def audit(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Simulation file (TOML) of a private job.")],
    canaries: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of clients that are canaries; 0: half of them.")
    ] = 0,
    confidence: Annotated[float, typer.Option(help="Confidence of the lower bound, from 0.5 to below 1.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Seed to use instead of the file's simulation.seed.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the file; repeatable.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Audit a private job with canaries in a simulation.

    Computes a lower bound of the job's epsilon. The exit status is 1 if the bound is above the job's claim.
    """
    with session.reporting(context, as_json) as out:
        if not 0.5 <= confidence < 1.0:
            raise JobFileError(f"--confidence {confidence:g}: expected from 0.5 to below 1")
        read = files.read(file, (changes or []) + ([] if seed is None else [f"simulation.seed={seed}"]))
        found = _run_audit(out, read, canaries, confidence)
        if out.as_json:
            out.json(folders.finite({**msgspec.to_builtins(found), "holds": found.holds}))
        else:
            _print_audit(out, read, found)
        if not found.holds:
            raise typer.Exit(session.FAILED)


def _run_audit(out: output.Output, file: SimulationFile, canaries: int, confidence: float) -> privacy_audit.Audit:
    planning.require_privacy(file.job)
    if TABLE not in file.raw:
        raise JobFileError(f"{TABLE}: missing; expected a table that describes the simulated fleet and its data")
    board = ProgressEstimate(file.job.name, file.job.rounds, file.simulation.target_metric, time.monotonic)
    on_progress: Callable[[str], object] = (lambda text: None) if out.as_json else out.note
    with (
        wrap_errors("the training"),
        api.prepare(file, on_progress=on_progress) as setup,
        showing(out, board) as observe,
    ):
        return audits.run_audit(
            file, setup, num_canaries=canaries, confidence=confidence, observe=observe, on_replayed=board.begin
        )


def _print_audit(out: output.Output, file: SimulationFile, found: privacy_audit.Audit) -> None:
    best, claimed = found.bound.best, found.claimed
    out.fields(
        {
            "claimed": f"epsilon {claimed.epsilon:.4g} at delta {claimed.delta:g} for {claimed.releases} releases",
            "canaries": f"{best.canaries} of {found.num_clients:,} clients; {found.included} were included, each in "
            f"{found.merged:.3g} of {file.job.rounds} rounds",
            "guesses": f"{best.guesses}, of which {best.right} were right",
            "lower bound": f"epsilon {found.bound.epsilon:.4g} with {found.confidence:.4g} confidence",
            "verdict": "consistent with the claim, but not a proof of it"
            if found.holds
            else f"THE CLAIM IS WRONG, except by chance, as in at most {1 - found.confidence:.2g} of audits",
        }
    )
