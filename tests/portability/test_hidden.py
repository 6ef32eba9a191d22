"""The client and the simulator work on systems that lack what Linux has: its names are hidden from them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from support import deployment, processes
from support.projects import ROOT

PROGRAM = Path(__file__).with_name("program.py")
PATIENCE_S = 60.0
TESTS = {
    "client": (
        "tests/client/test_client.py",
        "tests/client/test_identity.py",
        "tests/client/test_recycled_files.py",
        "tests/client/test_transfer.py",
        "tests/core/test_model_file.py",
    ),
    "simulator": (
        *(
            f"tests/core/simulation/engines/test_{each}.py"
            for each in ("auto", "backlog", "contract", "opening", "vmap")
        ),
        "tests/core/simulation/test_driver.py",
        "tests/core/simulation/test_fleet.py",
        "tests/core/simulation/test_journal.py",
        "tests/core/simulation/test_no_progress.py",
        "tests/core/simulation/test_replay.py",
    ),
}
"""Tests of what uses `fedplat.system` (locks, downloads, caches, files of models), and those of the simulator."""
LEFT_OUT = (
    # It starts a process in which nothing is hidden, whose locks are of another kind.
    "tests/client/test_identity.py::test_a_second_process_is_refused",
)
"""Tests that state something else about a system without these names."""
NO_WORKERS = "not processes"
"""The engine of this name is refused there, which test_a_simulation_trains_with_the_same_result shows."""
TRAINER = """
import numpy as np
from fedplat_client import TrainResult


def train(task):
    return TrainResult(parameters={"weight": task.parameters["weight"] + np.float32(1)}, num_examples=7)
"""
JOB = """
name = "count"
population = "p"
trainer = "count"
model.initial = "model.safetensors"
rounds = 3
selection = { goal = 1, over_selection = 1.0 }
"""
OTHERS = {name: pytest.param(name, marks=pytest.mark.grid) for name in ("macos", "windows")}
"""More is hidden for Windows, so that covers the rest; only the simulator is not promised there."""


def run(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("system", ["windows", OTHERS["macos"]])
def test_every_module_can_be_imported(tmp_path: Path, system: str) -> None:
    *missing, count = run(tmp_path, str(PROGRAM), system, "--import").splitlines()
    assert int(count.split()[0]) > 400
    assert not any(line.startswith(("fcntl", "resource")) for line in missing)


@pytest.mark.slow
@pytest.mark.parametrize("system", ["windows", OTHERS["macos"]])
def test_a_client_trains_and_a_second_one_is_refused_its_data(tmp_path: Path, system: str) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    with processes.server(tmp_path / "server") as server, server.admin() as admin:
        (tmp_path / "ticket").write_text(server.ticket("p"))
        options = ["run", "--ticket-file", "ticket", "--data-dir", "data", "--trainer", "count=trainer:train"]
        command = [sys.executable, str(PROGRAM), system, "fedplat_client", *options]
        log = tmp_path / "client.log"
        with log.open("wb") as output:
            client = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output)
        try:
            model = Parameters.from_arrays({"weight": np.zeros(100_000, np.float32)})
            job = deployment.submit(admin, JOB, model)
            deployment.completed(admin, job)
            exported = deployment.exported(admin, job, tmp_path)
            second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
            client.send_signal(signal.SIGINT)
            assert client.wait(PATIENCE_S) == 0, log.read_text()
        finally:
            client.kill()
            client.wait()
    assert np.array_equal(exported["weight"], np.full(100_000, 3, np.float32))
    assert second.returncode != 0
    assert "is in use by another client" in second.stderr
    assert "Traceback" not in log.read_text() + second.stderr


@pytest.mark.slow
@pytest.mark.parametrize("system", ["macos", OTHERS["windows"]])
def test_a_simulation_trains_with_the_same_result(tmp_path: Path, system: str) -> None:
    """The engine `auto` leaves out worker processes; `processes` refuses to run in a sentence."""
    arguments = ["simulate", "digits", "--seed", "1", "--rounds", "3", "--engine", "auto", "--no-plots"]
    results: list[bytes] = []
    for number, command in enumerate(([str(PROGRAM), system, "fedplat.cli"], ["-m", "fedplat.cli"])):
        folder = tmp_path / str(number)
        run(tmp_path, *command, *arguments, "--dir", str(folder))
        results.append(next(folder.rglob("*.safetensors")).read_bytes())
    assert results[0] == results[1]
    command = [sys.executable, str(PROGRAM), system, "fedplat.cli", "simulate", "digits", "--engine", "processes"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert 'engine = "processes": its workers need Linux; use "auto" or "loop" here' in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("part", TESTS)
def test_the_tests_of_client_and_simulator_pass(tmp_path: Path, part: str) -> None:
    plugins = [word for name in ("portability.hide", "no:xdist", "no:cacheprovider") for word in ("-p", name)]
    left_out = [word for each in LEFT_OUT for word in ("--deselect", each)]
    chosen = ["-m", "not slow and not grid", "-k", NO_WORKERS, "--basetemp", str(tmp_path / "tests")]
    run(ROOT, "-m", "pytest", "-q", *plugins, *chosen, *left_out, *TESTS[part])
