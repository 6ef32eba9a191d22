"""Elastic averaging over fleets that fail, vanish and are late: exchanges conserve the sum of all models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from typing_extensions import override

from fedplat.model import Parameters
from fedplat.pytorch.training import Learner, LocalOptions
from fedplat.simulation.data.federation import Federation
from fedplat.simulation.engines.client_trainer import ClientTraining
from fedplat.simulation.engines.interface import ClientTask, LocalUpdate
from fedplat.simulation.engines.processes import LoopEngine
from fedplat.simulation.recording.result import Result
from fedplat.simulation.run import Simulation, run
from support.simulation.cases import BAD, job, make_fleet

Wide = npt.NDArray[np.float64]
NUM_CLIENTS, EACH, SIZE = 8, 6, 3
RNG = np.random.default_rng(5)
INPUTS = RNG.normal(size=(NUM_CLIENTS * EACH, SIZE)).astype("f4")
CENTRE, OWN = RNG.normal(size=(1, SIZE)), RNG.normal(size=(NUM_CLIENTS, 1, SIZE))
RATE, RHO, TAU = 0.1, 1.2, 3
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"goal": 5},
    "in turns": {"goal": 1},
    "asynchronous": {
        "goal": 1,
        "mode": {"kind": "buffered", "concurrency": 4, "staleness": "constant", "max_staleness": 6},
        "selection": {"over_selection": 1.0, "min_fraction": 1.0},
    },
}


class CountingEngine(LoopEngine):
    """Counts the trainings that took effect, and keeps what the merged tasks have exchanged."""

    def __init__(self, task: ClientTraining) -> None:
        super().__init__(task)
        self.done: Counter[int] = Counter()
        self.dropped = 0
        self._open: dict[int, ClientTask] = {}

    @override
    def result(self, task: ClientTask) -> LocalUpdate:
        result = super().result(task)
        self.done[task.client] += 1
        self._open[task.client] = task
        return result

    @override
    def drop(self, task: ClientTask) -> None:
        super().drop(task)
        self.dropped += 1
        if self._open.get(task.client) == task:
            del self._open[task.client]
            self.done[task.client] -= 1


def simulated(mode: str, seed: int, rounds: int = 25, force: float = 1.0, **fleet: Any) -> tuple[Wide, CountingEngine]:
    """The same for a job that is completed, with its centre alone."""
    result, engine = simulate(mode, seed, rounds, force, **fleet)
    assert result.status == "COMPLETED"
    return centre_of(result), engine


def centre_of(result: Result) -> Wide:
    assert result.model is not None
    return result.model["weight"].astype("f8")


def simulate(mode: str, seed: int, rounds: int = 25, force: float = 1.0, **fleet: Any) -> tuple[Result, CountingEngine]:
    """Runs a job; every client has a model of its own from the beginning, and the gradients are constant."""
    parts = [np.arange(EACH) + EACH * client for client in range(NUM_CLIENTS)]
    federation = Federation(INPUTS, np.zeros((len(INPUTS), 1), "f4"), parts, INPUTS[:0], INPUTS[:0, :1])
    learner = Learner(
        model=lambda: nn.Linear(SIZE, 1, bias=False), loss=lambda outputs, targets: force * outputs.mean()
    )
    config = {"epochs": 1, "tau": TAU, "batch_size": 0, "learning_rate": RATE, "algorithm": "easgd", "rho": RHO}
    engine = CountingEngine(ClientTraining(federation, learner, LocalOptions.from_config(config)))
    own = {client: {"easgd": Parameters.from_arrays({"weight": x.astype("f4")})} for client, x in enumerate(OWN)}
    engine.set_client_states(own)
    spec = job(
        rounds=rounds,
        config=config,
        updates={"weighting": "uniform", "outlier_factor": 0.0},
        aggregation={"rule": "easgd"},
        **MODES[mode],
    )
    initial = Parameters.from_arrays({"weight": CENTRE.astype("f4")})
    simulation = Simulation(
        spec=spec, fleet=make_fleet(NUM_CLIENTS, seed=seed, **fleet), engine=engine, initial=initial, seed=seed
    )
    return run(simulation), engine


def total(centre: Wide, engine: CountingEngine) -> Wide:
    """x̃ + Σ x_i."""
    return centre + sum(contents["easgd"]["weight"].astype("f8") for contents in engine.client_states().values())


@given(
    mode=st.sampled_from(sorted(MODES)),
    seed=st.integers(0, 2**16),
    fails=st.sampled_from([0.0, 0.1, 0.3]),
    vanishes=st.sampled_from([0.0, 0.1, 0.3]),
    slow=st.sampled_from([0.5, 5.0]),
)
@settings(max_examples=12, deadline=None)
def test_exchanges_conserve_the_sum(mode: str, seed: int, fails: float, vanishes: float, slow: float) -> None:
    """Only the steps of merged trainings move the sum: each by -η τ times the client's constant gradient."""
    speed: dict[str, Any] = {"kind": "lognormal", "median": slow, "sigma": 1.0}
    options: dict[str, Any] = {"speed": speed, "fails": fails, "vanishes": vanishes, "away_s": 30.0, "noise": 0.3}
    result, engine = simulate(mode, seed, **options)
    assume(result.status == "COMPLETED")  # in some fleets hardly a client is ever there in time
    centre = centre_of(result)
    slopes = INPUTS.astype("f8").reshape(NUM_CLIENTS, EACH, SIZE).mean(axis=1)
    moved = sum(RATE * TAU * engine.done[client] * slopes[client] for client in range(NUM_CLIENTS))
    np.testing.assert_allclose(total(centre, engine), CENTRE + OWN.sum(axis=0) - moved, atol=2e-5)


@pytest.mark.parametrize("mode", sorted(MODES))
def test_without_gradients_the_sum_is_constant_and_models_meet(mode: str) -> None:
    options = {name: value for name, value in BAD.items() if name not in ("availability", "upload")}
    centre, engine = simulated(mode, seed=3, rounds=100 if mode == "synchronous" else 300, force=0.0, **options)
    np.testing.assert_allclose(total(centre, engine), CENTRE + OWN.sum(axis=0), atol=1e-6 * (1 + NUM_CLIENTS))
    took_part = [client for client in range(NUM_CLIENTS) if engine.done[client] > 30]
    states = engine.client_states()
    apart = [float(np.abs(states[client]["easgd"]["weight"] - centre).max()) for client in took_part]
    assert len(took_part) >= 3
    assert max(apart) < 0.2 < 1.0 < float(np.abs(OWN - CENTRE).max())
