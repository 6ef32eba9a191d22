"""Tests of the model, the client and the simulation. Run them with: python -m pytest."""

from __future__ import annotations

import tomllib
from pathlib import Path

from fedplat import initial
from fedplat import simulate
from fedplat_client import Task

import client
import data

FOLDER = Path(__file__).parent
JOB = tomllib.loads((FOLDER / "job.toml").read_text())


def test_simulated_clients_learn():
    run = simulate(FOLDER / "job.toml")
    assert run.result.status == "COMPLETED"
    accuracy = run.series("accuracy").values
    assert accuracy[-1] > 0.9  # by chance 0.5


def test_a_client_trains_the_model():
    start = initial.resolve(JOB["model"]["initial"], FOLDER)
    task = Task(name=JOB["trainer"], parameters=start.copy(), config=JOB["config"])
    result = client.make_trainer(number=0)(task)
    assert result.num_examples == data.NUM_EXAMPLES
    assert result.parameters != start
    assert task.parameters.schema == start.schema
