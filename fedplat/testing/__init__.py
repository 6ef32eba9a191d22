"""Conformance checks for plugins: one call in a test of your own.

>>> from fedplat.aggregate import FedAvg
>>> check_rule(FedAvg(learning_rate=0.5))

fedplat's own plugins of all kinds pass the same checks. A failed check raises `ConformanceError`, whose message states
what was expected, what was found, and why a server or a simulation needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedplat.errors import MissingExtraError
from fedplat.extras import install_command
from fedplat.testing.codecs import check_codec
from fedplat.testing.errors import ConformanceError
from fedplat.testing.learners import check_learner
from fedplat.testing.policies import check_policy, check_staleness
from fedplat.testing.procedures import check_procedure
from fedplat.testing.robust import check_pre_aggregator, check_robust_rule
from fedplat.testing.rules import check_rule
from fedplat.testing.simulated import check_availability, check_distribution, check_partition, check_source

if TYPE_CHECKING:
    import torch

    from fedplat.aggregate import LocalAlgorithmOptions
    from fedplat.metrics import Metric
    from fedplat.simulation.engines.registry import EngineOptions


def check_algorithm(options: LocalAlgorithmOptions) -> None:
    """Check a local algorithm. Raises `ConformanceError` for the first check that fails, and `MissingExtraError`."""
    try:
        import torch
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            f"checks of local algorithms need PyTorch; install it with: {install_command('torch')}"
        ) from exc
    del torch
    from fedplat.testing import algorithms

    algorithms.check_algorithm(options)


def check_metric(metric: Metric, outputs: torch.Tensor | None = None, targets: torch.Tensor | None = None) -> None:
    """Check a metric (extra "torch"). Raises `ConformanceError` for the first check that fails.

    `outputs` and `targets` are the examples to measure; by default 211 examples of ten classes.
    """
    from fedplat.testing import metrics

    metrics.check(metric, outputs, targets)


def check_engine(options: EngineOptions, num_workers: int = 2) -> None:
    """Check a training engine (extra "torch"). Raises `ConformanceError` for the first check that fails.

    The engine trains small networks of six clients. It is created a dozen times, each with `num_workers` processes if
    it has any.
    """
    from fedplat.testing import engines

    engines.check(options, num_workers)


__all__ = [
    "ConformanceError",
    "check_algorithm",
    "check_availability",
    "check_codec",
    "check_distribution",
    "check_engine",
    "check_learner",
    "check_metric",
    "check_partition",
    "check_policy",
    "check_pre_aggregator",
    "check_procedure",
    "check_robust_rule",
    "check_rule",
    "check_source",
    "check_staleness",
]
