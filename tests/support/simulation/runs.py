"""Small simulations, and results made by hand, for the tests of what is done with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedplat.simulation.recording.result import AttemptResult, ParticipationCounts, Result, Totals

DIGITS = """
name = "digits"
population = "demo"
trainer = "digits"
rounds = 4

[model]
initial = "fedplat.pytorch.models:digits_2nn"

[config]
epochs = 1
batch_size = 32
learning_rate = 0.3

[selection]
goal = 3
over_selection = 1.5
min_fraction = 0.5

[simulation]
target = 0.05
engine = "loop"

[simulation.data]
source = "digits"

[simulation.partition]
scheme = "dirichlet"
clients = 20
alpha = 0.5
min_examples = 5

[simulation.fleet]
speed = { kind = "lognormal", median = 50.0 }
fails = 0.05

[simulation.fleet.labels.region]
eu = 0.5
us = 0.5
"""


def write_digits(folder: Path, more: str = "") -> Path:
    path = folder / "digits.toml"
    path.write_text(DIGITS + more)
    return path


def attempt(number: int, values: dict[str, float], **more: object) -> AttemptResult:
    """Round `number`, which ended at 10 times that."""
    known = {"phase": "COMMITTED", "kind": "TRAIN", "attempt": 1, "opened_at": 10.0 * (number - 1)} | more
    return AttemptResult(
        round=number,
        collecting_at=10.0 * (number - 1),
        ended_at=10.0 * number,
        version=number,
        evaluation=values,
        **known,  # pyright: ignore[reportArgumentType]
    )


def result(*attempts: AttemptResult) -> Result:
    totals = Totals(
        duration_s=attempts[-1].ended_at,
        rounds=len(attempts),
        attempts=len(attempts),
        abandoned=0,
        assigned=4,
        counts={"MERGED": 4},
        lost=0,
        check_ins=0,
        refused=0,
        distinct_clients=2,
        bytes_down=0.0,
        bytes_up=0.0,
        events=0,
        batches=0,
    )
    counts = np.array([1, 3, 0])
    return Result(
        job="made",
        seed=0,
        num_clients=3,
        status="COMPLETED",
        reason="",
        attempts=attempts,
        totals=totals,
        staleness={0: 4},
        groups=(),
        participation=ParticipationCounts(assigned=counts, merged=counts, late=counts * 0, failed=counts * 0),
    )
