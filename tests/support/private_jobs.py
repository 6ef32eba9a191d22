"""Private jobs, as job files."""

from __future__ import annotations

from typing import Any

from support.jobs import job_file

DELTA = 1e-6


def private(privacy: str = "noise_multiplier = 10.0", rounds: int = 4, name: str = "private", **more: Any) -> str:
    table = f'[privacy]\nparticipation = "fixed"\ndelta = {DELTA}\n{privacy}\n'
    updates = '[updates]\nweighting = "uniform"\nclip_norm = 1.0\n'
    return job_file(name, rounds, close="deadline", more=updates + table, **more)
