"""Client-level differential privacy: what a job promises, the noise that keeps it, and what releases cost.

`options.py` is the table of the job file, `mechanism.py` the wrapper that makes releases of a rule's results,
`noise.py` and `tree.py` the noise, `releases.py` what an accountant is told of it. `accounting.py` does the arithmetic,
with the extra `privacy`.
"""

from __future__ import annotations

from fedplat.privacy.mechanism import Release, privatize
from fedplat.privacy.noise import KEY_BYTES, Noise
from fedplat.privacy.options import Privacy, PublishedMetrics
from fedplat.privacy.releases import Charge, Mechanism, tree_sensitivity
from fedplat.privacy.tree import Tree

__all__ = [
    "KEY_BYTES",
    "Charge",
    "Mechanism",
    "Noise",
    "Privacy",
    "PublishedMetrics",
    "Release",
    "Tree",
    "privatize",
    "tree_sensitivity",
]
