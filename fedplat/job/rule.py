"""The aggregation rule of a job: its options, a robust rule, clipping and noise, wrapped in this order."""

from __future__ import annotations

from fedplat import aggregate, privacy
from fedplat.job.privacy import build_release
from fedplat.job.spec import JobSpec


def build_rule(spec: JobSpec, seed: int = 0, noise: privacy.Noise | None = None) -> aggregate.Rule:
    """Return the aggregation rule of a job; `seed` seeds its draws in an attempt.

    `aggregate.seed_of(job_id, version)` is the seed of the attempt that leads to that version. `noise`, fresh for each
    attempt, is what a private job makes its releases with; without it, the rule makes none.
    """
    rule = spec.aggregation.build()
    if spec.robust is not None:
        rule = spec.robust.build(seed)(rule)
    rule = spec.updates.clip(rule)
    release = build_release(spec)
    return rule if release is None else privacy.privatized(release, noise)(rule)
