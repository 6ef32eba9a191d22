"""Measure the seconds of byzfl and Flower for robust rules on updates in memory; print one JSON object.

.venv-peers/bin/python benchmarks/peers/robust_times.py UPDATES PARAMETERS BYZANTINE
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from byzfl_parts import aggregators, preaggregators
from flwr.server.strategy import aggregate as flower

REPEATS = 3


def seconds(function: Callable[[], object]) -> float:
    """Return the median of a few runs, after one warm-up run."""
    found: list[float] = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def main(num_updates: int, num_parameters: int, f: int) -> None:
    """Time each rule that byzfl or Flower has."""
    rng = np.random.default_rng(1)
    updates = rng.standard_normal((num_updates, num_parameters), np.float32)
    results = [([row], 1) for row in updates]
    nearest, median = preaggregators.NNM(f), aggregators.Median()
    byzfl = {
        "median": lambda: median(updates),
        "trimmed mean": lambda: aggregators.TrMean(f)(updates),
        "Krum": lambda: aggregators.Krum(f)(updates),
        "Multi-Krum": lambda: aggregators.MultiKrum(f)(updates),
        "geometric median": lambda: aggregators.GeometricMedian(nu=1e-6, T=10)(updates),
        "centered clipping": lambda: aggregators.CenteredClipping(L=1, tau=10.0)(updates),
        "nearest, then median": lambda: median(nearest(updates)),
    }
    flwr = {
        "median": lambda: flower.aggregate_median(results),
        "trimmed mean": lambda: flower.aggregate_trimmed_avg(results, f / num_updates),
        "Krum": lambda: flower.aggregate_krum(results, f, 0),
        "Multi-Krum": lambda: flower.aggregate_krum(results, f, num_updates - f),
    }
    found = {
        "byzfl": {name: seconds(rule) for name, rule in byzfl.items()},
        "flower": {name: seconds(rule) for name, rule in flwr.items()},
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
