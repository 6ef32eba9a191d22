"""Tests of the model, the client and the simulation. Run them with: python -m pytest."""

from __future__ import annotations

import tomllib
from pathlib import Path

from fedplat import initial
from fedplat import simulate
from fedplat_client import Task

import client
import data
import generate
import model

FOLDER = Path(__file__).parent
JOB = tomllib.loads((FOLDER / "job.toml").read_text())


def test_simulated_clients_learn():
    run = simulate(FOLDER / "job.toml", {"rounds": 3})
    assert run.result.status == "COMPLETED"
    start, end = generate.load(model.initial()), generate.load(run.model)
    assert generate.perplexity(end) < generate.perplexity(start) / 2


def test_a_client_trains_the_model():
    start = initial.resolve(JOB["model"]["initial"], FOLDER)
    config = JOB["config"] | {"base_sha256": model.LEARNER.base_sha256()}
    task = Task(name=JOB["trainer"], parameters=start.copy(), config=config)
    result = client.make_trainer(number=0)(task)
    assert result.num_examples == len(data.load(0)[0])
    assert result.parameters != start
    assert task.parameters.schema == start.schema
