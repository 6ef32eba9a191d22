"""Client-level differential privacy: the job's options, the noise, and the cost of releases.

`options.py` is the table of the job file, `noise.py` the noise, `releases.py` the accountant's view of a
release, and `accounting.py` the arithmetic (with the extra `privacy`). `fedplat.aggregate.private` turns a rule's
results into releases.
"""

from __future__ import annotations

from fedplat.privacy.noise import KEY_BYTES, Noise, Tree
from fedplat.privacy.options import Privacy, PublishedMetrics
from fedplat.privacy.releases import Charge, Mechanism, tree_sensitivity

__all__ = ["KEY_BYTES", "Charge", "Mechanism", "Noise", "Privacy", "PublishedMetrics", "Tree", "tree_sensitivity"]
