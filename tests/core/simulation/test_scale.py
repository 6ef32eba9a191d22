"""A fleet of 20,000 clients, scheduling alone: the numbers are pinned, since they follow from the seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from fedplat.rounds import Proposal
from fedplat.rounds.commands import Assign
from fedplat.rounds.events import Event
from fedplat.simulation.recording.result import Result
from fedplat.simulation.run import Hooks, Simulation, run
from support.simulation.cases import job, make_fleet

PHONES: dict[str, Any] = {
    "speed": {"kind": "lognormal", "median": 10.0, "sigma": 0.8},
    "examples": {"kind": "lognormal", "median": 200.0, "sigma": 0.5},
    "availability": {"kind": "diurnal", "offset_h": {"kind": "empirical", "values": [-8.0, 0.0, 8.0]}},
    "labels": {"memory_gb": {"2": 0.4, "4": 0.6}},
    "fails": 0.03,
    "vanishes": 0.03,
    "noise": 0.2,
    "batch_s": 1.0,
}


def phones(seed: int = 1) -> Result:
    fleet = make_fleet(20_000, 7, **PHONES)
    spec = job(60, 20, selection={"where": "memory_gb >= 2", "min_fraction": 0.8}, deadlines={"training_s": 60.0})
    return run(Simulation(spec=spec, fleet=fleet, seed=seed, model_bytes=1e6))


@dataclasses.dataclass(frozen=True)
class Pinned:
    counts: dict[str, int]
    attempts: int
    check_ins: int
    refused: int
    lost: int
    distinct_clients: int
    events: int

    @classmethod
    def of(cls, result: Result) -> Pinned:
        totals = result.totals
        return cls(**{field.name: getattr(totals, field.name) for field in dataclasses.fields(cls)})


DURATION_S = 949.9023066361126
PINNED = Pinned(
    counts={"FAILED": 36, "LATE": 20, "MERGED": 1198, "SURPLUS": 306},
    attempts=20,
    check_ins=19894,
    refused=17128,
    lost=54,
    distinct_clients=1386,
    events=39502,
)


@pytest.mark.slow
def test_twenty_thousand_clients_give_the_same_numbers_everywhere() -> None:
    result = phones()
    assert result.status == "COMPLETED"
    assert Pinned.of(result) == PINNED
    assert result.totals.duration_s == pytest.approx(DURATION_S, rel=1e-6)
    slow, fast = result.groups[0], result.groups[9]
    assert (slow.name, fast.name) == ("speed 1/10", "speed 10/10")
    assert slow.over < 0.5 < 1.0 < fast.over
    assert phones().to_dict(clients=True) == result.to_dict(clients=True)


@pytest.mark.slow
def test_no_client_takes_part_too_often_or_too_soon_however_many_there_are() -> None:
    most, rest, rounds_of = 2, 3, dict[str, set[int]]()

    def note(_: Sequence[Event], __: float, proposal: Proposal) -> None:
        for command in proposal.commands:
            if isinstance(command, Assign):
                rounds_of.setdefault(command.client_id, set()).add(command.key.round)

    spec = job(
        300,
        12,
        selection={"close": "deadline", "min_separation": rest, "min_fraction": 0.8},
        deadlines={"training_s": 60.0},
        updates={"weighting": "uniform", "clip_norm": 1.0},
        privacy={"participation": "min_separation", "delta": 1e-6, "noise_multiplier": 1.0, "max_participations": most},
    )
    fleet = make_fleet(20_000, 7, **{**PHONES, "availability": {"kind": "always"}})
    result = run(Simulation(spec=spec, fleet=fleet, seed=1), Hooks(trace=note))
    assert result.status == "COMPLETED"
    assert {len(rounds) for rounds in rounds_of.values()} == {1, most}
    pairs = [sorted(rounds) for rounds in rounds_of.values() if len(rounds) == most]
    assert min(later - earlier for earlier, later in pairs) > rest
