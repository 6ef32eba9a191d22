"""Warnings about job settings that are allowed but seldom useful."""

from __future__ import annotations

import numpy as np

from fedplat.job.spec import JobSpec
from fedplat.model import Parameters


def warnings(spec: JobSpec, model: Parameters | None = None) -> list[str]:
    """Return a warning for each setting that lets one client dominate a job, or does not suit its initial model."""
    found = [] if model is None else describe_coarse_steps(spec, model)
    updates = spec.updates
    if spec.flower is not None or spec.secure_aggregation is not None or spec.gossip is not None:
        # Its strategy decides what an update may weigh, clients clip and weigh theirs by at most 1, or no one sees one.
        return found
    if not (updates.clips or updates.max_norm or spec.robust is not None):
        found.append(
            "updates: nothing bounds the norm of a single update"
            + (
                f", which may be {spec.outlier_factor:g} times the median of its attempt"
                if spec.outlier_factor
                else ", and updates.outlier_factor = 0 keeps outliers too"
            )
            + "; set updates.clip_norm, updates.adaptive_clip or updates.max_norm, or choose a rule with [robust]"
        )
    if updates.weighting == "examples" and spec.privacy is None and not spec.max_weight_factor:
        found.append(
            "updates.max_weight_factor = 0: a client that claims updates.max_examples = "
            f"{updates.max_examples:g} examples may outweigh all others; set a factor, or a lower max_examples"
        )
    return found


def describe_coarse_steps(spec: JobSpec, model: Parameters) -> list[str]:
    """Return a warning if secure aggregation rounds updates to steps that are larger than the model's own weights.

    A step is the clip norm divided by the number of levels, so a huge norm, meant as "no clipping", leaves little of an
    update. The noise of a private job is larger than a step.
    """
    options = spec.secure_aggregation
    if options is None or spec.privacy is not None:
        return []
    step = spec.updates.clip_norm / (2 ** (options.bits - 1) - 1)
    squares, count = 0.0, 0
    for block in model.to_blocks():
        squares += float(np.square(block, dtype=np.float64).sum())
        count += int(np.count_nonzero(block))
    size = (squares / count) ** 0.5 if count else _USUAL_WEIGHT
    if step <= size:
        return []
    return [
        f"updates.clip_norm = {spec.updates.clip_norm:g}: with secure_aggregation.bits = {options.bits} entries of "
        f"updates are rounded to multiples of {step:.3g}, and the model's weights are about {size:.3g}; set a "
        "clip_norm near the norm of an update, or more bits"
    ]


_USUAL_WEIGHT = 0.1
"""The size of weights, for a model of zeros."""
