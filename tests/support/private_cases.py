"""A small linear model whose examples are protected, and what a few lines of NumPy make of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedplat.aggregate import LocalFedProx
from fedplat.client_state import ClientState
from fedplat.model import Parameters
from fedplat.pytorch import dp
from fedplat.pytorch.training import Examples, Learner, LocalOptions, LocalTraining, TensorExamples, Trainee, train

Wide = npt.NDArray[np.float64]
KINDS = ("flat", "per_layer", "ghost")
RNG = np.random.default_rng(5)
INPUTS, TARGETS = RNG.normal(size=(11, 3)), RNG.normal(size=(11, 1))
START: dict[str, Wide] = {"weight": RNG.normal(size=(1, 3)), "bias": RNG.normal(size=1)}
PLAIN: dict[str, Any] = {"epochs": 3, "batch_size": 4, "learning_rate": 0.05}
QUIET: dict[str, Any] = {"dp": "flat", "dp_noise_multiplier": 1e-9, "dp_max_grad_norm": 1e3, "dp_delta": 1e-5}
"""Next to no noise, and nothing is clipped."""


def quiet(**more: Any) -> dict[str, Any]:
    return QUIET | more


LEARNER = Learner(model=lambda: nn.Linear(3, 1), loss=nn.functional.mse_loss)
TENSORS = (torch.tensor(INPUTS, dtype=torch.float32), torch.tensor(TARGETS, dtype=torch.float32))
EXAMPLES = TensorExamples(*TENSORS)


def start() -> Parameters:
    return Parameters.from_arrays({name: value.astype("f4") for name, value in START.items()})


def work(
    examples: Examples = EXAMPLES, memory: ClientState | None = None, noise_seed: int = 7, **options: Any
) -> LocalTraining:
    given = LocalOptions.from_config(PLAIN | options)
    return LocalTraining(
        examples=examples,
        options=given,
        seed=1,
        noise_seed=noise_seed,
        client_state=ClientState() if memory is None else memory,
    )


def trained(training: LocalTraining, learner: Learner = LEARNER) -> tuple[dict[str, Wide], dict[str, float]]:
    parameters = start()
    metrics = train(Trainee(learner), parameters, training)
    return {name: value.astype(np.float64) for name, value in parameters.items()}, dict(metrics)


def reference(training: LocalTraining, drawn: list[npt.NDArray[np.int64]]) -> dict[str, Wide]:
    """w ← w - η v with v ← m v + Σ clipped gᵢ / E|batch| + decay w + pull (w - w₀); a step's examples are given."""
    options, algorithm = training.options, training.options.algorithm
    mu = algorithm.mu if isinstance(algorithm, LocalFedProx) else 0.0
    w, v = dict(START), {name: np.zeros_like(value) for name, value in START.items()}
    expected = min(len(INPUTS), options.batch_size * options.accumulate)
    for examples in drawn:
        total = {name: np.zeros_like(value) for name, value in START.items()}
        for x, y in zip(INPUTS[examples], TARGETS[examples], strict=True):
            slope = 2 * (x @ w["weight"].T + w["bias"] - y)
            g: dict[str, Wide] = {"weight": slope[:, None] * x[None], "bias": slope}
            norms = {name: float(np.linalg.norm(value)) for name, value in g.items()}
            whole = np.hypot(norms["weight"], norms["bias"])
            for name, value in g.items():
                norm, bound = (norms[name], 2**-0.5) if options.dp == "per_layer" else (whole, 1.0)
                total[name] = total[name] + value * min(1.0, bound * options.dp_max_grad_norm / norm)
        for name, now in w.items():
            slope = total[name] / expected + options.weight_decay * now + mu * (now - START[name])
            v[name] = options.momentum * v[name] + slope
            w[name] = now - options.learning_rate * v[name]
    return w


def draws(training: LocalTraining) -> list[npt.NDArray[np.int64]]:
    """The examples of each step, by the same randomness."""
    options, noise = training.options, dp.make_noise(training.noise_seed)
    size = options.batch_size * options.accumulate
    num_steps = options.epochs * -(-len(INPUTS) // size)
    return [noise.draw_examples(len(INPUTS), min(1.0, size / len(INPUTS))) for _ in range(num_steps)]


def close(found: dict[str, Wide], expected: dict[str, Wide], atol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=atol)
