"""Run the cells of a paper's table, keep a log of each, and compare published values with the results.

A cell is one simulation file. Its log is `results/PAPER/CELL-seedN.jsonl`: a first line with the settings, a line for
each round and for each evaluation by clients, and a last line at the end. Tables are generated from the logs alone,
without running anything. A cell with a complete log does not run again. A cell that was stopped continues from its last
checkpoint, in `runs/papers`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import importlib
import json
import multiprocessing
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # for `report`, when a program of this folder runs

from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402

import report  # noqa: E402
from fedplat.errors import FedplatError  # noqa: E402
from fedplat.simulation import RunFolderOptions, simulate  # noqa: E402
from fedplat.simulation.recording.result import AttemptResult  # noqa: E402
from fedplat.simulation.scenario.file import SimulationFile, parse  # noqa: E402

RESULTS = HERE / "results"
QUICK = Path("runs/papers-quick")
KEPT = Path("runs/papers")
CHECKPOINT_S = 60.0
Value = report.Cell
"""A cell of a table."""
Observe = Callable[[AttemptResult], object]


class Reached(Exception):
    """The cell has reached its target; its other rounds are not needed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a table. `quick` are the changes of its settings for a test of a few seconds.

    It ends early when the test accuracy reaches `target`.
    """

    name: str
    settings: str
    quick: tuple[str, ...] = ("rounds=2",)
    target: float | None = None

    def file(self, *changes: str, quick: bool = False) -> SimulationFile:
        """Return its simulation file."""
        return parse(self.settings, HERE, [*changes, *(self.quick if quick else ())])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    """The log of a run."""

    cell: str
    seed: int
    about: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    done: bool
    evaluations: Sequence[Mapping[str, Any]] = ()
    """By clients: each has their number, and the weighted means of their metrics."""

    @property
    def accuracies(self) -> list[float]:
        """The test accuracies of the committed rounds, in percent."""
        return [100.0 * line["accuracy"] for line in self.rounds if "accuracy" in line]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper:
    """A table of a paper. `name` is that of its program; `rows` returns the table's rows for the complete logs."""

    name: str
    title: str
    source: str
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    rows: Callable[[Sequence[Log]], Sequence[tuple[Value, ...]]]
    play: Callable[[SimulationFile, Observe, RunFolderOptions], object]
    notes: tuple[str, ...] = ()


def rounds_to(accuracies: Sequence[float], target: float) -> float | None:
    """Return the rounds until the running maximum of the accuracy reaches the target, interpolated, or None.

    Follows McMahan et al. 2017 (Section 3): the curve is made monotonic, and crossed by straight lines.
    """
    best = 0.0
    for number, accuracy in enumerate(accuracies, 1):
        if accuracy >= target:
            return number - 1 + (target - best) / (accuracy - best) if number > 1 else 1.0
        best = max(best, accuracy)
    return None


def play(file: SimulationFile, observe: Observe, run_folder: RunFolderOptions) -> None:
    """Run a simulation file unchanged."""
    simulate(file, observe=observe, run_folder=run_folder)


def read_log(path: Path) -> Log:
    """Read a log, complete or not."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]
    about: dict[str, Any] = lines[0] if lines else {"cell": "", "seed": 0}
    rounds = [line for line in lines if "round" in line]
    done = bool(lines) and "done" in lines[-1]
    evaluations = [line for line in lines if "evaluation" in line]
    return Log(cell=about["cell"], seed=about["seed"], about=about, rounds=rounds, done=done, evaluations=evaluations)


def read_logs(paper: Paper, folder: Path = RESULTS) -> list[Log]:
    """Return the complete logs of a paper, in the order of its cells."""
    found = [read_log(path) for path in sorted((folder / paper.name).glob("*.jsonl"))]
    order = {cell.name: number for number, cell in enumerate(paper.cells)}
    whole = [log for log in found if log.done and log.cell in order]
    return sorted(whole, key=lambda log: (order[log.cell], log.seed))


def table(paper: Paper, logs: Sequence[Log]) -> report.Report:
    """Return the table of a paper, with the runs behind it."""
    about = logs[0].about if logs else {}
    return report.Report(
        name=paper.name,
        title=paper.title,
        columns=paper.columns,
        rows=tuple(paper.rows(logs)),
        notes=paper.notes,
        command=f"python benchmarks/papers/{paper.name}.py",
        machine=about.get("machine", ""),
        date=max((log.about["date"] for log in logs), default=""),
    )


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of an empty list."""
    return sum(values) / len(values) if values else None


def format_runs(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean of runs, with the standard deviation if there are several, or "not run"."""
    if not values:
        return "not run"
    mean_text = f"{statistics.mean(values):.{digits}f}"
    return f"{mean_text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean_text


def format_gains(values: Mapping[int, float], base: Mapping[int, float]) -> str:
    """Return the mean of the gains over the values of `base` with the same seed, with its sign, as `format_runs`."""
    gains = [value - base[seed] for seed, value in values.items() if seed in base]
    text = format_runs(gains)
    return text if text.startswith("-") or not gains else f"+{text}"


def run_named(paper: str, cell: str, seed: int, path: Path, quick: bool) -> str:
    """Call `run_cell` in a separate process, which finds the paper by its name."""
    import torch

    torch.set_num_threads(1)
    found: Paper = importlib.import_module(paper).PAPER
    return run_cell(found, next(each for each in found.cells if each.name == cell), seed, path, quick)


def run_cell(paper: Paper, cell: Cell, seed: int, path: Path, quick: bool) -> str:
    """Run a cell and keep its log. Returns an error message, or ""."""
    import torch

    about = {"paper": paper.name, "cell": cell.name, "seed": seed, "quick": quick, "settings": cell.settings}
    about |= {"machine": report.machine(), "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    run_folder = _kept(paper, path, quick)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:

        def write(line: Mapping[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        def observe(record: AttemptResult) -> None:
            if not record.committed:
                return
            if record.kind == "EVALUATE":
                clients = sum(record.counts.values())
                write({"evaluation": record.round, "clients": clients, "metrics": record.metrics})
                return
            counts = {"merged": record.num_updates, "assigned": sum(record.counts.values())}
            sent = {} if record.bytes_up == 0 else {"bytes_up": record.bytes_up}
            write({"round": record.round, **counts, **sent, **record.evaluation})
            if cell.target is not None and 100.0 * record.evaluation.get("accuracy", 0.0) >= cell.target:
                raise Reached

        write(about)
        try:
            with contextlib.suppress(Reached):
                paper.play(cell.file(f"simulation.seed={seed}", quick=quick), observe, run_folder)
        except FedplatError as exc:
            return f"{cell.name}: {exc}"
        write({"done": True})
    shutil.rmtree(run_folder.folder, ignore_errors=True)
    return ""


def _kept(paper: Paper, path: Path, quick: bool) -> RunFolderOptions:
    """Return the run folder of a cell. A stopped cell continues, unless its log was deleted."""
    folder = KEPT / paper.name / (f"{path.stem}-quick" if quick else path.stem)
    if not path.exists() or read_log(path).done:
        shutil.rmtree(folder, ignore_errors=True)
    return RunFolderOptions(folder, resume=folder.exists(), checkpoint_s=CHECKPOINT_S)


def main(paper: Paper, arguments: Sequence[str] | None = None) -> int:
    """Run the missing cells of a paper, and print the table."""
    parser = argparse.ArgumentParser(description=paper.title)
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="only cells with this text in their name"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N")
    parser.add_argument("--workers", type=int, default=2, help="number of cells at the same time, with one thread each")
    parser.add_argument("--quick", action="store_true", help=f"a test of a few rounds; its logs go to {QUICK}")
    parser.add_argument("--again", action="store_true", help="run cells with a complete log again")
    parser.add_argument("--results", type=Path, help="folder of the logs", metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help=report.JSON_HELP)
    options = parser.parse_args(arguments)
    folder = options.results or (QUICK if options.quick else RESULTS)
    chosen = [cell for cell in paper.cells if not options.only or any(text in cell.name for text in options.only)]
    if not chosen:
        parser.error(f"no cell has such a name; there are {', '.join(cell.name for cell in paper.cells)}")
    todo: dict[Path, tuple[Cell, int]] = {}
    for seed in options.seeds:
        for cell in chosen:
            path = folder / paper.name / f"{cell.name}-seed{seed}.jsonl"
            if options.again or not path.exists() or not read_log(path).done:
                todo[path] = cell, seed
    failures = _run(paper, todo, options.workers, options.quick) if todo else []
    report.finish(table(paper, read_logs(paper, folder)), options.json, save=False)
    for failure in failures:
        Console(stderr=True).print(f"[bold]failed[/bold] {failure}", highlight=False)
    return 1 if failures else 0


def _run(paper: Paper, todo: Mapping[Path, tuple[Cell, int]], workers: int, quick: bool) -> list[str]:
    """Run cells in separate processes, and return the error messages."""
    # Without the last two, glibc returns the memory of each convolution, and the kernel clears it for the next one.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="33554432")
    os.environ.update(MALLOC_TRIM_THRESHOLD_="4294967295")
    pool = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    with pool:
        futures = {
            path: pool.submit(run_named, paper.name, cell.name, seed, path, quick)
            for path, (cell, seed) in todo.items()
        }
        try:
            _watch({path: (futures[path], cell.file(quick=quick).job.rounds) for path, (cell, _) in todo.items()})
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise SystemExit("stopped; run this again to continue the cells from their last checkpoints") from None
    return [failure for future in futures.values() if (failure := future.result())]


def _watch(running: Mapping[Path, tuple[concurrent.futures.Future[str], int]]) -> None:
    """Show the progress of the logs, until all cells have ended."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars = {path: progress.add_task(path.stem, total=rounds) for path, (_, rounds) in running.items()}
        waiting = {future for future, _ in running.values()}
        while waiting:
            _, waiting = concurrent.futures.wait(waiting, timeout=1.0)
            for path, (future, rounds) in running.items():
                if future.done():
                    progress.update(bars[path], completed=rounds)
                elif future.running() and path.exists():
                    progress.update(bars[path], completed=len(read_log(path).rounds))
