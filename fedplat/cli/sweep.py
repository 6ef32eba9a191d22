"""`fedplat sweep ...`, with a live table of the runs in progress on a terminal."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedplat import errors, texts
from fedplat import sweep as sweeps
from fedplat.cli import formats, session, simulate
from fedplat.cli.options import CheckpointOption, JsonOption
from fedplat.cli.output import Output, table
from fedplat.config.toml_text import format_toml
from fedplat.simulation.run_folder import CHECKPOINT_S
from fedplat.sweep import StepProgress, SweepFile, SweepResult, SweepRow, plan
from fedplat.sweep.runner import WorkerOptions, default_folder, num_processes
from fedplat.sweep.schedule import RunKey


def sweep(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Sweep file (TOML): a simulation file and values.")],
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=0, max=4096, metavar="N", help="Parallel runs; 0: one per core.")
    ] = 0,
    ray: Annotated[bool, typer.Option("--ray", help="Compute runs on the Ray cluster at RAY_ADDRESS.")] = False,
    output: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Folder for the results. Default: sweeps/NAME.")
    ] = None,
    plots: Annotated[
        bool | None, typer.Option("--plots/--no-plots", help="Draw plots. Default: if matplotlib is installed.")
    ] = None,
    checkpoint_s: CheckpointOption = CHECKPOINT_S,
    show_plan: Annotated[bool, typer.Option("--plan", help="Show the configurations and the work, and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate many configurations with several seeds, and compare them.

    The same command continues a sweep that was stopped or killed, with the same result.
    """
    with session.reporting(context, as_json) as out:
        read = sweeps.read(file)
        options = WorkerOptions(jobs=jobs, ray=ray, checkpoint_s=checkpoint_s)
        if show_plan:
            _show_plan(out, read, options)
            return
        folder = output or default_folder(read)
        try:
            result = _run(out, read, folder, options)
        except KeyboardInterrupt as exc:
            out.note(f"stopped; continue with: {_command(file, output, options)}")
            raise typer.Exit(session.INTERRUPTED) from exc
        _draw(out, result, plots)
        _print(out, result)


def _command(file: Path, output: Path | None, options: WorkerOptions) -> str:
    """Return the command that continues a sweep."""
    words = ["fedplat", "sweep", str(file)]
    words += ["--jobs", str(options.jobs)] if options.jobs else []
    words += ["--ray"] if options.ray else []
    return shlex.join([*words, "--dir", str(output)] if output is not None else words)


def _run(out: Output, file: SweepFile, folder: Path, options: WorkerOptions) -> SweepResult:
    if not out.as_json:
        out.note(f"{_estimate(file, options)}; {folder}")
    with show_progress(out, SweepBoard(file, time.monotonic)) as observe:
        return sweeps.run(
            file, folder, jobs=options.jobs, ray=options.ray, checkpoint_s=options.checkpoint_s, observe=observe
        )


def _estimate(file: SweepFile, options: WorkerOptions) -> str:
    """Describe the work of a sweep in one line."""
    count = plan.num_configurations(file.options)
    work = _count_work(file)
    where = "on Ray" if options.ray else f"{num_processes(file, options)} at a time"
    parts = f"{texts.format_count(count, 'configuration')}, {texts.format_count(len(file.seeds), 'seed')}"
    runs = f"{texts.format_count(file.num_runs, 'run')} ({parts})"
    most = "at most " if file.options.stopping is not None else ""
    return f"{file.path.stem}: {runs}, {where}; {most}{work['rounds']:,} rounds and {work['updates']:,} client updates"


def _count_work(file: SweepFile) -> dict[str, int]:
    """Count the rounds and client updates of all runs; those of a search have the numbers of the base file."""
    jobs = [file.parse(each).job for each in file.configurations]
    jobs = jobs or [file.base.job] * plan.num_configurations(file.options)
    seeds = len(file.seeds)
    return {
        "rounds": seeds * sum(job.rounds for job in jobs),
        "updates": seeds * sum(job.rounds * job.selection.goal for job in jobs),
    }


def _show_plan(out: Output, file: SweepFile, options: WorkerOptions) -> None:
    if out.as_json:
        configurations = [{"number": each.number, "values": dict(each.values)} for each in file.configurations]
        out.json({"runs": file.num_runs, "seeds": file.seeds, **_count_work(file), "configurations": configurations})
        return
    out.line(_estimate(file, options))
    if file.options.search is not None:
        out.line(f"{file.options.search.trials} trials, chosen by Optuna in batches of {file.options.search.batch}")
    keys = plan.keys(file.options)
    rows = [(str(each.number), *(format_toml(each.values[key]) for key in keys)) for each in file.configurations]
    if rows:
        out.table(("#NUMBER", *keys), rows, "")


def _draw(out: Output, result: SweepResult, plots: bool | None) -> None:
    if plots is False:
        return
    try:
        result.plot()
    except errors.MissingExtraError as exc:
        if plots:
            raise
        out.note(str(exc))


def _print(out: Output, result: SweepResult) -> None:
    if out.as_json:
        out.json({**result.to_dict(), "output": str(result.folder)})
        return
    objective, keys, names = result.file.objective, plan.keys(result.file.options), result.file.names
    has_target, has_stopped = bool(objective.target), any(row.stopped_after for row in result.rows)
    columns = ["#RANK", *(f"#{names[key]}" for key in keys), f"#{objective.metric.upper()}", "#95% INTERVAL", "#SEEDS"]
    columns += [f"#ROUNDS TO {objective.target:g}", "#VIRTUAL TIME"] if has_target else []
    columns += ["STATUS"]
    rows = [_row(row, keys, has_target) for row in result.rows]
    out.table(columns, rows, "there are no configurations")
    if ended := [row for row in result.rows if not row.stopped_after and row.status != "COMPLETED"]:
        out.note(
            f"warning: {texts.format_count(len(ended), 'configuration')} did not complete all rounds; results.json in "
            "the folder of a run has the reason"
        )
    if result.best is None:
        out.note("no configuration has a finite score, so there is no best.toml")
    if has_stopped:
        out.note("stopped configurations have the score of the round after which they were stopped")
    if result.best is not None and result.needs_base_folder:
        folder = result.file.base_path.parent
        out.note(f"best.toml names a module beside {result.file.options.base}: copy it to {folder} to use it")
    out.note(f"results: {result.folder}")


def _row(row: SweepRow, keys: Sequence[str], has_target: bool) -> tuple[str, ...]:
    interval = formats.NOTHING if row.low is None or row.high is None else f"{row.low:.4f} to {row.high:.4f}"
    cells = [str(row.rank), *(_short(row.values[key]) for key in keys)]
    cells += [formats.NOTHING if row.score is None else f"{row.score:.4f}", interval, str(row.num_seeds)]
    if has_target:
        cells += _target(row)
    return (*cells, f"stopped after round {row.stopped_after}" if row.stopped_after else row.status.lower())


def _target(row: SweepRow) -> list[str]:
    if row.target_rounds is None or row.target_s is None:
        return ["not reached", formats.NOTHING]
    part = "" if row.num_reached == row.num_seeds else f" ({row.num_reached} of {row.num_seeds} seeds)"
    return [f"{row.target_rounds:.1f}{part}", formats.duration(row.target_s)]


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else format_toml(value)


Clock = Callable[[], float]


class SweepBoard:
    """The progress of a sweep. `clock` is real time."""

    def __init__(self, file: SweepFile, clock: Clock) -> None:
        self.running: dict[RunKey, StepProgress] = {}
        self.num_done, self.num_runs = 0, file.num_runs
        self.best: float | None = None
        self._file, self._clock = file, clock
        self._began: tuple[float, int] | None = None

    def add(self, progress: StepProgress) -> None:
        """Add the progress of a run."""
        if progress.is_stored:
            self._began = None
        elif self._began is None:
            self._began = self._clock(), self.num_done
        self.num_done, self.num_runs = progress.num_done, progress.num_runs
        if progress.is_done:
            self.running.pop(progress.part.key, None)
        else:
            self.running[progress.part.key] = progress
        order = self._file.objective.order
        if progress.is_done and progress.value is not None and order(progress.value) > order(self.best):
            self.best = progress.value

    def left_s(self) -> float:
        """Estimate the real seconds until the end, at the pace so far; infinite before a run has ended."""
        done = self.num_done - self._began[1] if self._began is not None else 0
        if self._began is None or not done:
            return math.inf
        return (self._clock() - self._began[0]) / done * (self.num_runs - self.num_done)

    def sentence(self) -> str:
        """Summarize the progress in one line."""
        parts = [f"{self.num_done}/{self.num_runs} runs"]
        if self.best is not None:
            parts.append(f"best {self._file.objective.metric} {self.best:.4g}")
        if self.num_done < self.num_runs and math.isfinite(self.left_s()):
            parts.append(f"{formats.duration(self.left_s())} left")
        return "  ".join(parts)

    def describe(self, progress: StepProgress) -> str:
        """Describe a run in one line."""
        values = self._file.describe(progress.part.configuration)
        value = "" if progress.value is None else f"  {self._file.objective.metric} {progress.value:.4g}"
        return f"{values}, seed {progress.part.seed}: round {progress.round}/{progress.num_rounds}{value}"

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the runs in progress."""
        return [
            (
                str(key.configuration),
                str(key.seed),
                f"{progress.round}/{progress.num_rounds}",
                formats.NOTHING if progress.value is None else f"{progress.value:.4f}",
                self._file.describe(progress.part.configuration),
            )
            for key, progress in sorted(self.running.items())
        ]


def show_progress(output: Output, board: SweepBoard) -> AbstractContextManager[Callable[[StepProgress], None]]:
    """Show progress on stderr, or nothing with JSON; yield the callback for the progress of runs."""
    return simulate.show_live(output, board.add, lambda: draw_progress(board, output), lambda: _lines(output, board))


def draw_progress(board: SweepBoard, output: Output) -> Group:
    """Render the runs in progress, as many as fit, above a progress bar over all runs."""
    columns = ("#NUMBER", "#SEED", "#ROUND", "#VALUE", "CONFIGURATION")
    shown = board.rows()[: max(1, output.messages.height - 4)]
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        ProgressBar(total=max(1, board.num_runs), completed=board.num_done, width=24),
        Text(board.sentence(), no_wrap=True, overflow="ellipsis"),
    )
    return Group(table(columns, shown), bar)


def _lines(output: Output, board: SweepBoard) -> Callable[[StepProgress], None]:
    """Print a line for each run that reaches a rung or its end; for those of an earlier process only one."""
    num_stored = 0

    def add(progress: StepProgress) -> None:
        nonlocal num_stored
        board.add(progress)
        if progress.is_stored:
            num_stored += not progress.part.until
            return
        if num_stored:
            output.note(f"{num_stored} of {board.num_runs} runs are finished already")
            num_stored = 0
        if progress.is_done:
            output.note(f"{board.sentence()}  {board.describe(progress)}")

    return add
