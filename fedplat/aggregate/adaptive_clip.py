"""Clipping at a norm that follows a quantile of the updates' norms.

Source: Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping", arXiv 1905.03871, Algorithm 1,
without its noise: updates are clipped to the norm C. With b the fraction of updates within C, and q the target quantile
(gamma in the paper), C ← C · exp(-η (b - q)). Defaults as in the paper's experiments.

Every update counts once for C, independent of its weight, and no attempt changes C by more than a factor of e^η.
Clients that send huge updates can raise C only slowly, and only together with half of the others (q = 0.5).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import Contribution, Partial, Rule, Wrapper
from fedplat.aggregate.clip import clip_to_norm, finite_norm
from fedplat.model import Blocks

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
        ranges.check(self)

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
