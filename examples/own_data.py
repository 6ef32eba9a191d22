"""Simulate forty hospitals that learn one linear model; job, data and model are Python objects.

Run it with: python examples/own_data.py
"""

from __future__ import annotations

import numpy as np
from torch import nn

from fedplat import Dataset, Learner, Run, simulate
from fedplat.job import Selection
from fedplat.simulation import FleetOptions, SimulationOptions, make_job
from fedplat.simulation.clients.distributions import UniformRange
from fedplat.simulation.data import partitioners


def data() -> Dataset:
    """Return examples of one linear function with noise."""
    rng = np.random.default_rng(7)
    inputs = rng.normal(size=(5000, 4)).astype(np.float32)
    targets = inputs @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)
    targets += 0.1 * rng.normal(size=targets.shape).astype(np.float32)
    return Dataset.from_arrays(inputs[:4000], targets[:4000], (inputs[4000:], targets[4000:]))


def main() -> Run:
    job = make_job(
        name="hospitals",
        rounds=15,
        selection=Selection(goal=5, over_selection=1.2),
        config={"epochs": 1, "batch_size": 32, "learning_rate": 0.05},
    )
    hospitals = SimulationOptions(
        target_metric="loss",
        partition=partitioners.Quantity(clients=40, distribution="lognormal", min_examples=10),
        fleet=FleetOptions(speed=UniformRange(low=10.0, high=200.0)),
    )
    learner = Learner(model=lambda: nn.Linear(4, 1), loss=nn.functional.mse_loss)
    return simulate(job, hospitals, data=data(), learner=learner)


if __name__ == "__main__":
    run = main()
    assert run.model is not None
    assert run.summary.best is not None
    weights = ", ".join(f"{value:.3f}" for value in run.model["weight"][0])
    print(f"loss {run.summary.best.value:.4f} after {run.result.totals.duration_s:.0f} virtual seconds; w = {weights}")
