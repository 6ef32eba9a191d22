"""Client-level differential privacy: the job's options, the noise, and the cost of releases.

`options.py` is the table of the job file and the accountant's view of a release, `noise.py` the noise, and
`accounting.py` the arithmetic (with the extra `privacy`). `fedplat.aggregate.clipping` turns a rule's results into
releases.
"""

from __future__ import annotations

from fedplat.privacy.noise import KEY_BYTES, Noise, Tree
from fedplat.privacy.options import Charge, Mechanism, Privacy, PublishedMetrics, tree_sensitivity

__all__ = ["KEY_BYTES", "Charge", "Mechanism", "Noise", "Privacy", "PublishedMetrics", "Tree", "tree_sensitivity"]
