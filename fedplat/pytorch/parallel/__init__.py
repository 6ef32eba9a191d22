"""Training of one model by several ranks that each have a part of it (extra "torch").

`fedplat.parallel.Parallel` is the layout. `plan.py` names the parts of a module and cuts it for a pipeline, `apply.py`
places this process in the layout and divides the layers, `divided_module.py` reads and writes their values, and
`gradients.py` computes steps. The order is that of torchtitan (Liang et al. 2024, arXiv 2410.06511): stages, tensor
parallelism, recomputation, sharding.
"""

from __future__ import annotations

from fedplat.pytorch.parallel.apply import Layout, make_layout
from fedplat.pytorch.parallel.evaluation import ParallelTrainee, evaluate_parts
from fedplat.pytorch.parallel.gradients import make_gradients
from fedplat.pytorch.parallel.plan import ParallelPlan

__all__ = ["Layout", "ParallelPlan", "ParallelTrainee", "evaluate_parts", "make_gradients", "make_layout"]
