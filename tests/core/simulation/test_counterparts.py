"""Rules with a half on the client, over a fleet that fails, vanishes and is late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from fedplat.model import Parameters
from fedplat.pytorch.training import Learner, LocalOptions
from fedplat.simulation.data.federation import Federation
from fedplat.simulation.engines.client_trainer import ClientTraining
from fedplat.simulation.engines.processes import LoopEngine
from fedplat.simulation.run import Simulation, run
from support.simulation.cases import BAD, job, make_fleet

NUM_CLIENTS, EACH = 12, 8
RNG = np.random.default_rng(6)
INPUTS = RNG.normal(size=(NUM_CLIENTS * EACH, 3)).astype("f4")
# Each client has a truth of its own.
TRUTHS = np.repeat(RNG.normal(size=(NUM_CLIENTS, 3)), EACH, axis=0)
TARGETS = (INPUTS * TRUTHS).sum(1, keepdims=True).astype("f4")
CONFIG: dict[str, Any] = {"epochs": 4, "batch_size": 0, "learning_rate": 0.1}
ZEROS = Parameters.from_arrays({"weight": np.zeros((1, 3), "f4")})


def simulated(rule: str, initial: Parameters = ZEROS, rounds: int = 30, **config: Any) -> tuple[Parameters, LoopEngine]:
    parts = [np.arange(EACH) + EACH * client for client in range(NUM_CLIENTS)]
    federation = Federation(INPUTS, TARGETS, parts, INPUTS[:0], TARGETS[:0])
    learner = Learner(model=lambda: nn.Linear(3, 1, bias=False), loss=nn.functional.mse_loss)
    config = {**CONFIG, "algorithm": rule, **config}
    engine = LoopEngine(ClientTraining(federation, learner, LocalOptions.from_config(config)))
    spec = job(
        goal=6,
        rounds=rounds,
        config=config,
        updates={"weighting": "uniform"},
        aggregation={"rule": rule, "num_clients": NUM_CLIENTS},
    )
    options: dict[str, Any] = {name: value for name, value in BAD.items() if name != "availability"}
    fleet = make_fleet(NUM_CLIENTS, **options)
    result = run(Simulation(spec=spec, fleet=fleet, engine=engine, initial=initial, seed=2))
    assert result.status == "COMPLETED"
    assert result.model is not None
    return result.model, engine


def test_scaffolds_variate_is_the_mean_of_those_that_the_clients_remember() -> None:
    """Only so if a client remembers what came of the updates that were merged, of all of them and of no other."""
    model, engine = simulated("scaffold", rounds=4)  # at the optimum it would be 0
    kept = [contents["scaffold"]["weight"] for contents in engine.client_states().values()]
    assert len(kept) > NUM_CLIENTS / 2
    np.testing.assert_allclose(model["control/weight"], np.sum(kept, axis=0) / NUM_CLIENTS, atol=1e-5)
    assert np.abs(model["control/weight"]).max() > 1e-3


@pytest.mark.parametrize(("rule", "config"), [("scaffold", {}), ("feddyn", {"alpha": 0.5})])
@pytest.mark.slow
def test_the_model_goes_to_the_optimum_of_those_who_take_part(rule: str, config: dict[str, Any]) -> None:
    model, engine = simulated(rule, rounds=80, **config)
    took_part = np.concatenate([np.arange(EACH) + EACH * client for client in engine.client_states()])
    assert EACH * NUM_CLIENTS / 2 < len(took_part) < EACH * NUM_CLIENTS  # one is always late
    optimum = np.linalg.lstsq(INPUTS[took_part].astype("f8"), TARGETS[took_part].astype("f8"), rcond=None)[0].T
    assert np.linalg.norm(model["weight"] - optimum) < 0.1 * np.linalg.norm(optimum)


def test_a_model_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="the initial model does not fit the job's rule: tensor 'weight' is F64"):
        simulated("scaffold", Parameters.from_arrays({"weight": np.zeros((1, 3), "f8")}))
