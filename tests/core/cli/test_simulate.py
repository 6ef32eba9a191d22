"""`fedplat simulate`, in this process and as one of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from fedplat.cli.app import app
from support.cli.fake_state import State
from support.cli.runner import CliRunner
from support.simulation.runs import write_digits

FEDPLAT = [sys.executable, "-W", "error", "-m", "fedplat.cli"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_run_and_its_folder(here: Path) -> None:
    write_digits(here)
    done = run("digits.toml")
    assert done.exit_code == 0, done.output
    fields = {line[:15].strip(): line[15:].strip() for line in done.stdout.splitlines()}
    assert fields["status"] == "COMPLETED"
    assert fields["results"] == "runs/digits"
    assert "at the end, best" in fields["accuracy"]
    assert fields["accuracy 0.05"].startswith("after ")
    assert "digits: 4 rounds, 20 clients, 3 reports each; engine loop" in done.stderr
    assert "4/4 rounds" in done.stderr.splitlines()[-1]
    assert {path.name for path in (here / "runs/digits").iterdir()} == {
        *("run.json", "rounds.jsonl", "results.json", "participation.safetensors", "model.safetensors"),
        *("accuracy.png", "time.png", "participation.png", "data.png"),
    }
    again = run("digits.toml", "--no-plots", "--seed", "3", "--rounds", "1", "--set", "selection.goal=2", "--json")
    assert again.exit_code == 0, again.output
    assert again.stderr == ""
    found: dict[str, Any] = json.loads(again.stdout)
    assert again.stdout.count("\n") == 1
    assert found["output"] == "runs/digits-2"
    assert found["seed"] == 3
    assert found["totals"]["rounds"] == 1
    assert "attempts" not in found
    assert not list((here / "runs/digits-2").glob("*.png"))


def test_scheduling_alone(here: Path) -> None:
    write_digits(here)
    done = run("digits.toml", "--no-training", "--json", "--dir", "there")
    found = json.loads(done.stdout)
    assert found["computed"]["engine"] == "none"
    assert found["summary"]["best"] is None
    assert (here / "there" / "time.png").exists()


def test_the_data_is_shown(here: Path) -> None:
    write_digits(here)
    done = run("digits.toml", "--show-data")
    assert done.stdout.startswith("20 clients with ")
    assert len(done.stdout.splitlines()) == 2 + 10 + 1
    assert json.loads(run("digits.toml", "--show-data", "--json").stdout)["labels"] == 10.0
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.toml"], "none.toml: the file cannot be read: No such file or directory"),
        (
            ["digit"],
            "digit: there is no such file; expected a simulation file, such as job.toml, or the name of an exam",
        ),
        (["digits.toml", "--set", "simulation.target=85"], "simulation.target = 85: expected at most 1, because"),
        (["digits.toml", "--engine", "lop"], "digits.toml: simulation.engine = 'lop': expected one of auto, loop"),
        (["digits.toml", "--rounds", "0"], "digits.toml: rounds = 0: expected a whole number >= 1"),
        (["digits.toml", "--set", "rounds"], "digits.toml: 'rounds': expected KEY=VALUE"),
        (["digits.toml", "--set", "selection.gaol=3"], "digits.toml: selection.gaol = 3: there is no such key"),
        (["digits.toml", "--set", "simulation.partition.clients=2000"], "needs at least"),
        (["digits.toml", "--set", "simulation.data.source=mnist"], "tf-keras-datasets/mnist.npz"),
        (["digits.toml", "--resume"], "there is no run to resume in runs/digits"),
        (["digits.toml", "--dir", "taken"], "taken has a run already; resume it (--resume)"),
        (
            ["digits.toml", "--dir", "taken", "--resume"],
            "the run in taken has aggregation.rule = 'fedavg', and this",
        ),
        (["digits.toml", "--set", "model.initial=nobody:module"], "there is no module 'nobody'"),
        (["digits.toml", "--set", "config.epochs=0"], "config.epochs = 0"),
        (["digits.toml", "--set", "simulation.data.source=npz", "--set", "simulation.data.path=x"], "cannot be read"),
    ],
)
def test_mistakes_are_one_line_each(
    arguments: list[str], words: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPLAT_DATA", str(here / "empty"))
    write_digits(here)
    (here / "taken").mkdir()
    (here / "taken" / "run.json").write_text('{"simulation": {"aggregation": {"rule": "fedavg"}}}')
    done = run(*arguments, "--no-plots")
    assert done.exit_code == 2, done.output
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert words in line
    assert done.stdout == ""


def test_keys_that_only_a_trainer_may_know_are_reported(here: Path) -> None:
    write_digits(here)
    done = run("digits.toml", "--set", "config.moment=0.5", "--set", "rounds=1", "--no-plots")
    assert done.exit_code == 0
    note = "warning: config.moment is ignored: local training has no such key; did you mean momentum?"
    assert note in done.stderr.splitlines()


def test_a_run_that_cannot_show_what_was_meant_is_reported(here: Path) -> None:
    write_digits(here)
    changes = ("simulation.data.test_fraction=0", "config.algorithm=fedprox", "rounds=1")
    done = run("digits.toml", "--no-plots", *(word for change in changes for word in ("--set", change)))
    assert done.exit_code == 0, done.output
    found = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert found[0].startswith("warning: no model is scored, because the data has no test examples")
    assert "set simulation.data.test_fraction" in found[0]
    assert found[1].startswith("warning: config.mu: missing, so it is 0")


@pytest.mark.parametrize("engine", ["loop", "processes"])
def test_an_error_of_the_users_own_code_names_its_line(engine: str, here: Path) -> None:
    (here / "own.py").write_text("def loss(outputs, targets):\n    raise RuntimeError('no loss today')\n")
    write_digits(here)
    done = run("digits.toml", "--set", "simulation.model.loss=own:loss", "--engine", engine, "--no-plots")
    assert done.exit_code == 2
    assert re.search(r"^error: the training of client \d+ raised RuntimeError: no loss today", done.stderr, re.M)
    assert "own.py, line 2)" in done.stderr


def test_the_policy_that_was_simulated_is_submitted(here: Path, state: State, server: object) -> None:
    from support.cli.commands import environment

    write_digits(here)
    runner = CliRunner()
    checked = runner.invoke(app, ["job", "check", "digits.toml"])
    assert checked.exit_code == 0, checked.output
    done = runner.invoke(app, ["job", "submit", "digits.toml"], env=environment(server))  # pyright: ignore[reportArgumentType]
    assert done.exit_code == 0, done.output
    (job,) = state.jobs.values()
    assert "[simulation" not in job.job_file
    assert "goal = 3" in job.job_file
    write_digits(here, "[simulation.nonsense]\n")
    wrong = runner.invoke(app, ["job", "check", "digits.toml"])
    assert wrong.exit_code == 2
    assert "simulation.nonsense = {…}: there is no such key" in wrong.stderr


def test_mlflow_that_is_away_is_a_warning(here: Path) -> None:
    write_digits(here)
    done = run("digits.toml", "--no-training", "--rounds", "2", "--mlflow", "http://127.0.0.1:9", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["status"] == "COMPLETED"
    first, last = done.stderr.splitlines()
    assert first.startswith("warning: MLflow at http://127.0.0.1:9: ")
    assert last.startswith("warning: MLflow does not have rounds 1-2 of the run (")
    wrong = run("digits.toml", "--no-training", "--mlflow", "foo://x")
    assert wrong.exit_code == 2
    assert wrong.stderr.splitlines()[-1].startswith("error: MLflow at foo://x: ")


@pytest.mark.slow
def test_ctrl_c_ends_a_run_in_words(here: Path) -> None:
    write_digits(here)
    arguments = ["simulate", "digits.toml", "--rounds", "1000000", "--engine", "processes", "--workers", "2"]
    arguments += ["--tensorboard", "--mlflow", "http://127.0.0.1:9"]
    with subprocess.Popen([*FEDPLAT, *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while "/1000000 rounds" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    command = (
        "fedplat simulate digits.toml --resume --dir runs/digits "
        "--set rounds=1000000 --set simulation.engine=processes --set simulation.workers=2 "
        "--tensorboard --mlflow http://127.0.0.1:9"
    )
    assert errors.splitlines()[-1] == f"stopped; resume with: {command}"
    assert output == ""
    lines = (here / "runs/digits/rounds.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["round"] == 1


def test_ctrl_c_before_a_run_begins_names_no_run_to_resume(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    write_digits(here)
    monkeypatch.setattr("fedplat.cli.simulate._run", interrupt)
    done = run("digits.toml")
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr == "stopped before the run began; there is nothing to resume\n"
    assert not (here / "runs").exists()


@pytest.mark.slow
def test_a_run_that_was_killed_resumes_and_ends_as_one_that_was_not(here: Path) -> None:
    write_digits(here)
    arguments = ["digits.toml", "--rounds", "6", "--no-plots", "--checkpoint-every", "0"]
    with subprocess.Popen([*FEDPLAT, "simulate", *arguments], text=True, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while "/6 rounds" not in process.stderr.readline():
            assert process.poll() is None
        process.kill()
    assert not (here / "runs/digits/results.json").exists()
    done = run(*arguments, "--resume")
    assert done.exit_code == 0, done.output
    assert "results        runs/digits\n" in done.stdout
    assert run(*arguments, "--dir", "whole").exit_code == 0
    for name in ("model.safetensors", "participation.safetensors", "rounds.jsonl"):
        assert (here / "runs/digits" / name).read_bytes() == (here / "whole" / name).read_bytes(), name
    found, expected = (json.loads((here / name / "results.json").read_text()) for name in ("runs/digits", "whole"))
    assert found.pop("computed")["updates"] < expected.pop("computed")["updates"]
    assert found == expected
    assert not (here / "runs/digits/journal").exists()
    over = run(*arguments, "--resume")
    assert over.exit_code == 2
    assert "the run in runs/digits is over" in over.stderr
