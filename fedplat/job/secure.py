"""The secure aggregation of a job: its groups, the setup of an attempt, and the noise of each client."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from fedplat import errors, model
from fedplat.job.tables import JobTables, require_procedure
from fedplat.privacy import Privacy
from fedplat.privacy.noise import HEADROOM, fit_norm, least_sensitivity, rounded_sensitivity
from fedplat.procedures import contract, versions
from fedplat.secure_aggregation import encoding, messages
from fedplat.secure_aggregation.setup import (
    EXTRAS_LEVELS,
    Encoding,
    ExactEncoding,
    ExactSetup,
    LocalNoise,
    Setup,
    digest_task,
)

MAX_INFLATION = 2.0
"""Maximum factor by which rounding may increase what one client can change, and so the noise."""


def num_groups(spec: JobTables) -> int:
    """Return the number of groups into which each cohort is divided; it follows from the goal alone."""
    return math.ceil(spec.selection.goal / require_secure(spec).group)


def group_minimum(spec: JobTables) -> int:
    """Return the number of survivors below which the sum of a group is not unmasked."""
    return _group_minimum_of(spec, spec.selection.goal)


def _group_minimum_of(spec: JobTables, goal: int) -> int:
    size = goal // math.ceil(goal / require_secure(spec).group)
    return max(messages.MIN_GROUP, size if spec.procedure is not None else spec.selection.minimum_of(size))


def group_maximum(spec: JobTables) -> int:
    """Return the number of clients in a group of a full cohort."""
    return math.ceil(spec.selection.goal / num_groups(spec))


def build_setup(spec: JobTables, job_id: str, round: int, attempt: int, model_digest: str, size: int) -> Setup:
    """Return the setup of an attempt; `size` is the number of floating-point entries of the model."""
    return Setup(
        job_id=job_id,
        round=round,
        attempt=attempt,
        model_digest=model_digest,
        task_digest=digest_task(spec.trainer, spec.name, spec.client_config),
        options=require_secure(spec),
        encoding=build_encoding(spec, size),
        minimum=group_minimum(spec),
    )


def build_exact_setup(
    spec: JobTables, job_id: str, round: int, attempt: int, model_digest: str, encoding: ExactEncoding
) -> ExactSetup:
    """Return the setup of an attempt whose replies to a procedure add up exactly, in groups of `group_maximum`."""
    procedure = require_procedure(spec)
    task = versions.describe_task(versions.encode_options(procedure), contract.version_of(procedure))
    return ExactSetup(
        job_id=job_id,
        round=round,
        attempt=attempt,
        model_digest=model_digest,
        task_digest=digest_task(spec.trainer, spec.name, task),
        options=require_secure(spec),
        encoding=encoding,
        minimum=group_minimum(spec),
    )


def build_encoding(spec: JobTables, size: int) -> Encoding:
    """Return how the updates of a job become integers.

    Raises `SecureAggregationError` if a private job's noise was not calibrated, or does not fit so large a model.
    """
    options, updates = require_secure(spec), spec.updates
    bounds = options.metrics
    if spec.privacy is not None:
        bounds = {} if spec.privacy.metrics is None else spec.privacy.metrics.bounds
    return Encoding(
        size=size,
        clip=updates.clip_norm,
        bits=options.bits,
        modulus=options.modulus,
        max_examples=updates.max_examples if updates.weighting == "examples" else 0.0,
        max_clients=group_maximum(spec),
        metrics=tuple((name, *bounds[name]) for name in sorted(bounds)),
        noise=None if spec.privacy is None else _local_noise(spec, spec.privacy, size),
    )


def _local_noise(spec: JobTables, privacy: Privacy, size: int) -> LocalNoise:
    """Return the noise of one client, of which that of `group_minimum` clients is enough."""
    if privacy.noise_multiplier is None:
        raise errors.SecureAggregationError("the job's noise was not calibrated, so no client can add its part")
    modulus, fewest, most = require_secure(spec).modulus, group_minimum(spec), group_maximum(spec)
    factor = _variance_factor(spec, privacy.noise_multiplier)
    norm = fit_norm(_levels(spec), size, modulus, most, factor)
    sensitivity = rounded_sensitivity(norm, size)
    if norm < 1.0 or sensitivity > MAX_INFLATION * norm:
        key = "modulus" if norm < _levels(spec) else "bits"
        raise errors.SecureAggregationError(
            f"rounding would more than double the noise of a model with {size:,} entries: expected "
            f"secure_aggregation.{key} above {getattr(require_secure(spec), key)}"
        )
    noise = LocalNoise(
        scale=norm / spec.updates.clip_norm, variance=(privacy.noise_multiplier * sensitivity) ** 2 / fewest
    )
    if privacy.metrics is None:
        return noise
    scale = _metrics_scale(spec, privacy)
    variance = (privacy.metrics.noise_multiplier * scale) ** 2 * len(privacy.metrics.bounds) / fewest
    return LocalNoise(noise.scale, noise.variance, scale, variance)


def _levels(spec: JobTables) -> int:
    return 2 ** (require_secure(spec).bits - 1) - 1


def _variance_factor(spec: JobTables, multiplier: float) -> float:
    return multiplier**2 * group_maximum(spec) / group_minimum(spec)


def _metrics_scale(spec: JobTables, privacy: Privacy) -> int:
    """Return the number of steps for a unit of a metric, with which all of them and twice their noise fit."""
    if privacy.metrics is None:
        return EXTRAS_LEVELS
    deviation = math.sqrt(_variance_factor(spec, privacy.metrics.noise_multiplier) * len(privacy.metrics.bounds))
    room = 2.0 ** (require_secure(spec).modulus - 1) - 1.0
    return min(EXTRAS_LEVELS, int(room / (group_maximum(spec) + 2.0 * HEADROOM * deviation)))


def least_steps(spec: JobTables, multiplier: float) -> float:
    """Return the least number of the quantizer's steps that one client can change in a release of a private job.

    `multiplier` is the noise multiplier of the model. The bound holds for models of any size. Raises `ValueError` if
    the noise does not fit the modulus.
    """
    assert spec.privacy is not None
    modulus, metrics = require_secure(spec).modulus, spec.privacy.metrics
    steps = least_sensitivity(_levels(spec), modulus, group_maximum(spec), _variance_factor(spec, multiplier))
    if metrics is not None:
        steps = min(steps, _metrics_scale(spec, spec.privacy) * math.sqrt(len(metrics.bounds)))
    if steps < 1.0:
        raise ValueError(
            f"secure_aggregation.modulus = {modulus}: the noise of {group_maximum(spec)} clients does not fit; "
            "expected more, or less noise"
        )
    return steps


def noise_surplus(spec: JobTables, goal: int) -> float:
    """Return the deviation of the noise of `goal` clients, relative to that of the survivors that a group needs."""
    return math.sqrt(goal / _group_minimum_of(spec, goal))


def spent_releases(spec: JobTables, unmasked: Sequence[int]) -> Fraction:
    """Return how many of the planned releases cost as much as the attempts whose masks were requested, by survivors.

    A release with n survivors has n / `group_minimum` times the planned variance, and costs at most the inverse.
    """
    counts = Counter(unmasked)
    return sum((Fraction(group_minimum(spec) * counts[each], each) for each in counts), Fraction())


def mean_update(spec: JobTables, decoded: encoding.Decoded) -> model.Vector:
    """Return the mean of the updates from their sum over all groups, which it overwrites.

    The divisor of a private job is fixed: `selection.goal` times `privacy.expected_weight`. Raises
    `SecureAggregationError` if all weights are 0.
    """
    divisor = decoded.weight if spec.privacy is None else spec.selection.goal * spec.privacy.expected_weight
    if divisor <= 0.0:
        raise errors.SecureAggregationError(f"the weights of {decoded.num_survivors} updates add up to 0")
    return np.divide(decoded.update, np.float32(divisor), out=decoded.update)


def require_secure(spec: JobTables) -> messages.SecureAggregation:
    """Return the options of a job with secure aggregation."""
    assert spec.secure_aggregation is not None
    return spec.secure_aggregation
