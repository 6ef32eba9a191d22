"""Compute references with Flower's strategies, for tests/core/aggregate/test_server_references.py.

.venv-peers/bin/python benchmarks/peers/server_references.py > tests/core/aggregate/server_references.json

Client models are base + update in float32, as in Flower. Each strategy continues from its own models.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

NUM_ROUNDS = 4
EXAMPLES = (3, 10, 1, 7, 31)
SIZE = 12
# The arguments of FedAdagrad, FedAdam and FedYogi; the first has no betas.
ADAPTIVE = {"eta": 0.03, "tau": 0.01}
BETAS = {"beta_1": 0.8, "beta_2": 0.95}


def clipping(base: Any) -> flower.DifferentialPrivacyServerSideAdaptiveClipping:
    """Without noise, its wrapper only does adaptive clipping."""
    return flower.DifferentialPrivacyServerSideAdaptiveClipping(
        base,
        noise_multiplier=0.0,
        num_sampled_clients=len(EXAMPLES),
        initial_clipping_norm=0.4,
        target_clipped_quantile=0.6,
        clip_norm_lr=0.3,
        clipped_count_stddev=0.0,
    )


STRATEGIES = {
    "fedavg": lambda: flower.FedAvg(fraction_train=0.0),
    "fedavgm": lambda: flower.FedAvgM(fraction_train=0.0, server_learning_rate=0.5, server_momentum=0.8),
    "fedadagrad": lambda: flower.FedAdagrad(fraction_train=0.0, **ADAPTIVE),
    "fedadam": lambda: flower.FedAdam(fraction_train=0.0, **ADAPTIVE, **BETAS),
    "fedyogi": lambda: flower.FedYogi(fraction_train=0.0, **ADAPTIVE, **BETAS),
    "qfedavg": lambda: flower.QFedAvg(client_learning_rate=0.05, q=0.7, fraction_train=0.0, train_loss_key="loss"),
    "adaptive clipping": lambda: clipping(flower.FedAvg(fraction_train=0.0)),
}


def rounds() -> list[list[dict[str, Any]]]:
    """Return updates with different scales, and the losses of their base models."""
    rng = np.random.default_rng(9)
    return [
        [
            {
                "update": (rng.exponential() * rng.normal(0.02, 0.2, SIZE)).astype(np.float32),
                "num_examples": examples,
                "loss": float(rng.uniform(0.1, 2.5)),
            }
            for examples in EXAMPLES
        ]
        for _ in range(NUM_ROUNDS)
    ]


def models_of(strategy: Any, base: np.ndarray, updates: list[list[dict[str, Any]]]) -> list[np.ndarray]:
    """Return the models after each round."""
    models, model = [], base
    for number, cohort in enumerate(updates, 1):
        # With fraction_train = 0 no client is selected, and the strategy only stores the model of the round.
        list(strategy.configure_train(number, record(model), ConfigRecord(), None))
        arrays, _ = strategy.aggregate_train(number, [reply(model, report) for report in cohort])
        model = arrays["w"].numpy()
        models.append(model)
    return models


def record(model: np.ndarray) -> ArrayRecord:
    """Convert a model to Flower's type."""
    return ArrayRecord({"w": Array(model.copy())})


def reply(model: np.ndarray, report: dict[str, Any]) -> SimpleNamespace:
    """Return the reply of a client."""
    metrics = MetricRecord({"num-examples": report["num_examples"], "loss": report["loss"]})
    content = RecordDict({"arrays": record(model + report["update"]), "metrics": metrics})
    # A Message of Flower requires a run; strategies only read these fields.
    return SimpleNamespace(content=content, has_error=lambda: False)


def main() -> None:
    """Print the references."""
    logging.disable(logging.CRITICAL)
    updates, base = rounds(), np.random.default_rng(8).normal(size=SIZE).astype(np.float32)
    with contextlib.redirect_stdout(sys.stderr):
        results = {name: models_of(make(), base, updates) for name, make in STRATEGIES.items()}
    found = {"base": base, "rounds": updates, "models": results}
    json.dump(found, sys.stdout, indent=1, default=lambda array: [float(value) for value in array])
    print()


if __name__ == "__main__":
    main()
