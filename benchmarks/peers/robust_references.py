"""Compute robust references with byzfl and Flower, for tests/core/aggregate/test_robust_references.py.

.venv-peers/bin/python benchmarks/peers/robust_references.py > tests/core/aggregate/robust_references.json

byzfl's Krum uses n - f - 1 neighbours, the paper's n - f - 2. So it gets f + 1 here, and Multi-Krum then keeps
n - f - 1 updates, as the name of the reference states.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from byzfl_parts import aggregators, attacks, preaggregators
from flwr.server.strategy import aggregate as flower

F = 3
NUM_HONEST = 12
SIZE = 5
NUM_CENTRED_ROUNDS = 3


def cohorts() -> dict[str, np.ndarray]:
    """Return honest updates, and F more by each attack."""
    honest = np.random.default_rng(5).normal(0.1, 0.3, (NUM_HONEST, SIZE)).astype(np.float32)
    bad = {
        "sign flipping": attacks.SignFlipping()(honest),
        "inner product manipulation": attacks.InnerProductManipulation(2.0)(honest),
        "a little is enough": attacks.ALittleIsEnough(1.5)(honest),
        "huge": np.full(SIZE, 1e6, np.float32),
    }
    return {name: np.vstack([honest, np.tile(one, (F, 1))]).astype(np.float32) for name, one in bad.items()}


def results_of(updates: np.ndarray) -> dict[str, Any]:
    """Return the result of each rule for a cohort."""
    wide = updates.astype(np.float64)
    results = [([row], 1) for row in wide]
    clipping = aggregators.CenteredClipping(L=2, tau=0.5)
    mixed = preaggregators.NNM(F)(wide)
    return {
        "byzfl median": aggregators.Median()(wide),
        "byzfl trimmed mean": aggregators.TrMean(F)(wide),
        "byzfl krum": aggregators.Krum(F + 1)(wide),
        "byzfl multi-krum, one less": aggregators.MultiKrum(F + 1)(wide),
        "byzfl geometric median, 3 iterations": aggregators.GeometricMedian(nu=0.1, T=3)(wide),
        "byzfl geometric median": aggregators.GeometricMedian(nu=1e-6, T=2000)(wide),
        "byzfl centered clipping": np.stack([clipping(wide.copy()) for _ in range(NUM_CENTRED_ROUNDS)]),
        "byzfl nearest, median": aggregators.Median()(mixed),
        "byzfl nearest, geometric median": aggregators.GeometricMedian(nu=0.1, T=3)(mixed),
        "flower median": flower.aggregate_median(results)[0],
        "flower trimmed mean": flower.aggregate_trimmed_avg(results, F / len(wide))[0],
        "flower krum": flower.aggregate_krum(results, F, 0)[0],
        "flower multi-krum": flower.aggregate_krum(results, F, len(wide) - F)[0],
        "flower bulyan": flower.aggregate_bulyan(list(results), F, flower.aggregate_krum, to_keep=0)[0],
    }


def main() -> None:
    """Print the references."""
    found = {
        name: {
            "updates": [[float(value) for value in row] for row in updates],
            "results": {rule: np.asarray(result).tolist() for rule, result in results_of(updates).items()},
        }
        for name, updates in cohorts().items()
    }
    json.dump({"byzantine": F, "cohorts": found}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
