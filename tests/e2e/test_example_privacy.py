"""Example-level privacy with a real daemon: a client reports its owner's limit, and the job continues."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat.cli import submission
from fedplat.model import Parameters
from fedplat.privacy.steps import StepCharge
from fedplat.pytorch.dp import epsilon
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Client, PrivacyLimit
from fedplat_client.trainers.torch import TorchTrainer
from support import processes
from support.clients import at_work
from support.jobs import write_job

pytestmark = pytest.mark.slow

ROUNDS = 4
JOB = write_job(
    "private",
    population="fleet",
    trainer="private",
    rounds=ROUNDS,
    model={"initial": "private.safetensors"},
    selection={"goal": 2, "min_fraction": 0.5},
    config={
        "epochs": 1,
        "batch_size": 5,
        "learning_rate": 0.1,
        "dp": "flat",
        "dp_noise_multiplier": 1.0,
        "dp_max_grad_norm": 1.0,
        "dp_delta": 1e-5,
    },
)
PER_ROUND = StepCharge(1.0, 0.25, 4)


def cost(rounds: int) -> float:
    return epsilon([PER_ROUND] * rounds, 1e-5)


def test_a_client_declines_what_is_beyond_its_limit_and_the_server_is_told_why(tmp_path: Path) -> None:
    limits = [PrivacyLimit(max_epsilon=limit, delta=1e-5) for limit in (cost(ROUNDS) * 1.01, cost(2) * 1.01)]
    data = TensorDataset(torch.ones(20, 3), torch.ones(20, 1))
    model = Parameters.from_arrays({"weight": np.zeros((1, 3), "f4"), "bias": np.zeros(1, "f4")})
    (tmp_path / "private.safetensors").write_bytes(model.to_bytes())
    (tmp_path / "job.toml").write_text(JOB)
    with processes.server(tmp_path / "server") as server, server.admin() as admin:
        ticket = server.ticket("fleet", len(limits))
        clients = [Client.from_ticket(ticket, data_dir=tmp_path / str(number)) for number in range(len(limits))]
        for client, limit in zip(clients, limits, strict=True):
            loss = nn.functional.mse_loss
            trainer = TorchTrainer(model=lambda: nn.Linear(3, 1), loss=loss, data=data, device="cpu", private=limit)
            client.add_trainer("private", trainer)
        job = submission.submit(admin, submission.load(tmp_path / "job.toml")).job_id
        with at_work(clients):
            events = list(admin.watch_job(job))
        assert admin.show_job(job).status == admin_pb2.JOB_STATUS_COMPLETED
    reports = [event for event in events if event.entity == "assignment" and event.to_state == "REPORTED"]
    failures = [event for event in events if event.entity == "assignment" and event.to_state == "FAILED"]
    assert [len([each for each in reports if each.round == number]) for number in range(1, ROUNDS + 1)] == [2, 2, 1, 1]
    epsilons = {(each.client_id, each.round): each.metrics["epsilon"] for each in reports}
    assert sorted(epsilons.values()) == pytest.approx(sorted(map(cost, (1, 1, 2, 2, 3, 4))), rel=1e-6)
    assert {event.round for event in failures} == {3, 4}
    assert all(
        "exceed epsilon" in event.reason and "the limit of the data's owner" in event.reason for event in failures
    )
    spent = [json.loads((tmp_path / str(number) / "privacy.json").read_text()) for number in range(len(limits))]
    assert [content["entries"][0]["charges"][0]["num_steps"] for content in spent] == [16, 8]
