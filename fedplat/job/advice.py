"""Warnings about job settings that are allowed but seldom useful."""

from __future__ import annotations

from fedplat.job.spec import JobSpec


def warnings(spec: JobSpec) -> list[str]:
    """Return a warning for each setting that lets a single client dominate a job."""
    found: list[str] = []
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
