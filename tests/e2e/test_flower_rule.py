"""The ClientApp of a Flower app, and a strategy of Flower as the rule, in an ordinary job: real processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from support import processes
from support.jobs import write_job

pytest.importorskip("flwr")
pytest.importorskip("torch")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.slow
DIGITS = processes.ROOT / "examples" / "flower" / "digits"
ROUNDS = 3
NUM_CLIENTS = 2
STRATEGY = """
from flwr.serverapp.strategy import FedAdam

class Counting(FedAdam):
    def __init__(self, **options):
        super().__init__(**options)
        self.rounds = []

    def aggregate_train(self, server_round, replies):
        self.rounds.append(server_round)
        assert self.rounds == list(range(1, server_round + 1)), self.rounds
        return super().aggregate_train(server_round, replies)
"""
JOB = write_job(
    "digits",
    population="few",
    trainer="digits",
    rounds=ROUNDS,
    model={"initial": "initial.safetensors"},
    selection={"goal": NUM_CLIENTS, "min_fraction": 1.0, "wait_for": NUM_CLIENTS},
    config={"lr": 0.1},
    aggregation={"rule": "flower", "strategy": "counting", "options": {"eta": 0.02, "tau": 0.01}},
    evaluation={"clients": {"evaluator": "digits", "goal": NUM_CLIENTS}},
    retry={"base_s": 0.1},
)


def initial_model() -> Parameters:
    rng = np.random.default_rng(1)
    shapes = {"hidden.weight": (32, 64), "hidden.bias": (32,), "output.weight": (10, 32), "output.bias": (10,)}
    return Parameters.from_arrays({name: rng.normal(0, 0.1, each).astype(np.float32) for name, each in shapes.items()})


def client(tmp_path: Path, server: processes.Server, number: int) -> list[str]:
    ticket = tmp_path / f"{number}.ticket"
    ticket.write_text(server.ticket("few"))
    command = [str(processes.BIN / "fedplat-client"), "flower", str(DIGITS), "--ticket-file", str(ticket)]
    options = ["--label", f"partition_id={number}", "--node-config", f"num-partitions={NUM_CLIENTS}"]
    return [*command, *options, "--run-config", "local-epochs=2", "--data-dir", str(tmp_path / f"client-{number}")]


def test_a_client_app_and_a_strategy_in_an_ordinary_job(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(STRATEGY)
    (tmp_path / "digits.toml").write_text(JOB)
    (tmp_path / "initial.safetensors").write_bytes(initial_model().to_bytes())
    plugin = f"flower-strategies.counting={tmp_path}/own.py:Counting"
    with processes.server(tmp_path / "server", "--plugin", plugin) as server:
        command = [str(processes.BIN / "fedplat"), "--profile", str(server.profile_path), "job", "submit"]
        subprocess.run([*command, str(tmp_path / "digits.toml")], check=True)
        clients = [client(tmp_path, server, number) for number in range(NUM_CLIENTS)]
        with processes.processes(clients, tmp_path / "clients.log"):
            processes.until(lambda: num_versions(server) > 1, "a version")
            server.kill()  # the strategy continues from its memory, which is stored with the version
            server.start()
            with server.admin() as admin:
                events = list(admin.watch_job("digits"))
        assert events[-1].to_state == "COMPLETED", server.log_text() + (tmp_path / "clients.log").read_text()
        scores = [event.metrics["eval_acc"] for event in events if "eval_acc" in event.metrics]
        assert len(scores) >= ROUNDS
        assert scores[-1] > scores[0] + 0.1
        versions = [event for event in events if event.entity == "version"]
        assert {event.round for event in versions} >= set(range(1, ROUNDS + 1))


def num_versions(server: processes.Server) -> int:
    with server.admin() as admin:
        return len(admin.list_versions("digits"))
