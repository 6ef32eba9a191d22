"""Conformance checks for plugins: one call in a test of your own.

>>> from fedplat.aggregate import FedAvg
>>> check_rule(FedAvg(learning_rate=0.5))

fedplat's own rules, policies, codecs, partitions and learners pass the same checks. A failed check raises
`ConformanceError`, whose message states what was expected, what was found, and why a server needs it.
"""

from __future__ import annotations

from fedplat.testing.codecs import check_codec
from fedplat.testing.errors import ConformanceError
from fedplat.testing.learners import check_learner
from fedplat.testing.partitions import check_partition
from fedplat.testing.policies import check_policy
from fedplat.testing.rules import check_rule

__all__ = ["ConformanceError", "check_codec", "check_learner", "check_partition", "check_policy", "check_rule"]
