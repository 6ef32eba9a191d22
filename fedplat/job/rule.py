"""The aggregation rule of a job: its options, wrapped by a robust rule, clipping and noise, in this order."""

from __future__ import annotations

from collections.abc import Callable

from fedplat import aggregate, codecs, privacy, user_code
from fedplat.job.privacy import build_release
from fedplat.job.spec import JobSpec
from fedplat.plugins import build_checked, name_of


def build_rule(
    spec: JobSpec,
    seed: int = 0,
    noise: privacy.Noise | None = None,
    keep_step: Callable[[bytes], None] | None = None,
) -> aggregate.Rule:
    """Return the aggregation rule of a job; `seed` seeds its random draws in an attempt.

    `aggregate.seed_of(job_id, version)` is the seed of the attempt that makes that version. `noise`, fresh for each
    attempt, is added to the releases of a private job; without it, the rule cannot release anything. With `keep_step`,
    the rule of a job with a downlink encodes its step, and calls `keep_step` with the result.

    Raises `PluginError` or `UserCodeError` if a plugin builds nothing of use: it may fail at any call.
    """
    rule = build_checked(spec.aggregation, aggregate.Rule, "aggregation.rule")
    if spec.privacy is not None:
        rule = aggregate.restrict_to_mean(rule)  # also a plugin sees only what is released
    if spec.robust is not None:
        with user_code.wrap_errors(f'robust.rule = "{name_of(spec.robust.rule)}": build()'):
            rule = spec.robust.build(seed)(rule)
    rule = spec.updates.clip(rule)
    if (release := build_release(spec)) is not None:
        rule = privacy.privatize(release, noise)(rule)
    if keep_step is not None and (codec := spec.compression.downlink) is not None:
        built = build_checked(codec, codecs.Codec, "compression.downlink.codec")
        rule = aggregate.compress_step(built, seed, keep_step)(rule)
    return rule
