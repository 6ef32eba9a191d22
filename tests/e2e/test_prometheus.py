"""Debian's Prometheus scrapes a daemon with clients: every panel has data, and every rule can be evaluated."""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.admin import AdminClient, submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat_client import Client, Task, TrainResult
from fedplat_server import metrics
from support import processes, programs
from support.boards import expressions
from support.clients import at_work
from support.jobs import write_job
from support.processes import free_port, until
from support.scrapes import Samples, promtool

pytestmark = pytest.mark.slow
RULES = Path(metrics.__path__[0]) / "grafana/fedplat.rules.yml"
PATIENCE_S = 150.0
ROUNDS = 100_000
PLAIN = write_job("plain", population="open", trainer="add", rounds=ROUNDS, selection={"goal": 2})
PRIVATE = write_job(
    "private",
    population="vault",
    trainer="add",
    rounds=ROUNDS // 100,
    selection={"goal": 2, "close": "deadline"},
    deadlines={"training_s": 60.0},
    updates={"weighting": "uniform", "clip_norm": 1.0},
    privacy={"participation": "fixed", "delta": 1e-6, "noise_multiplier": 200.0},
)


class Prometheus:
    """A Prometheus that scrapes one daemon each second."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._started = time.time()

    def get(self, path: str, **parameters: str | float) -> Any:
        """The data of an answer of its API. Raises `urllib.error.HTTPError` for an expression that is not valid."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as response:
            return json.load(response)["data"]

    def is_ready(self) -> bool:
        try:
            targets = self.get("targets")["activeTargets"]
        except OSError:
            return False
        return [target["health"] for target in targets] == ["up"]

    def has_data(self, expression: str) -> bool:
        """Whether Grafana would draw something: a sample that is a number at some time since the start."""
        times = {"start": self._started, "end": time.time(), "step": 1.0}
        series = self.get("query_range", query=expression, **times)["result"]
        return any(not math.isnan(float(value)) for each in series for _, value in each["values"])

    def rules(self) -> list[dict[str, Any]]:
        (group,) = self.get("rules")["groups"]
        return group["rules"]


@contextmanager
def prometheus(folder: Path, target: str) -> Generator[Prometheus]:
    port, config = free_port(), folder / "prometheus.yml"
    scrape = {"job_name": "fedplat", "static_configs": [{"targets": [target]}]}
    everything = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [scrape],
    }
    config.write_text(json.dumps(everything))  # JSON is YAML
    promtool("check", "config", config)
    command = [
        programs.require("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with processes.processes([command], folder / "prometheus.log"):
        running = Prometheus(port)
        until(running.is_ready, "a scrape", PATIENCE_S)
        yield running


def submit(admin: AdminClient, text: str) -> str:
    model = Parameters.from_arrays({"weight": np.zeros(8, np.float32)})
    return submission.submit(admin, submission.Submission(text, parse_job(text), model)).job_id


def test_every_panel_has_data_and_every_rule_can_be_evaluated(tmp_path: Path) -> None:
    stopping = threading.Event()

    def train(task: Task) -> TrainResult:
        stopping.wait(0.1)  # the training
        task.parameters["weight"] += np.float32(1)
        return TrainResult(parameters=task.parameters, num_examples=3, metrics={"loss": 0.5})

    target = f"127.0.0.1:{free_port()}"
    with processes.server(tmp_path / "server", "--metrics", target) as server, server.admin() as admin:
        admin.set_privacy_budget("vault", 50.0, 1e-6)
        jobs = [submit(admin, PLAIN), submit(admin, PRIVATE)]
        clients: list[Client] = []
        for population in ("open", "vault"):
            ticket = server.ticket(population, 2)
            clients += [Client.from_ticket(ticket, data_dir=tmp_path / f"{population}-{n}") for n in range(2)]
        for client in clients:
            client.add_trainer("add", train)
        with at_work(clients), prometheus(tmp_path, target) as running:
            for expression in expressions("10s"):
                until(lambda text=expression: running.has_data(text), expression, PATIENCE_S)
            for job in jobs:
                admin.cancel(job)
            stopping.set()
            until(lambda: running.has_data('fedplat_jobs{status="cancelled"} == 2'), "the end of the jobs", PATIENCE_S)
            assert [text for text in expressions("10s") if not running.has_data(text)] == []
            assert not running.has_data("no_such_metric")
            with pytest.raises(urllib.error.HTTPError):
                running.has_data("sum by (")
            rules = running.rules()
            assert {rule["health"] for rule in rules} == {"ok"}
            assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=60) as response:
                samples = Samples(response.read().decode())
            assert len(samples.samples) < 2000
