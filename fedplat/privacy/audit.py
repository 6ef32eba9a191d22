"""A lower bound of epsilon from guesses about canaries in one run of training.

Source: Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run", arXiv 2305.08846, Theorem 5.2
and the algorithm of its Appendix D. Each of m canaries was included or left out by its own fair coin; an attacker who
sees the releases guesses for r of them. For a mechanism with (epsilon, delta), the probability of so many right guesses
is at most the p-value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedplat.errors import MissingExtraError
from fedplat.extras import install_command

SHARES = (1.0, 0.3, 0.1)
"""Parts of the canaries that are guessed, one after the other: those with the highest and the lowest scores."""
_HALVINGS = 40


@dataclasses.dataclass(frozen=True)
class Guesses:
    """The numbers of canaries, of guesses, and of right guesses."""

    canaries: int
    guesses: int
    right: int


@dataclasses.dataclass(frozen=True)
class Bound:
    """A lower bound of epsilon at a given confidence; `best` are the guesses that prove it."""

    epsilon: float
    best: Guesses


def p_value(found: Guesses, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of at least as many right guesses, if releases are (epsilon, delta)-private."""
    try:
        from scipy.stats import binom
    except ModuleNotFoundError as exc:
        raise MissingExtraError(f"an audit needs SciPy; install it with: {install_command('privacy')}") from exc
    # Randomized response with this epsilon, the worst case, guesses right with this probability.
    right = 1.0 / (1.0 + math.exp(-epsilon))
    beyond = float(binom.sf(found.right - 1, found.guesses, right))
    if not found.right or not delta:
        return beyond
    below = np.cumsum(binom.pmf(np.arange(found.right - 1, -1, -1), found.guesses, right))
    alpha = float(np.max(below / np.arange(1, found.right + 1)))
    return min(1.0, beyond + 2.0 * found.canaries * delta * alpha)


def lower_bound(found: Guesses, delta: float, confidence: float = 0.95) -> float:
    """Return the largest epsilon that the guesses refute with this confidence; 0 if they refute none."""
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
    """Return the best bound over several numbers of guesses, each with an equal part of the probability of error.

    `scores` are high for canaries that seem to be included: half of the guesses are the highest, half the lowest ones.
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
