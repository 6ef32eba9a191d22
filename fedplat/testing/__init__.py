"""Conformance checks for plugins: one call in a test of your own.

>>> from fedplat.aggregate import FedAvg
>>> check_rule(FedAvg(learning_rate=0.5))

fedplat's own rules, policies, codecs, partitions and local algorithms pass the same checks. A failed check raises
`ConformanceError`, whose message states what was expected, what was found, and why a server needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedplat.errors import MissingExtraError
from fedplat.testing.codecs import check_codec
from fedplat.testing.errors import ConformanceError
from fedplat.testing.partitions import check_partition
from fedplat.testing.policies import check_policy
from fedplat.testing.rules import check_rule

if TYPE_CHECKING:
    from fedplat.aggregate import LocalAlgorithmOptions


def check_algorithm(options: LocalAlgorithmOptions) -> None:
    """Check a local algorithm. Raises `ConformanceError` for the first check that fails, and `MissingExtraError`."""
    try:
        import torch
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            "checks of local algorithms need PyTorch; install it with: pip install 'fedplat[torch]'"
        ) from exc
    del torch
    from fedplat.testing import algorithms

    algorithms.check_algorithm(options)


__all__ = ["ConformanceError", "check_algorithm", "check_codec", "check_partition", "check_policy", "check_rule"]
