"""Sweeps with real worker processes and run folders: parallel, stopped, killed and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedplat import sweep
from fedplat.errors import EngineError, MissingExtraError
from fedplat.simulation import simulate
from fedplat.simulation.data import Dataset
from fedplat.simulation.data.sources import SourcePaths
from fedplat.simulation.scenario import file as files
from fedplat.sweep import StepProgress, worker
from fedplat.sweep.plan import Outcome
from fedplat.sweep.worker import OUTCOME, DoneReply, FailureReply, PartRequest, SweepWorker, WorkerSetup
from support.polling import until
from support.simulation.engines import RAY
from support.sweeps import BASE, GRID, HALVING, SEARCH, write_sweep

PATIENCE_S = 300.0
FEDPLAT = [sys.executable, "-W", "error", "-m", "fedplat.cli", "sweep", "sweep.toml", "--no-plots"]
RESULTS = ("results.json", "sweep.csv", "best.toml")


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RESULTS}


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Generator[Start]:
    """Sweeps as processes of their own, which end with the test at the latest."""
    started: list[subprocess.Popen[str]] = []

    def start(output: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*FEDPLAT, "--dir", output, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONWARNINGS": "error"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sweep of `GRID` with `HALVING`, in one process and without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    sweep.run(write_sweep(folder, GRID + HALVING), folder / "whole", jobs=1)
    return folder / "whole"


def finish(process: subprocess.Popen[str], status: int) -> str:
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    return errors


def kill_at(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    until(lambda: condition() or process.poll() is not None, "a file of a run", PATIENCE_S)
    assert process.poll() is None
    process.kill()
    process.communicate()


def setup(folder: Path, **more: Any) -> WorkerSetup:
    known: dict[str, Any] = {
        "base_text": BASE,
        "base_folder": str(folder),
        "runs": str(folder / "runs"),
        "metric": "accuracy",
        "maximize": True,
        "best": False,
        "target": 0.3,
        "checkpoint_s": 5.0,
    }
    return WorkerSetup(**(known | more))


def compute(made: SweepWorker, folder: Path, until: int = 0, *changes: str) -> Outcome:
    request = PartRequest(folder="run", changes=["simulation.engine=loop", *changes], until=until)
    assert made.run(request, lambda reply: None) == DoneReply()
    return msgspec.json.decode((folder / "runs/run" / OUTCOME).read_bytes(), type=Outcome)


def test_a_worker_pauses_at_a_rung_and_continues_without_repeating_a_round(tmp_path: Path) -> None:
    paused = compute(SweepWorker(setup(tmp_path)), tmp_path, 2)
    assert (paused.until, paused.rounds, paused.status) == (2, [1, 2], "RUNNING")
    run = tmp_path / "runs/run"
    assert [path.name for path in (run / "journal").glob("checkpoint-*")] == ["checkpoint-000002"]
    ended = compute(SweepWorker(setup(tmp_path)), tmp_path)
    results = json.loads((run / "results.json").read_text())
    merged = sum(record["counts"]["MERGED"] for record in results["attempts"][2:])
    assert results["computed"]["updates"] == merged
    whole = simulate(files.parse(BASE, tmp_path, ["simulation.engine=loop"]))
    assert ended.values == whole.series("accuracy").values.tolist()
    assert ended.values[:2] == paused.values
    assert (ended.until, ended.status, ended.target_round) == (0, "COMPLETED", whole.summary.rounds_to_target)
    # A process that was killed before it wrote the outcome left the results, and perhaps the journal.
    (run / OUTCOME).unlink()
    (run / "journal").mkdir()
    assert compute(SweepWorker(setup(tmp_path)), tmp_path) == ended
    assert not (run / "journal").exists()


def test_a_worker_loads_each_data_set_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedplat.simulation.data.sources.datasets import Digits

    loads: list[Digits] = []
    load = Digits.load

    def count(self: Digits, place: SourcePaths) -> Dataset:
        loads.append(self)
        return load(self, place)

    monkeypatch.setattr(Digits, "load", count)
    made = SweepWorker(setup(tmp_path))
    changes = ["rounds=1", "simulation.partition.clients=10"]
    for number in range(3):
        request = PartRequest(folder=f"run-{number}", changes=[*changes, f"simulation.seed={number}"], until=0)
        assert made.run(request, lambda reply: None) == DoneReply()
    assert len(loads) == 1
    other = PartRequest(folder="other", changes=[*changes, "simulation.data.test_fraction=0.5"], until=0)
    assert made.run(other, lambda reply: None) == DoneReply()
    assert len(loads) == 2


@pytest.mark.parametrize(
    ("more", "changes", "words"),
    [
        ({"metric": "acuracy"}, [], 'metric = "acuracy": no round was scored with it; expected one of accuracy, loss,'),
        ({}, ["simulation.partition.clients=5000"], "needs at least"),
        ({}, ["simulation.data.source=npz", "simulation.data.path=none.npz"], "cannot be read"),
        ({}, ["simulation.model.loss=own:loss"], "raised RuntimeError: not today ("),
        ({}, ["simulation.data={ source = 'function', call = 'own:loss' }"], "raised TypeError"),
    ],
)
def test_a_failed_run_is_a_sentence(tmp_path: Path, more: dict[str, Any], changes: list[str], words: str) -> None:
    (tmp_path / "own.py").write_text("def loss(outputs, targets):\n    raise RuntimeError('not today')\n")
    request = PartRequest(folder="run", changes=["rounds=1", "simulation.engine=loop", *changes], until=0)
    reply = SweepWorker(setup(tmp_path, **more)).run(request, lambda reply: None)
    assert isinstance(reply, FailureReply)
    assert reply.is_usage
    assert words in reply.text


def test_a_diverged_run_has_an_outcome_without_a_score(tmp_path: Path) -> None:
    made = SweepWorker(setup(tmp_path))
    found = compute(made, tmp_path, 0, "config.learning_rate=1e25", "rounds=2", "retry.max_attempts=2")
    assert found.status != "RUNNING"
    assert worker.read_attempts(tmp_path / "runs/run")[1] == found.status


def test_a_search_needs_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'optuna>=.*', or use a grid"):
        sweep.run(write_sweep(tmp_path, SEARCH), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_continues_after_it_was_killed_and_ends_as_one_that_was_not(
    tmp_path: Path, start: Start, whole: Path
) -> None:
    write_sweep(tmp_path, GRID + HALVING)
    runs = tmp_path / "killed/runs"
    arguments = ("--jobs", "2", "--checkpoint-every", "0")
    kill_at(start("killed", *arguments), lambda: any(runs.glob(f"*/{OUTCOME}")))
    # The second time in the middle of a run, after a checkpoint and long before its end.
    begun = set(runs.glob("*/journal/checkpoint-*"))
    second = start("killed", *arguments)
    kill_at(second, lambda: any(set(runs.glob("*/journal/checkpoint-*")) - begun))
    assert not (tmp_path / "killed/results.json").exists()
    sweep.run(tmp_path / "sweep.toml", tmp_path / "killed", jobs=2)
    assert contents(tmp_path / "killed") == contents(whole)
    rows = json.loads((whole / "results.json").read_text())["rows"]
    assert [row["stopped_after"] for row in rows] == [0, 4, 2, 2]
    assert rows[0]["values"]["config.learning_rate"] == 1.0
    assert [len(row["curve"]["rounds"]) for row in rows] == [6, 4, 2, 2]
    best = simulate(whole / "best.toml", {"simulation.engine": "loop", "simulation.seed": 1})
    assert best.summary.last is not None
    assert best.summary.last.value == rows[0]["scores"]["1"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_ends_a_sweep_with_the_command_that_continues_it(tmp_path: Path, start: Start) -> None:
    write_sweep(tmp_path, GRID, BASE.replace("rounds = 6", "rounds = 1000000"))
    process = start("out", "--jobs", "2", "--checkpoint-every", "0")
    until(lambda: any((tmp_path / "out/runs").glob("*/journal/checkpoint-*")), "a checkpoint", PATIENCE_S)
    process.send_signal(signal.SIGINT)
    text = finish(process, 130)
    assert text.splitlines()[-1] == "stopped; continue with: fedplat sweep sweep.toml --jobs 2 --dir out"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_search_finds_the_better_learning_rate_with_any_number_of_processes(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, SEARCH)
    seen: list[StepProgress] = []
    found = sweep.run(path, tmp_path / "two", jobs=2, observe=seen.append)
    assert found.best is not None
    assert found.best.values["config.learning_rate"] > 0.1  # of 1e-4 to 1; the smaller ones learn nothing in 6 rounds
    assert seen[-1].num_done == seen[-1].num_runs == 6
    sweep.run(path, tmp_path / "one", jobs=1)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    # What is finished is not computed again.
    (tmp_path / "one/results.json").unlink()
    stored: list[StepProgress] = []
    sweep.run(path, tmp_path / "one", jobs=1, observe=stored.append)
    assert all(progress.is_stored for progress in stored)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_worker_ends_the_sweep_in_words_and_it_continues(tmp_path: Path) -> None:
    path = write_sweep(tmp_path)
    (tmp_path / "own.py").write_text(
        "import os, signal, pathlib\nfrom torch.nn.functional import cross_entropy\n"
        "def loss(outputs, targets):\n"
        "    if pathlib.Path(__file__).with_name('killer').exists():\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return cross_entropy(outputs, targets)\n"
    )
    write_sweep(
        tmp_path,
        GRID.replace("[1, 3]", "[1]"),
        BASE + '\n[simulation.model]\nloss = "own:loss"\naccuracy = "classes"\n',
    )
    (tmp_path / "killer").touch()
    with pytest.raises(EngineError, match=r"was ended by SIGKILL while it computed the run 0.*the same command"):
        sweep.run(path, tmp_path / "out", jobs=1)
    (tmp_path / "killer").unlink()
    assert len(sweep.run(path, tmp_path / "out", jobs=1).rows) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@RAY
def test_a_sweep_on_ray_has_the_same_results(tmp_path: Path, whole: Path) -> None:
    path = write_sweep(tmp_path, GRID + HALVING)
    sweep.run(path, tmp_path / "ray", jobs=2, ray=True)
    assert contents(tmp_path / "ray") == contents(whole)
