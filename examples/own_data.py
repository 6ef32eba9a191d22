"""Simulate hospitals that learn one linear model, with data and a model defined in Python.

Run it with: python examples/own_data.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from fedplat.pytorch.training import Learner
from fedplat.simulation import Dataset, Federation, Run, simulate
from fedplat.simulation.data import deal, partitioners
from fedplat.simulation.scenario.file import parse

JOB = """
name = "hospitals"
population = "hospitals"
trainer = "linear"
rounds = 15
model = { initial = "unused:here" } # the learner creates the initial model
config = { epochs = 1, batch_size = 32, learning_rate = 0.05 }
selection = { goal = 5, over_selection = 1.2 }
simulation = { target_metric = "loss", fleet = { speed = { kind = "uniform", low = 10.0, high = 200.0 } } }
"""


def data() -> Federation:
    """Return the data of forty hospitals of unequal size: one linear function with noise."""
    rng = np.random.default_rng(7)
    inputs = rng.normal(size=(5000, 4)).astype(np.float32)
    targets = inputs @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)
    targets += 0.1 * rng.normal(size=targets.shape).astype(np.float32)
    dataset = Dataset.from_arrays(inputs[:4000], targets[:4000], (inputs[4000:], targets[4000:]))
    return deal(dataset, partitioners.Quantity(clients=40, distribution="lognormal", min_examples=10), seed=7)


def main() -> Run:
    learner = Learner(model=lambda: nn.Linear(4, 1), loss=nn.functional.mse_loss)
    return simulate(parse(JOB, Path.cwd()), data=data(), learner=learner)


if __name__ == "__main__":
    run = main()
    assert run.model is not None
    assert run.summary.best is not None
    weights = ", ".join(f"{value:.3f}" for value in run.model["weight"][0])
    print(f"loss {run.summary.best.value:.4f} after {run.result.totals.duration_s:.0f} virtual seconds; w = {weights}")
