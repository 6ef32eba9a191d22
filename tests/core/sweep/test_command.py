"""`fedplat sweep`: its table, its JSON, its progress and its mistakes."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console

from fedplat import sweep
from fedplat.cli.app import app
from fedplat.cli.output import Output
from fedplat.cli.sweep import SweepBoard, draw_progress
from fedplat.simulation.report.plots import new_figure
from fedplat.sweep import StepProgress
from fedplat.sweep.plots import draw_curves
from fedplat.sweep.schedule import RunPart
from support.cli.commands import environment
from support.cli.fake_admin import FakeServer
from support.cli.fake_state import State
from support.cli.runner import CliRunner
from support.sweeps import GRID, HALVING, SEARCH, FakePool, write_sweep


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["sweep", "sweep.toml", "--dir", "out", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_files_are_checked_without_pytorch(here: Path) -> None:
    write_sweep(here, GRID)
    code = (
        "import sys; from pathlib import Path; from fedplat import sweep; "
        "print(sweep.read(Path('sweep.toml')).num_runs, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "8 False\n"


def test_the_table_has_the_best_first(here: Path, pool: FakePool) -> None:
    write_sweep(here, GRID + HALVING)
    done = run("--jobs", "2", "--no-plots")
    assert done.exit_code == 0, done.output
    assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
        "RANK learning_rate epochs ACCURACY 95% INTERVAL SEEDS ROUNDS TO 0.3 VIRTUAL TIME STATUS",
        "1 1 3 0.2405 0.2341 to 0.2469 2 not reached - completed",
        "2 1 1 0.1205 0.1141 to 0.1269 2 not reached - stopped after round 4",
        "3 0.003 3 0.0405 0.0341 to 0.0469 2 not reached - stopped after round 2",
        "4 0.003 1 0.0205 0.0141 to 0.0269 2 not reached - stopped after round 2",
    ]
    first, *lines = done.stderr.splitlines()
    assert first == (
        "sweep: 8 runs (4 configurations, 2 seeds), 2 at a time; at most 48 rounds and 144 client updates; out"
    )
    assert lines[0].startswith("0/8 runs  best accuracy ")
    assert lines[-1] == "results: out"
    shutil.rmtree(here / "out/runs/0004-seed1")
    again = run("--no-plots")
    assert again.stdout == done.stdout
    assert "1 of 8 runs are finished already" in again.stderr.splitlines()


def test_json_is_one_document(here: Path, pool: FakePool) -> None:
    write_sweep(here)
    done = run("--json", "--no-plots")
    assert (done.exit_code, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    found: dict[str, Any] = json.loads(done.stdout)
    assert list(found) == [
        *("format", "name", "metric", "direction", "score", "target", "seeds", "keys", "best", "rows", "output")
    ]
    assert {key: found[key] for key in list(found)[:9]} == {
        "format": 1,
        "name": "sweep",
        "metric": "accuracy",
        "direction": "maximize",
        "score": "last",
        "target": 0.3,
        "seeds": [0, 1],
        "keys": ["config.learning_rate", "config.epochs"],
        "best": 4,
    }
    assert list(found["rows"][0]) == [
        *("rank", "number", "values", "status", "stopped_after", "num_seeds", "score", "low", "high", "scores"),
        *("num_reached", "target_rounds", "target_s", "curve"),
    ]
    assert list(found["rows"][0]["curve"]) == ["rounds", "mean", "low", "high"]
    saved = json.loads((here / "out/results.json").read_text())
    assert saved == {key: value for key, value in found.items() if key != "output"}


def test_the_plan_runs_nothing(here: Path, pool: FakePool) -> None:
    write_sweep(here)
    done = run("--plan", "--jobs", "3")
    assert done.stdout.splitlines()[0] == (
        "sweep: 8 runs (4 configurations, 2 seeds), 3 at a time; 48 rounds and 144 client updates"
    )
    assert [line.split() for line in done.stdout.splitlines()[1:3]] == [
        ["NUMBER", "config.learning_rate", "config.epochs"],
        ["1", "0.003", "1"],
    ]
    found = json.loads(run("--plan", "--json").stdout)
    assert (found["runs"], found["rounds"], found["updates"]) == (8, 48, 144)
    assert found["configurations"][3] == {
        "number": 4,
        "values": {"config.learning_rate": 1.0, "config.epochs": 3},
    }
    write_sweep(here, SEARCH)
    assert "6 trials, chosen by Optuna in batches of 2" in run("--plan").stdout
    assert not pool.requests
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (GRID.replace("base.toml", "none.toml"), [], "none.toml: the file cannot be read: No such file or directory"),
        (GRID + '"config.learning_rat" = [1.0]', [], "did you mean learning_rate or learning_rate_decay?"),
        (GRID.replace("[0, 1]", "[0, 2]"), [], "the sweep in out has seeds = [0, 1], and this file [0, 2]"),
        (GRID, ["--dir", "sweep.toml"], "sweep.toml cannot be written: File exists"),
    ],
)
def test_mistakes_are_one_line_each(here: Path, pool: FakePool, text: str, arguments: list[str], words: str) -> None:
    write_sweep(here)
    run("--no-plots")
    write_sweep(here, text)
    done = run("--no-plots", *arguments)
    assert done.exit_code == 2, done.output
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert words in line
    assert done.stdout == ""


def test_plots_are_drawn_for_a_grid_of_two_keys(here: Path, pool: FakePool) -> None:
    write_sweep(here, GRID + HALVING)
    assert run("--plots").exit_code == 0
    assert {path.name for path in (here / "out").glob("*.png")} == {"curves.png", "heatmap.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (here / "out").glob("*.png"))


@pytest.mark.parametrize(("num_seeds", "num_bands", "title"), [(3, 0, ""), (5, 4, ", 95 % interval")])
def test_curves_have_bands_only_if_there_are_seeds_enough(
    here: Path, pool: FakePool, num_seeds: int, num_bands: int, title: str
) -> None:
    text = GRID.replace("seeds = [0, 1]", f"seeds = {list(range(num_seeds))}")
    found = sweep.run(write_sweep(here, text), here / "out")
    figure = new_figure()
    draw_curves(figure, found.file, found.rows)
    assert [len(axes.collections) for axes in figure.axes] == [num_bands]
    assert figure.legends[0].get_title().get_text() == f"mean of {num_seeds} seeds{title}"
    assert len({line.get_linestyle() for line in figure.axes[0].lines}) > 1


def test_the_best_file_is_a_job_file(here: Path, pool: FakePool, state: State, server: FakeServer) -> None:
    write_sweep(here)
    assert run("--no-plots").exit_code == 0
    runner = CliRunner()
    assert runner.invoke(app, ["job", "check", "out/best.toml"]).exit_code == 0
    done = runner.invoke(app, ["job", "submit", "out/best.toml"], env=environment(server))
    assert done.exit_code == 0, done.output
    (job,) = state.jobs.values()
    assert tomllib.loads(job.job_file)["config"] == {"epochs": 3, "batch_size": 32, "learning_rate": 1.0}


def test_the_live_table_shows_the_runs_in_progress(here: Path) -> None:
    file = sweep.read(write_sweep(here))
    seconds = iter([0.0, 10.0, 10.0, 10.0])
    board = SweepBoard(file, lambda: next(seconds))
    parts = [RunPart(configuration, 0, 0) for configuration in file.configurations]

    def report(part: RunPart, number: int, value: float, done: int, is_done: bool = False) -> None:
        board.add(
            StepProgress(
                part=part,
                round=number,
                num_rounds=6,
                value=value,
                is_done=is_done,
                is_stored=False,
                num_done=done,
                num_runs=8,
            )
        )

    report(parts[0], 2, 0.25, 0)
    report(parts[1], 3, 0.5, 0)
    assert board.sentence() == "0/8 runs"
    report(parts[1], 6, 0.75, 1, is_done=True)
    console = Console(file=io.StringIO(), width=110, force_terminal=False)
    output = Output(False)
    output.messages = console
    console.print(draw_progress(board, output))
    assert isinstance(console.file, io.StringIO)
    text = re.sub(r"[━ ]+", " ", console.file.getvalue())
    assert "1 0 2/6 0.2500 learning_rate=0.003, epochs=1" in text
    assert "epochs=3" not in text
    assert "1/8 runs best accuracy 0.75 1 min 10 s left" in text
