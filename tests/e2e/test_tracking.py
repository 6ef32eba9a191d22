"""`fedplat job watch --mlflow`, stopped in the middle of a real job and repeated: MLflow has what the server has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import processes

pytest.importorskip("mlflow")

TRAINER = """
import pathlib
import threading

import numpy as np
from fedplat_client import TrainResult


def model():
    return {"weight": np.zeros(3, np.float32)}


def train(task):
    pause = threading.Event()
    while task.round >= 3 and not pathlib.Path("go").exists():
        pause.wait(0.05)
    return TrainResult(parameters=task.parameters, num_examples=1, metrics={"loss": 1.0 / task.round})
"""
JOB = """
name = "linear"
population = "demo"
trainer = "linear"
rounds = 5
model.initial = "trainer:model"
selection = { goal = 1, over_selection = 1.0 }
"""


def steps_of(uri: str, name: str) -> dict[int, float]:
    from mlflow.tracking import MlflowClient

    client: Any = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("linear")
    if experiment is None:
        return {}
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) <= 1
    metrics = [metric for run in runs for metric in client.get_metric_history(run.info.run_id, name)]
    assert len({metric.step for metric in metrics}) == len(metrics)  # no round twice
    return {metric.step: metric.value for metric in metrics}


@pytest.mark.slow
def test_a_watch_that_is_stopped_and_repeated_tracks_every_round_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    uri = f"file:{tmp_path / 'store'}"
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "job.toml").write_text(JOB)
    with processes.server(tmp_path / "server") as server:
        environment = {**os.environ, "FEDPLAT_PROFILE": str(server.profile_path)}
        fedplat = [sys.executable, "-m", "fedplat.cli"]
        (tmp_path / "ticket").write_text(server.ticket("demo"))
        client = [
            *("env", "-C", str(tmp_path), str(processes.BIN / "fedplat-client"), "run", "--ticket-file", "ticket"),
            *("--data-dir", "client", "--trainer", "linear=trainer.py:train"),
        ]
        submit = [*fedplat, "job", "submit", "job.toml"]
        done = subprocess.run(submit, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        watch = [*fedplat, "job", "watch", "linear", "--mlflow", uri]
        with processes.processes([client], tmp_path / "client.log"):
            with subprocess.Popen(watch, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as first:
                processes.until(lambda: set(steps_of(uri, "clients/loss")) == {1, 2}, "two rounds in MLflow")
                first.send_signal(signal.SIGINT)
                output, _ = first.communicate(timeout=processes.PATIENCE_S)
            assert first.returncode == 130, output
            (tmp_path / "go").touch()
            done = subprocess.run(watch, env=environment, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
        with server.admin() as admin:
            rounds = admin.list_rounds("linear")
    assert steps_of(uri, "clients/loss") == {each.round: each.client_metrics["loss"] for each in rounds}
    assert steps_of(uri, "round/reported") == dict.fromkeys(range(1, 6), 1.0)
