"""What guesses about canaries say of epsilon: a lower bound from one run of training.

Source: Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run", arXiv 2305.08846, Theorem 5.2
and the algorithm of its Appendix D. Each of m canaries was included or left out by a fair coin of its own; somebody who
sees what was released guesses for r of them. Of a mechanism with (epsilon, delta) so many right guesses have a
probability of at most the p-value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedplat.errors import MissingExtraError

SHARES = (1.0, 0.3, 0.1)
"""Parts of the canaries that are guessed, one after another: the highest and the lowest scores."""
_HALVINGS = 40


@dataclasses.dataclass(frozen=True)
class Guesses:
    """So many guesses of so many canaries, and how many were right."""

    canaries: int
    guesses: int
    right: int


@dataclasses.dataclass(frozen=True)
class Bound:
    """Epsilon is no less than `epsilon`, with the confidence asked for; `best` are the guesses that show it."""

    epsilon: float
    best: Guesses


def p_value(found: Guesses, epsilon: float, delta: float) -> float:
    """The probability of so many right guesses or more, at most, if releases are (epsilon, delta)-private."""
    try:
        from scipy.stats import binom
    except ModuleNotFoundError as exc:
        raise MissingExtraError("an audit needs SciPy; install it with: pip install 'fedplat[privacy]'") from exc
    # Randomized response with this epsilon, the worst case, guesses right with this probability.
    right = 1.0 / (1.0 + math.exp(-epsilon))
    beyond = float(binom.sf(found.right - 1, found.guesses, right))
    if not found.right or not delta:
        return beyond
    below = np.cumsum(binom.pmf(np.arange(found.right - 1, -1, -1), found.guesses, right))
    alpha = float(np.max(below / np.arange(1, found.right + 1)))
    return min(1.0, beyond + 2.0 * found.canaries * delta * alpha)


def lower_bound(found: Guesses, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that the guesses contradict with this confidence; 0 where they contradict none."""
    level = 1.0 - confidence
    if p_value(found, 0.0, delta) >= level:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(found, high, delta) < level:
        low, high = high, 2.0 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if p_value(found, middle, delta) < level:
            low = middle
        else:
            high = middle
    return low


def bound_of(
    scores: npt.NDArray[np.float64],
    included: npt.NDArray[np.bool_],
    delta: float,
    confidence: float = 0.95,
    shares: Sequence[float] = SHARES,
) -> Bound:
    """The best bound of several numbers of guesses, each of which gets its part of the chance to be wrong.

    `scores` are high for canaries that seem to be in: half of the guesses are the highest, half the lowest ones.
    """
    order = np.argsort(scores, kind="stable")
    num_canaries = len(order)
    each = 1.0 - (1.0 - confidence) / len(shares)
    bounds: list[Bound] = []
    for share in shares:
        half = max(1, int(share * num_canaries / 2))
        right = int(included[order[-half:]].sum()) + int((~included[order[:half]]).sum())
        found = Guesses(num_canaries, 2 * half, right)
        bounds.append(Bound(lower_bound(found, delta, each), found))
    return max(bounds, key=lambda bound: bound.epsilon)
