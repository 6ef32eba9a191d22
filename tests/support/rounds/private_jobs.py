"""Private jobs."""

from __future__ import annotations

from typing import Any

from support.rounds.driver import Driver, make_job, make_spec

FIXED = {"participation": "fixed", "delta": 1e-6, "noise_multiplier": 1.0}


def private(participation: str = "fixed", selection: dict[str, Any] | None = None, **sections: Any) -> Driver:
    options = {**FIXED, "participation": participation, **sections.pop("privacy", {})}
    spec = make_spec(
        selection={"close": "deadline", **(selection or {})},
        updates={"weighting": "uniform", "clip_norm": 1.0},
        privacy=options,
        **sections,
    )
    return Driver(make_job(spec=spec))
