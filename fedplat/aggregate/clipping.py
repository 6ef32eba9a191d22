"""Clipping of updates, at a fixed norm or one that follows a quantile, and the Gaussian mechanism on their sum.

Source: McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models", arXiv 1710.06963,
Section 3 (flat clipping): Δ ← Δ · min(1, S / ‖Δ‖).

Source: Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping", arXiv 1905.03871, Algorithm 1,
without its noise: updates are clipped to the norm C. With b the fraction of updates within C, and q the target quantile
(gamma in the paper), C ← C · exp(-η (b - q)). Defaults as in the paper's experiments.

Every update counts once for C, independent of its weight, and no attempt changes C by more than a factor of e^η.
Clients that send huge updates can raise C only slowly, and only together with half of the others (q = 0.5).

Source: McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models", arXiv 1710.06963, Algorithm 1
with the estimator f̃_f of its Section 2: a sum of clipped updates over a denominator that does not depend on who takes
part. Clients that are lost, late or rejected make the result worse, but do not weaken the guarantee.

With adaptive clipping (Andrew et al. 2021, arXiv 1905.03871, Algorithm 1) the count of updates within the norm gets
noise too: with σ_b the deviation of its noise, the sum's noise has the multiplier (z⁻² - (2 σ_b)⁻²)^(-1/2), so that
both together are one mechanism with z. Each vote is shifted by a half, so that one client changes the count by a half.

With metrics, each is mapped to [-1, 1] and summed; all of them together have a multiplier of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated

import msgspec
import numpy as np

from fedplat.aggregate import algebra as ranges
from fedplat.aggregate.algebra import ClientRequirements, Contribution, Partial, Rule, State, Wrapper
from fedplat.model import Blocks, Schema, Vector
from fedplat.model.blocks import ShardReduce, l2_norm, scale_vector, single_shard
from fedplat.privacy.noise import Noise, Normals, Tree
from fedplat.privacy.options import PublishedMetrics

# Scaled entries are rounded to float32, which can increase the norm by up to 2⁻²³ of itself; the bound must hold after
# rounding too.
_ROUNDING = 1 - 2.0**-22


def clip_by_norm(max_norm: float) -> Wrapper:
    """Scale every update with an L2 norm above `max_norm` down to it, before it is folded.

    `max_norm` is in the units of the model's entries. An update within the bound is folded unchanged, bit for bit.
    Updates are read once for their norm, and once more to be folded. Raises `ValueError` for a bound that is not
    positive and finite, and in `fold` for an update with NaN or infinite entries, which has no norm to bound.
    """
    if not (max_norm > 0 and math.isfinite(max_norm)):
        raise ValueError(f"max_norm is {max_norm}; expected a finite number above 0")

    def wrap(inner: Rule) -> Rule:
        def fold(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
            return inner.fold(
                partial, clip_to_norm(update, finite_norm(update, partial.reduce_shards), max_norm), contribution
            )

        return dataclasses.replace(inner, fold=fold)

    return wrap


def finite_norm(update: Blocks, reduce_shards: ShardReduce = single_shard) -> float:
    """Return the L2 norm of an update. Raises `ValueError` if it is not finite."""
    norm = l2_norm(update, reduce_shards)
    if not math.isfinite(norm):
        raise ValueError("the update has NaN or infinite entries and cannot be clipped")
    return norm


def clip_to_norm(update: Blocks, norm: float, max_norm: float) -> Blocks:
    """Return an update of L2 norm `norm`, scaled down to a norm of at most `max_norm`."""
    return update if norm <= max_norm else scale_vector(update, max_norm / norm * _ROUNDING)


CLIP_NORM = "clip_norm"
"""The name of C among the rule's scalars."""
WITHIN = "within_clip_norm"
"""The name of the number of updates within C, among the sums of an attempt."""
_SMALLEST, _LARGEST = 1e-30, 1e30


class AdaptiveClip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bound on the norm of updates that follows a quantile of their norms (Andrew et al. 2021, without noise)."""

    quantile: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5
    """q, the fraction of updates within the bound; 0.5 is their median."""
    learning_rate: Annotated[float, msgspec.Meta(gt=0.0, le=10.0)] = 0.2
    """η, how fast the norm follows: the largest change of its logarithm in one attempt."""
    initial_norm: ranges.Floor = 0.1
    """C of the first attempt, in the units of the model's entries."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def build(self) -> Wrapper:
        """Return the wrapper with these options."""
        return clip_by_quantile(self)


def clip_by_quantile(options: AdaptiveClip) -> Wrapper:
    """Scale every update with an L2 norm above C down to C, before it is folded. Remembers C as `clip_norm`.

    `fold` raises `ValueError` for an update with NaN or infinite entries.
    """

    def wrap(inner: Rule) -> Rule:
        def start(size: int) -> Partial:
            partial = inner.start(size)
            return dataclasses.replace(partial, scalars={**partial.scalars, CLIP_NORM: options.initial_norm})

        def fold(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
            norm, max_norm = finite_norm(update, partial.reduce_shards), partial.scalars[CLIP_NORM]
            folded = inner.fold(partial, clip_to_norm(update, norm, max_norm), contribution)
            return folded.plus(**{WITHIN: float(norm <= max_norm)})

        def remember(partial: Partial) -> Mapping[str, float]:
            within = partial.sums[WITHIN] / partial.num_updates if partial.num_updates else options.quantile
            return {**inner.remember(partial), CLIP_NORM: next_clip_norm(options, partial, within)}

        return dataclasses.replace(inner, start=start, fold=fold, remember=remember)

    return wrap


def next_clip_norm(options: AdaptiveClip, partial: Partial, within: float) -> float:
    """Return C for the next attempt; `within` is the fraction of this attempt's updates within its C."""
    norm = partial.scalars[CLIP_NORM] * math.exp(-options.learning_rate * (within - options.quantile))
    return min(max(norm, _SMALLEST), _LARGEST)


_METRIC = "private metric "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """The parameters that turn an attempt's sum into a release.

    `noise_multiplier` is that of the model's entries, with the count of adaptive clipping if there is one (None: not
    calibrated yet); `clip` bounds each update's norm. The sum is divided by `expected_weight`, counts and metrics by
    `expected_reports`. With a `tree`, the noise of a round complements that of earlier rounds.
    """

    noise_multiplier: float | None
    clip: float | AdaptiveClip
    expected_weight: float
    expected_reports: int
    count_deviation: float = 0.0
    metrics: PublishedMetrics | None = None
    tree: Tree | None = None

    @property
    def sum_multiplier(self) -> float:
        """The noise multiplier of the sum alone.

        Raises `ValueError` if the noise was not calibrated, or if the count's noise is too small for it.
        """
        if self.noise_multiplier is None:
            raise ValueError("the job's noise was not calibrated, so none of its results can be released")
        if not isinstance(self.clip, AdaptiveClip):
            return self.noise_multiplier
        left = self.noise_multiplier**-2 - (2.0 * self.count_deviation) ** -2
        if left <= 0:
            raise ValueError(
                f"the count's noise is {self.count_deviation:g}; expected above {self.noise_multiplier / 2:g}"
            )
        return left**-0.5

    def clip_norm(self, partial: Partial) -> float:
        """Return the bound on the L2 norm of each update of the attempt."""
        return partial.scalars[CLIP_NORM] if isinstance(self.clip, AdaptiveClip) else self.clip


def privatize(release: Release, noise: Noise | None) -> Wrapper:
    """Make the results of a rule releases. The rule must clip updates to `release.clip`, and weigh them by at most 1.

    Without `noise` nothing can be released: `apply`, and all other functions that add noise, raise `ValueError`. The
    noise must be fresh for each attempt. The same noise gives the same result again.
    """

    def wrap(inner: Rule) -> Rule:
        def start(size: int) -> Partial:
            partial = inner.start(size)
            first = {} if release.tree is None else release.tree.first()
            return dataclasses.replace(partial, scalars={**partial.scalars, **first})

        def fold(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
            if not 0 <= contribution.weight <= 1:
                raise ValueError(f"the weight is {contribution.weight}; expected one from 0 to 1 in a private job")
            folded = inner.fold(partial, update, contribution)
            return folded.plus(**_scale_metrics(release.metrics, contribution.metrics))

        def apply(state: State, partial: Partial) -> tuple[Vector, State]:
            deviation = release.sum_multiplier * release.clip_norm(partial)
            noised = partial.total + deviation * _normals(release, partial, _certain(noise))
            noised_partial = dataclasses.replace(
                partial,
                total=noised.astype(np.float32),
                weight=release.expected_weight,
                num_updates=max(partial.num_updates, 1),  # noise alone is also a release
            )
            return inner.apply(state, noised_partial)

        def remember(partial: Partial) -> Mapping[str, float]:
            scalars = dict(inner.remember(partial))
            if isinstance(release.clip, AdaptiveClip):
                scalars[CLIP_NORM] = next_clip_norm(
                    release.clip, partial, _noised_share(release, partial, _certain(noise))
                )
            if release.tree is not None:
                scalars |= release.tree.after(partial.scalars, _certain(noise))
            return scalars

        def publish(partial: Partial) -> Mapping[str, float]:
            return _release_metrics(release, partial, _certain(noise)) if release.metrics is not None else {}

        rule = dataclasses.replace(inner, start=start, fold=fold, apply=apply, remember=remember, publish=publish)
        return dataclasses.replace(rule, requirements=_requirements(inner.requirements))

    return wrap


def _requirements(inner: ClientRequirements) -> ClientRequirements:
    def misfit(schema: Schema) -> str:
        if schema.carry == "max":
            return (
                'the model carries its integer entries by "max", so the largest of any client would be released '
                'without noise; a private job needs a model that keeps them (carry = "keep")'
            )
        return inner.misfit(schema)

    return dataclasses.replace(inner, misfit=misfit)


def _certain(noise: Noise | None) -> Noise:
    if noise is None:
        raise ValueError("the rule of a private job was built without noise, so none of its results can be released")
    return noise


def _normals(release: Release, partial: Partial, noise: Noise) -> Normals:
    first, size = partial.first, partial.total.size
    if release.tree is not None:
        return release.tree.step(partial.scalars, noise, first, size)
    return noise.normal("sum", first, size)


def _noised_share(release: Release, partial: Partial, noise: Noise) -> float:
    """Return the noised fraction of the expected updates that were within the norm."""
    votes = partial.sums.get(WITHIN, 0.0) - 0.5 * partial.num_updates
    noised = votes + release.count_deviation * float(noise.normal("count", 0, 1)[0])
    return noised / release.expected_reports + 0.5


def _scale_metrics(metrics: PublishedMetrics | None, reported: Mapping[str, float]) -> Mapping[str, float]:
    """Map a client's metrics to [-1, 1]; one that is missing or not a number counts as 0, the middle."""
    if metrics is None:
        return {}
    mapped: dict[str, float] = {}
    for name, (low, high) in metrics.bounds.items():
        value = reported.get(name, math.nan)
        if not math.isnan(value):
            mapped[_METRIC + name] = min(max((value - low) / (high - low) * 2.0 - 1.0, -1.0), 1.0)
    return mapped


def _release_metrics(release: Release, partial: Partial, noise: Noise) -> Mapping[str, float]:
    assert release.metrics is not None
    bounds = release.metrics.bounds
    # One client changes each metric by 1, so all together by the root of their number.
    deviation = release.metrics.noise_multiplier * math.sqrt(len(bounds))
    normals = noise.normal("metrics", 0, len(bounds)).tolist()
    found: dict[str, float] = {}
    for (name, (low, high)), normal in zip(sorted(bounds.items()), normals, strict=True):
        total = partial.sums.get(_METRIC + name, 0.0) + deviation * normal
        found[name] = (low + high) / 2.0 + (high - low) / 2.0 * total / release.expected_reports
    return found
