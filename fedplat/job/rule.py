"""The aggregation rule of a job: its options, wrapped by a robust rule, clipping and noise, in this order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fedplat import aggregate, codecs, errors, model, privacy
from fedplat.aggregate import clipping
from fedplat.config import plugins, user_code
from fedplat.job import secure
from fedplat.job.privacy import build_release, calibrate
from fedplat.job.spec import JobSpec


def build_rule(
    spec: JobSpec, seed: int = 0, noise: privacy.Noise | None = None, keep_step: Callable[[bytes], None] | None = None
) -> aggregate.Rule:
    """Return the aggregation rule of a job; `seed` seeds its random draws in an attempt.

    `aggregate.seed_of(job_id, version)` is the seed of the attempt that makes that version. `noise`, fresh for each
    attempt, is added to the releases of a private job; without it, the rule cannot release anything. With `keep_step`,
    the rule of a job with a downlink encodes its step, and calls `keep_step` with the result.

    Raises `PluginError` or `UserCodeError` if a plugin builds nothing of use: it may fail at any call.
    """
    if spec.secure_aggregation is not None:
        return build_secure_rule(spec, seed, keep_step)
    rule = plugins.build_checked(spec.aggregation, aggregate.Rule, "aggregation.rule")
    if spec.privacy is not None:
        rule = aggregate.restrict_to_mean(rule)  # also a plugin sees only what is released
    if spec.robust is not None:
        with user_code.wrap_errors(f'robust.rule = "{plugins.name_of(spec.robust.rule)}": build()'):
            rule = spec.robust.build(seed)(rule)
    rule = aggregate.average_statistics(spec.updates.clip(rule))
    if (release := build_release(spec)) is not None:
        rule = clipping.privatize(release, noise)(rule)
        requirements = dataclasses.replace(rule.requirements, misfit=_refuse_statistics(rule.requirements.misfit))
        rule = dataclasses.replace(rule, requirements=requirements)
    return _compress_step(spec, rule, seed, keep_step)


def build_secure_rule(spec: JobSpec, seed: int = 0, keep_step: Callable[[bytes], None] | None = None) -> aggregate.Rule:
    """Return the rule of a job with secure aggregation, as `build_rule` does too.

    It receives the mean of the updates (`secure.mean_update`) as the only update of an attempt, with weight 1. Clients
    have clipped and weighed theirs, and added the noise.
    """
    inner = plugins.build_checked(spec.aggregation, aggregate.Rule, "aggregation.rule")
    requirements = dataclasses.replace(inner.requirements, misfit=_misfit(spec, inner.requirements.misfit))
    rule = dataclasses.replace(aggregate.restrict_to_mean(inner), requirements=requirements)
    rule = aggregate.average_statistics(rule)
    return _compress_step(spec, rule, seed, keep_step)


def _misfit(spec: JobSpec, inner: Callable[[model.Schema], str]) -> Callable[[model.Schema], str]:
    def misfit(schema: model.Schema) -> str:
        if schema.carry == "max":
            return (
                'the model carries its integer entries by "max", which needs those of single clients; a job with '
                '[secure_aggregation] needs a model that keeps them (carry = "keep")'
            )
        if spec.privacy is not None and (problem := aggregate.describe_statistics(schema)):
            return problem
        try:
            secure.build_encoding(calibrate(spec), schema.num_floating)
        except (errors.SecureAggregationError, errors.JobFileError) as exc:
            return str(exc)
        return inner(schema)

    return misfit


def _refuse_statistics(inner: Callable[[model.Schema], str]) -> Callable[[model.Schema], str]:
    return lambda schema: aggregate.describe_statistics(schema) or inner(schema)


def _compress_step(
    spec: JobSpec, rule: aggregate.Rule, seed: int, keep_step: Callable[[bytes], None] | None
) -> aggregate.Rule:
    codec = spec.compression.downlink
    if keep_step is None or codec is None:
        return rule
    built = plugins.build_checked(codec, codecs.Codec, "compression.downlink.codec")
    return aggregate.compress_step(built, seed, keep_step)(rule)
