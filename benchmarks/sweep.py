"""Measure a sweep of 24 simulations with several worker processes, compared with one, and after it was killed.

    python benchmarks/sweep.py [--jobs 2] [--rounds 20] [--turns 1] [--json] [--save]

Each sweep is `fedplat sweep` in a process: 2NN on MNIST (`examples/mnist-noniid.toml`, the data from FEDPLAT_DATA),
4 learning rates with 6 seeds. The time is that of the whole command, with all imports. One worker process and `--jobs`
are measured in turns, and the last sweep is killed (SIGKILL) when half of its runs have ended, and continued. The
results of all sweeps must be equal, byte for byte. The JSON object has two more keys than those in
benchmarks/report.py: `ratio`, the speed with `--jobs` divided by that with one process, and `identical`, 1 if all
results are equal, else 0.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from processes import POLL_S, FailedError
from report import JsonOption, Report, SaveOption, finish

BASE = Path(__file__).resolve().parent.parent / "examples" / "mnist-noniid.toml"
RATES, SEEDS = (0.01, 0.02, 0.05, 0.1), tuple(range(6))
NUM_RUNS = len(RATES) * len(SEEDS)
FILES = ("results.json", "sweep.csv", "best.toml")
LIMIT_S = 1800.0
COLUMNS = ("sweep", "seconds", "runs a minute", "speed / one process")
_console = Console(stderr=True, soft_wrap=True)


@dataclasses.dataclass
class Bench:
    """The sweep file, and the results of the first sweep, which all others must equal."""

    folder: Path
    file: Path
    expected: dict[str, bytes] | None = None
    identical: bool = True

    def measure(self, name: str, jobs: int) -> float:
        """Compute the sweep in a folder of its own and return the seconds. Raises `FailedError`."""
        start = time.perf_counter()
        with self._start(name, jobs) as process:
            self._wait(process)
        seconds = time.perf_counter() - start
        self._compare(name)
        _console.print(f"{name}: {seconds:.1f} s", markup=False)
        return seconds

    def measure_killed(self, name: str, jobs: int) -> float:
        """Kill the sweep when half of its runs have ended, continue it, and return the seconds of both parts."""
        start = time.perf_counter()
        with self._start(name, jobs) as process:
            while len(list((self.folder / name / "runs").glob("*/results.json"))) < NUM_RUNS // 2:
                if process.poll() is not None:
                    raise FailedError(f"the sweep ended with status {process.returncode} before it was killed")
                time.sleep(POLL_S)
            process.kill()
        seconds = time.perf_counter() - start
        return seconds + self.measure(name, jobs)

    def _start(self, name: str, jobs: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "fedplat.cli", "sweep", str(self.file), "--dir", str(self.folder / name)]
        return subprocess.Popen([*command, "--jobs", str(jobs), "--no-plots", "--json"], stdout=subprocess.DEVNULL)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise FailedError(f"the sweep did not end within {LIMIT_S:.0f} s") from None
        if status:
            raise FailedError(f"the sweep ended with status {status}; its message is above")

    def _compare(self, name: str) -> None:
        found = {file: (self.folder / name / file).read_bytes() for file in FILES}
        self.expected = self.expected or found
        self.identical = self.identical and found == self.expected


def main(
    jobs: Annotated[int, typer.Option(min=2, help="Number of worker processes to compare with one.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each simulation.")] = 20,
    turns: Annotated[int, typer.Option(min=1, help="Number of measurements of each.")] = 1,
    as_json: JsonOption = False,
    save: SaveOption = False,
) -> None:
    """Measure a sweep.

    With --json the object has two more keys: ratio, the speed with --jobs divided by that with one process; and
    identical, 1 if the results of all sweeps are equal byte for byte, else 0.
    """
    seconds: dict[int, list[float]] = {1: [], jobs: []}
    try:
        with tempfile.TemporaryDirectory(prefix="fedplat-bench-") as folder:
            bench = Bench(Path(folder), _write(Path(folder), rounds))
            for turn in range(turns):
                for count, taken in seconds.items():
                    taken.append(bench.measure(f"{count}-{turn}", count))
            killed_s = bench.measure_killed("killed", jobs)
    except FailedError as exc:
        _console.print(f"error: {exc}", style="red", markup=False)
        raise typer.Exit(1) from exc
    one_s, many_s = (statistics.median(taken) for taken in seconds.values())
    finish(
        _report(one_s, many_s, killed_s, jobs, rounds, bench.identical),
        as_json,
        save,
        figures={
            "ratio": one_s / many_s,
            "identical": float(bench.identical),
        },
    )


def _write(folder: Path, rounds: int) -> Path:
    file = folder / "mnist.toml"
    file.write_text(
        f'base = "{BASE}"\nseeds = {list(SEEDS)}\n[[points]]\nrounds = {rounds}\n'
        f'[grid]\n"config.learning_rate" = {list(RATES)}\n'
    )
    return file


def _report(one_s: float, many_s: float, killed_s: float, jobs: int, rounds: int, identical: bool) -> Report:
    measured = {
        "1 process": one_s,
        f"{jobs} processes": many_s,
        f"{jobs} processes, killed in the middle and continued": killed_s,
    }
    rows = [(name, seconds, 60.0 * NUM_RUNS / seconds, one_s / seconds) for name, seconds in measured.items()]
    equal = "are equal, byte for byte" if identical else "DIFFER"
    return Report(
        name="sweep",
        title=f"A sweep of {NUM_RUNS} simulations, {rounds} rounds each",
        columns=COLUMNS,
        rows=tuple(rows),
        notes=(
            f"The results of all sweeps {equal}. The machine has {len(os.sched_getaffinity(0))} cores.",
            "Seconds are those of the whole command, with the start of the processes.",
        ),
    )


if __name__ == "__main__":
    typer.run(main)
