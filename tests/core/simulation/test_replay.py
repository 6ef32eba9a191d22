"""The events of a simulation, played again to another coordinator, give the same, and break no invariant."""

from __future__ import annotations

from typing import Any

import pytest

from fedplat.job import JobSpec
from fedplat.rounds import JobState, ModelVersion
from fedplat.rounds.events import SilosLost
from fedplat.simulation.clients import FleetOptions, build_fleet
from fedplat.simulation.clients.distributions import UniformRange
from fedplat.simulation.clients.fleet import LinkOptions, Outage
from fedplat.simulation.driver import Tokens, coordinator_rng
from fedplat.simulation.run import Simulation
from support.rounds import driver as rounds
from support.rounds.silos import silo_spec
from support.simulation.cases import BAD, job, make_fleet
from support.simulation.least_squares import LeastSquares, initial
from support.simulation.recordings import Batch, record
from support.simulation.secure import UPDATES

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive": {"deadlines": {"training_s": 20.0, "adaptive": {"after": 5}}, "selection": {"min_fraction": 0.9}},
    "evaluated": {"evaluation": {"every": 2, "clients": {"evaluator": "digits-eval", "goal": 3, "timeout_s": 10.0}}},
    "buffered": {"rounds": 12, "mode": {"kind": "buffered", "concurrency": 20, "max_staleness": 3}},
    "secure": {"secure_aggregation": {"confirm": True, "threshold": 0.6}, "updates": UPDATES},
    "hopeless": {"selection": {"over_selection": 1.0, "min_fraction": 1.0}, "retry": {"max_attempts": 4}},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch_s", [0.0, 5.0])
def test_the_same_events_give_the_same_changes_and_break_no_invariant(name: str, batch_s: float) -> None:
    spec = job(**CASES[name])
    fleet = make_fleet(50, **BAD, batch_s=batch_s)
    batches = record(Simulation(spec=spec, fleet=fleet, engine=LeastSquares(50), initial=initial(), seed=6))
    assert len(batches) > 50
    play_again(batches, replay(spec, seed=6))


@pytest.mark.parametrize("mode", [{}, {"exchange": "push-sum"}, {"exchange": "ring"}])
def test_the_same_events_of_silos_give_the_same_changes(mode: dict[str, str]) -> None:
    spec = silo_spec(8, 4, mode=mode | {"tolerance": 0.1}, selection={"min_fraction": 0.5})
    fleet = build_fleet(FleetOptions(num_clients=8, speed=UniformRange(1.0, 20.0), vanishes=0.1, away_s=200.0), 1)
    links = LinkOptions(loss=0.2, dead=(Outage(3, 2, 3),))
    simulation = Simulation(spec=spec, fleet=fleet, engine=LeastSquares(8), initial=initial(), seed=6, links=links)
    batches = record(simulation)
    assert any(isinstance(event, SilosLost) for events, _, _ in batches for event in events)
    play_again(batches, replay(spec, seed=6))


def play_again(batches: list[Batch], replayed: rounds.Driver) -> None:
    for events, now, proposal in batches:
        replayed.now = now
        again = replayed.do(*events)  # the ledger checks its invariants here
        assert again.changes == proposal.changes
        assert again.commands == proposal.commands
        assert again.verdicts == proposal.verdicts


def replay(spec: JobSpec, seed: int) -> rounds.Driver:
    """A driver with another coordinator, which has the randomness that the simulator lends to its own."""
    latest = ModelVersion(
        version=0, round=0, attempt=0, digest="version-0", size_bytes=initial().schema.file_size_bytes
    )
    return rounds.Driver(JobState(spec.name, spec, latest), rng=coordinator_rng(seed), new_token=Tokens())
