"""Stale synchronous parallel training of simulated fleets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from fedplat.model import Parameters
from fedplat.simulation.api import simulate
from fedplat.simulation.engines.interface import ClientTask, LocalUpdate
from fedplat.simulation.recording.result import Result
from fedplat.simulation.run import Simulation, run
from support.simulation.cases import BAD, job, make_fleet
from support.simulation.least_squares import LeastSquares, initial
from support.simulation.runs import DIGITS

NUM_CLIENTS, NUM_CLOCKS = 5, 4
CLOCKS = """\
[mode]
kind = "ssp"
concurrency = 4
slack = 1
[updates]
weighting = "uniform"
[aggregation]
rule = "fedbuff"
learning_rate = 0.25
"""


class Exact(LeastSquares):
    """Clients whose work depends on the model that they begin with and on their last update, not on the round."""

    @override
    def _train(self, task: ClientTask) -> LocalUpdate:
        return super()._train(task._replace(seed=task.client))


def learn(fleet: dict[str, Any], **sections: Any) -> Result:
    engine = Exact(NUM_CLIENTS)
    updates = {"weighting": "uniform", "outlier_factor": 0.0, "max_weight_factor": 0.0}
    selection = {"over_selection": 1.0, "min_fraction": 1.0, "wait_for": NUM_CLIENTS}
    spec = job(updates=updates, selection=selection, **sections)
    return run(Simulation(spec=spec, fleet=make_fleet(NUM_CLIENTS, **fleet), engine=engine, initial=initial(), seed=2))


def test_without_slack_the_model_is_that_of_synchronous_rounds() -> None:
    """Each clock begins with one version for all, so a learning rate of 1/n makes of its n updates their mean."""
    fleet: dict[str, Any] = {"speed": {"kind": "lognormal", "median": 5.0, "sigma": 1.0}}
    rounds = learn(fleet, goal=NUM_CLIENTS, rounds=NUM_CLOCKS)
    clocks = learn(
        fleet,
        goal=1,
        rounds=NUM_CLIENTS * NUM_CLOCKS,
        mode={"kind": "ssp", "concurrency": NUM_CLIENTS, "slack": 0},
        aggregation={"rule": "fedbuff", "learning_rate": 1.0 / NUM_CLIENTS},
    )
    assert rounds.status == clocks.status == "COMPLETED"
    assert clocks.participation.merged.tolist() == [NUM_CLOCKS] * NUM_CLIENTS
    assert clocks.staleness == dict.fromkeys(range(NUM_CLIENTS), NUM_CLOCKS)
    assert isinstance(rounds.model, Parameters)
    assert isinstance(clocks.model, Parameters)
    np.testing.assert_allclose(clocks.model["weight"], rounds.model["weight"], rtol=0, atol=1e-6)
    assert clocks.totals.duration_s == pytest.approx(rounds.totals.duration_s, rel=0.05)


def test_a_fleet_that_fails_and_vanishes_finishes() -> None:
    mode = {"kind": "ssp", "concurrency": NUM_CLIENTS, "slack": 1}
    result = learn(BAD | {"vanishes": 0.0}, goal=1, rounds=40, mode=mode, aggregation={"rule": "fedbuff"})
    assert result.status == "COMPLETED"
    assert [one.phase for one in result.attempts].count("COMMITTED") == 40
    assert result.totals.counts["FAILED"] > 0


@pytest.mark.slow
def test_a_simulation_file_with_clocks(tmp_path: Path) -> None:
    path = tmp_path / "digits.toml"
    text = DIGITS.replace("goal = 3\nover_selection = 1.5", "goal = 1\nover_selection = 1.0\nwait_for = 4")
    path.write_text(text.replace("rounds = 4", "rounds = 8") + CLOCKS)
    found = simulate(path)
    assert found.result.status == "COMPLETED"
    assert found.result.totals.counts["MERGED"] == 8
    assert found.series("accuracy").values[-1] > found.series("accuracy").values[0]
