"""Measure Flower's `aggregate_arrayrecords`, and print the bytes per second. Runs in .venv-peers.

.venv-peers/bin/python benchmarks/peers/flower_aggregate.py PARAMETERS UPDATES
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords


def main(num_parameters: int, num_updates: int) -> None:
    """Aggregate the same four updates repeatedly, with the weights of a mean by examples."""
    rng = np.random.default_rng(1)
    updates = [rng.random(num_parameters, np.float32) for _ in range(4)]
    records = [
        RecordDict({"arrays": ArrayRecord({"w": Array(update)}), "metrics": MetricRecord({"num-examples": 3.0})})
        for update in updates
    ]
    cohort = [records[number % 4] for number in range(num_updates)]
    seconds: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        aggregate_arrayrecords(cohort, "num-examples")
        seconds.append(time.perf_counter() - start)
    print(4 * num_parameters * num_updates / statistics.median(seconds))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
