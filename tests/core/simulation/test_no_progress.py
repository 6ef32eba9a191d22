"""Simulations that cannot progress: refused before the start, or ended with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from fedplat.cli import app
from fedplat.errors import JobFileError, NoProgressError
from fedplat.gossip import Gossip
from fedplat.model import Parameters
from fedplat.simulation.api import simulate
from fedplat.simulation.run import Simulation, run
from support.simulation.cases import job, make_fleet
from support.simulation.least_squares import LeastSquares, initial

JOB = """\
name = "study"
population = "demo"
trainer = "study"
rounds = 3
model.initial = "m.safetensors"
selection.goal = 4
selection.over_selection = 1.0
"""
FLEET = """
[simulation]
training = false
model_bytes = 1000
fleet.num_clients = 10
fleet.labels.region = { eu = 0.5, us = 0.5 }
"""


def study(folder: Path, **changes: Any) -> Any:
    file = folder / "study.toml"
    file.write_text(JOB + FLEET)
    return simulate(file, {key.replace("__", "."): value for key, value in changes.items()}, progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selection__goal": 20}, r"selection.goal = 20: expected at most the 10 clients of the simulation"),
        (
            {"selection__where": "region == 1"},
            r"selection.where = 'region == 1': no client of the simulation satisfies it; .* region: eu, us",
        ),
        (
            {"selection__goal": 8, "selection__where": "region == 'eu'"},
            r"selection.goal = 8: expected at most the \d of 10 clients .* that satisfy selection.where",
        ),
        (
            {"selection__min_separation": 2},
            "selection.min_separation = 2: in round 3, 8 of the 10 clients rest, and the 2 left are fewer than the 4",
        ),
        (
            {"selection__sampling": {"policy": "poisson", "rate": 0.5}, "selection__wait_for": 11},
            "selection.wait_for = 11: expected at most the 10 clients",
        ),
        (
            {"evaluation__clients": {"evaluator": "study", "goal": 30}, "simulation__held_out": 0.1},
            "evaluation.clients.goal = 30: expected at most",
        ),
    ],
    ids=["goal", "where", "where and goal", "separation", "wait_for", "evaluation"],
)
def test_what_is_known_before_the_start_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        study(tmp_path, **changes)


def test_a_fleet_that_is_just_enough_is_not_refused(tmp_path: Path) -> None:
    changes = {"selection__goal": 5, "selection__min_separation": 1, "rounds": 4}
    assert study(tmp_path, **changes).result.status == "COMPLETED"


def test_job_check_refuses_it_too_and_a_job_for_a_server_without_a_fleet_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    (tmp_path / "m.safetensors").write_bytes(Parameters.from_arrays({"w": np.zeros(2, np.float32)}).to_bytes())
    job_text = JOB.replace("goal = 4", "goal = 20")
    file.write_text(job_text + FLEET)
    refused = CliRunner().invoke(app.app, ["job", "check", str(file)])
    assert refused.exit_code == 2
    assert "selection.goal = 20: expected at most the 10 clients" in refused.stderr
    file.write_text(job_text)
    assert CliRunner().invoke(app.app, ["job", "check", str(file)]).exit_code == 0


def test_clients_that_always_fail_end_the_run_with_their_reason(tmp_path: Path) -> None:
    with pytest.raises(
        NoProgressError, match=r"ended in status PAUSED: round 1 failed 1\d times in a row .* TRAINER_ERROR"
    ):
        study(tmp_path, simulation__fleet__fails=1.0)


def test_the_command_ends_with_the_reason_and_a_status(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(JOB + FLEET)
    for change, why in (
        ("simulation.fleet.fails=1.0", "round 1 failed 1"),
        ("simulation.until_s=0.1", "the virtual time ended (simulation.until_s = 0.1)"),
    ):
        command = ["simulate", str(file), "--no-plots", "--set", change, "--dir", str(tmp_path / change)]
        done = CliRunner().invoke(app.app, command)
        assert done.exit_code == 1
        assert f"error: study is not complete: {why}" in " ".join(done.stderr.split())
        assert (tmp_path / change / "results.json").exists()


def test_a_run_that_its_virtual_time_ends_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="study is not complete: the virtual time ended"):
        assert study(tmp_path, simulation__until_s=0.1).result.status == "RUNNING"


def test_a_client_that_always_diverges_is_named() -> None:
    spec = job(rounds=2, selection={"goal": 4, "over_selection": 1.0, "min_fraction": 1.0})
    engine = LeastSquares(4, diverges=3)
    result = run(Simulation(spec=spec, fleet=make_fleet(4), engine=engine, initial=initial()))
    assert (result.status, result.totals.attempts) == ("PAUSED", 10)
    assert "client 3: REJECTED_METRICS: the metric 'loss' is nan" in result.problem


def test_clients_that_are_always_online_are_waited_for_less_long_than_others() -> None:
    """Others may come online once a week."""
    spec = job(4, rounds=1, selection={"over_selection": 1.0, "min_fraction": 1.0})
    always = run(Simulation(spec=spec, fleet=make_fleet(3)))
    seldom = run(Simulation(spec=spec, fleet=make_fleet(4, availability={"kind": "probability", "probability": 0.01})))
    for result in (always, seldom):
        assert result.status == "RUNNING"
        assert "failed attempts in a row; the last one: round 1 attempt" in result.problem
    assert always.totals.attempts == 20
    assert 8 * 86_400.0 < seldom.totals.duration_s < 9 * 86_400.0


@pytest.mark.parametrize(
    ("fault", "status", "text"),
    [
        ({"fails": 1.0}, "PAUSED", "round 1 failed 10 times in a row for reasons that another try does not change"),
        (
            {"vanishes": 1.0},
            "RUNNING",
            "failed attempts in a row; the last one: round 1 attempt 1: 0 silos announced a model",
        ),
    ],
)
def test_a_decentralised_job_ends_too(fault: dict[str, Any], status: str, text: str) -> None:
    spec = msgspec.structs.replace(job(4, updates={"weighting": "uniform"}), mode=Gossip())
    result = run(Simulation(spec=spec, fleet=make_fleet(4, **fault), engine=LeastSquares(4), initial=initial()))
    assert (result.status, result.totals.rounds) == (status, 0)
    assert text in result.problem
