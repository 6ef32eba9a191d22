"""The aggregation rule of a job, and the mechanism, the calibrated noise and the releases of one with `[privacy]`."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import structs

from fedplat import aggregate, codecs, errors, model, privacy
from fedplat.aggregate import clipping
from fedplat.aggregate.clipping import Release
from fedplat.config import plugins, user_code
from fedplat.job import secure
from fedplat.job.spec import JobSpec
from fedplat.privacy import accounting
from fedplat.privacy.losses import FINE, Precision
from fedplat.sampling import Poisson
from fedplat.sampling.policies import OVERFLOW


def calibrate(spec: JobSpec) -> JobSpec:
    """Return the job with its noise calibrated, and with the number of releases that its budget allows.

    A job without `[privacy]` is returned unchanged. Takes about a second. Raises `JobFileError` if no noise is enough,
    and `MissingExtraError` without the extra `privacy`.
    """
    options = spec.privacy
    if options is None:
        return spec
    most = spec.rounds if options.max_releases is None else min(spec.rounds, options.max_releases)
    try:
        if options.noise_multiplier is None:
            assert options.epsilon is not None
            whole = calibrated_multiplier(spec, most, options.epsilon)
            spec = _with(spec, noise_multiplier=options.model_multiplier(whole))
        elif options.epsilon is not None:
            found = build_mechanism(spec, options.total_multiplier(options.noise_multiplier))
            most = accounting.max_releases(found, options.epsilon, options.delta, most)
            if not most:
                raise ValueError(
                    f"not even one release with noise_multiplier = {options.noise_multiplier:g} is within epsilon = "
                    f"{options.epsilon:g} at delta = {options.delta:g}; expected more of either"
                )
        return _with(spec, max_releases=most)
    except ValueError as exc:
        raise errors.JobFileError(f"privacy: {exc}") from exc


def calibrated_multiplier(spec: JobSpec, releases: int, budget: float, precision: Precision = FINE) -> float:
    """Return the least total noise multiplier of a round with which so many releases are within a budget.

    Raises `ValueError` if no noise is enough.
    """
    assert spec.privacy is not None
    found, last = 1.0, 0.0
    while found > last:  # more noise of clients may need larger steps of the quantizer, and so a little more noise
        last = found
        found = accounting.calibrate(
            build_mechanism(spec, last), releases, budget, spec.privacy.delta, precision
        ).noise_multiplier
        if spec.privacy.trust == "server":
            break
    return found


def _with(spec: JobSpec, **changes: Any) -> JobSpec:
    assert spec.privacy is not None
    return structs.replace(spec, privacy=structs.replace(spec.privacy, **changes))


def find_mechanism(spec: JobSpec) -> privacy.Mechanism | None:
    """Return the mechanism of a job's releases; None if the job is not private, or not calibrated yet."""
    options = spec.privacy
    if options is None or options.noise_multiplier is None:
        return None
    return build_mechanism(spec, options.total_multiplier(options.noise_multiplier))


def plan_charge(spec: JobSpec) -> privacy.Charge | None:
    """Return the charge of all releases that the job may make; None if it is not private, or not calibrated yet."""
    mechanism = find_mechanism(spec)
    if spec.privacy is None or spec.privacy.max_releases is None or mechanism is None:
        return None
    return privacy.Charge(mechanism, spec.privacy.max_releases)


def build_mechanism(spec: JobSpec, total_multiplier: float) -> privacy.Mechanism:
    """Return the mechanism that a private job would have with this total noise multiplier of a round."""
    assert spec.privacy is not None
    if spec.privacy.trust == "none":
        try:
            multiplier = spec.privacy.model_multiplier(total_multiplier)
        except ValueError:  # the metrics alone cost more, so that this is no more than a step of a search
            multiplier = total_multiplier
        steps = secure.least_steps(spec, multiplier)
        return privacy.Mechanism(kind="skellam", noise_multiplier=total_multiplier, steps=steps)
    sampling = spec.selection.sampling
    if isinstance(sampling, Poisson):
        # OVERFLOW is the probability that the cap is reached; given that one client is drawn it may be larger by a
        # factor of 1 / rate.
        overflow = min(1.0, OVERFLOW / sampling.rate)
        return privacy.Mechanism(
            kind="poisson", noise_multiplier=total_multiplier, sampling_probability=sampling.rate, overflow=overflow
        )
    return privacy.Mechanism(
        kind="tree" if spec.privacy.participation == "min_separation" else "fixed",
        noise_multiplier=total_multiplier,
        separation=spec.selection.min_separation + 1,
        max_participations=spec.privacy.max_participations,
    )


def find_mechanism_of(spec: JobSpec, num_survivors: int) -> privacy.Mechanism | None:
    """Return the mechanism of an attempt; with the noise of clients it depends on its smallest group's survivors.

    `num_survivors` is 0 without masks. None as for `find_mechanism`, whose mechanism has the noise of
    `secure.group_minimum` survivors.
    """
    planned = find_mechanism(spec)
    if planned is None or spec.privacy is None or spec.privacy.trust == "server" or not num_survivors:
        return planned
    factor = math.sqrt(num_survivors / secure.group_minimum(spec))
    return structs.replace(planned, noise_multiplier=planned.noise_multiplier * factor)


def charges(spec: JobSpec, unmasked: Sequence[int]) -> list[privacy.Charge]:
    """Return the charges of a job with `privacy.trust = "none"` for all attempts whose masks were requested.

    `unmasked` are the survivors of their smallest groups (`JobState.unmasked`). Every client counts as a part of each
    attempt: another attempt at a round may have the same clients.
    """
    found: list[privacy.Charge] = []
    for num_survivors, releases in sorted(Counter(unmasked).items()):
        if (mechanism := find_mechanism_of(spec, num_survivors)) is not None:
            found.append(privacy.Charge(mechanism, releases))
    return found


def build_release(spec: JobSpec) -> Release | None:
    """Return the parameters that turn an attempt's sum into a release; None if the job is not private."""
    options = spec.privacy
    if options is None:
        return None
    return Release(
        noise_multiplier=options.noise_multiplier,
        clip=spec.updates.adaptive_clip or spec.updates.clip_norm,
        expected_weight=spec.selection.goal * options.expected_weight,
        expected_reports=spec.selection.goal,
        count_deviation=options.count_deviation(spec.selection.goal),
        metrics=options.metrics,
        tree=privacy.Tree(spec.rounds) if options.participation == "min_separation" else None,
    )


def build_rule(
    spec: JobSpec,
    seed: int = 0,
    noise: privacy.Noise | None = None,
    keep_step: Callable[[bytes], None] | None = None,
    round: int = 1,
) -> aggregate.Rule:
    """Return the aggregation rule of a job; `seed` seeds its random draws in an attempt at a round.

    `aggregate.seed_of(job_id, version)` is the seed of the attempt that makes that version. `noise`, fresh for each
    attempt, is added to the releases of a private job; without it, the rule cannot release anything. With `keep_step`,
    the rule of a job with a downlink encodes its step, and calls `keep_step` with the result.

    Raises `PluginError` or `UserCodeError` if a plugin builds nothing of use: it may fail at any call.
    """
    if spec.secure_aggregation is not None:
        return build_secure_rule(spec, seed, keep_step, round)
    rule = plugins.build_checked(spec.aggregation, aggregate.Rule, "aggregation.rule")
    if spec.privacy is not None:
        rule = aggregate.restrict_to_mean(rule)  # also a plugin sees only what is released
    if spec.robust is not None:
        with user_code.wrap_errors(f'robust.rule = "{plugins.name_of(spec.robust.rule)}": build()'):
            rule = spec.robust.build(seed)(rule)
    # Below the noise: what no client sends is not released.
    rule = aggregate.hold_resting(spec.turn(round))(aggregate.average_statistics(spec.updates.clip(rule)))
    if (release := build_release(spec)) is not None:
        rule = clipping.privatize(release, noise)(rule)
        requirements = dataclasses.replace(rule.requirements, misfit=_refuse_statistics(rule.requirements.misfit))
        rule = dataclasses.replace(rule, requirements=requirements)
    return _compress_step(spec, rule, seed, keep_step)


def build_secure_rule(
    spec: JobSpec, seed: int = 0, keep_step: Callable[[bytes], None] | None = None, round: int = 1
) -> aggregate.Rule:
    """Return the rule of a job with secure aggregation, as `build_rule` does too.

    It receives the mean of the updates (`secure.mean_update`) as the only update of an attempt, with weight 1. Clients
    have clipped and weighed theirs, and added the noise.
    """
    inner = plugins.build_checked(spec.aggregation, aggregate.Rule, "aggregation.rule")
    requirements = dataclasses.replace(inner.requirements, misfit=_misfit(spec, inner.requirements.misfit))
    rule = dataclasses.replace(aggregate.restrict_to_mean(inner), requirements=requirements)
    rule = aggregate.hold_resting(spec.turn(round))(aggregate.average_statistics(rule))
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
