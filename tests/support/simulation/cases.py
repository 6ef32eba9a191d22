"""Small simulations for tests."""

from __future__ import annotations

from typing import Any

from fedplat.config.plugins import BUILTIN
from fedplat.job import JobSpec
from fedplat.simulation.clients import Fleet, FleetOptions, build_fleet
from support.rounds.driver import make_spec

BAD: dict[str, Any] = {
    "speed": {"kind": "lognormal", "median": 5.0, "sigma": 1.0},
    "upload": {"kind": "uniform", "low": 1e4, "high": 1e6},
    "availability": {"kind": "probability", "probability": 0.7, "slot_s": 120.0},
    "labels": {"region": {"eu": 0.6, "us": 0.4}},
    "fails": 0.05,
    "vanishes": 0.05,
    "away_s": 30.0,
    "noise": 0.3,
}
"""Clients that are slow, fail, vanish and come and go."""


def make_fleet(num_clients: int = 40, seed: int = 3, **options: Any) -> Fleet:
    return build_fleet(BUILTIN.convert({"num_clients": num_clients, **options}, FleetOptions), seed)


def job(goal: int = 8, rounds: int = 6, **sections: Any) -> JobSpec:
    deadlines = {"selection_s": 60.0, "training_s": 60.0, "upload_s": 30.0} | sections.pop("deadlines", {})
    selection = {"over_selection": 1.3, "min_fraction": 0.5} | sections.pop("selection", {})
    return make_spec(goal, rounds, deadlines=deadlines, selection=selection, **sections)
