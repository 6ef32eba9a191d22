"""The Gaussian mechanism as a wrapper of a rule: the sum of the updates gets noise, and is divided by a constant.

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

import numpy as np

from fedplat.aggregate.adaptive_clip import CLIP_NORM, WITHIN, AdaptiveClip, next_clip_norm
from fedplat.aggregate.algebra import ClientRequirements, Contribution, Partial, Rule, State, Wrapper
from fedplat.model import Blocks, Schema, Vector
from fedplat.privacy.noise import Noise, Normals, Tree
from fedplat.privacy.options import PublishedMetrics

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
