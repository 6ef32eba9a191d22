"""All robust rules with options, cohorts with attackers, and how a rule is run on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.aggregate import (
    Contribution,
    Partial,
    Robust,
    Rule,
    State,
    weighted_mean,
)
from fedplat.aggregate.robust import (
    Bulyan,
    CenteredClipping,
    FLTrust,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    RobustRule,
    TrimmedMean,
)
from fedplat.model import Vector, VectorBlocks

F = 2
NUM_UPDATES = 13
SIZE = 4096 + 37
TRUSTED = ("c0", "c5")
Wide = npt.NDArray[np.float64]


def distances(updates: Wide, to: Wide) -> Wide:
    return np.linalg.norm(updates - to, axis=1)


def krum_order(updates: Wide, f: int) -> list[int]:
    nearest = [np.sort(distances(updates, one) ** 2)[1:].tolist() for one in updates]
    scores = [(sum(each[: max(len(updates) - f - 2, 1)]), each) for each in nearest]
    return sorted(range(len(updates)), key=lambda index: scores[index])


def bulyan(updates: Wide, f: int) -> Wide:
    left, chosen = list(updates), list[Wide]()
    while len(chosen) < len(updates) - 2 * f:
        chosen.append(left.pop(krum_order(np.array(left), f)[0]))
    stack = np.array(chosen)
    order = np.argsort(np.abs(stack - np.median(stack, axis=0)), axis=0)[: len(updates) - 4 * f]
    return np.take_along_axis(stack, order, axis=0).mean(axis=0)


def weiszfeld(updates: Wide, f: int) -> Wide:
    point = np.zeros(updates.shape[1])
    for _ in range(3000):
        nearness = 1 / np.maximum(distances(updates, point), 1e-6)
        point = nearness @ updates / nearness.sum()
    return point


def clipped(updates: Wide, f: int) -> Wide:
    centre = np.zeros(updates.shape[1])
    for _ in range(3):
        pull = 5.0 / np.maximum(distances(updates, centre), 5.0)
        centre = centre + (pull[:, None] * (updates - centre)).mean(axis=0)
    return centre


def fltrust(updates: Wide, f: int) -> Wide:
    root, others = updates[[0, 5]].mean(axis=0), np.delete(updates, [0, 5], axis=0)
    others = others[others.any(axis=1)]
    lengths = np.linalg.norm(others, axis=1)
    scores = np.maximum(others @ root / lengths / np.linalg.norm(root), 0)
    return (scores / lengths) @ others * np.linalg.norm(root) / scores.sum()


@dataclasses.dataclass(frozen=True)
class Case:
    """A rule, and the paper's formula in float64."""

    rule: RobustRule
    reference: Callable[[Wide, int], Wide]


CASES = {
    "median": Case(Median(), lambda updates, f: np.median(updates, axis=0)),
    "trimmed-mean": Case(TrimmedMean(), lambda updates, f: np.sort(updates, axis=0)[f : len(updates) - f].mean(axis=0)),
    "krum": Case(Krum(), lambda updates, f: updates[krum_order(updates, f)[0]]),
    "multi-krum": Case(
        MultiKrum(), lambda updates, f: updates[krum_order(updates, f)[: len(updates) - f]].mean(axis=0)
    ),
    "bulyan": Case(Bulyan(), bulyan),
    "geometric-median": Case(GeometricMedian(), weiszfeld),
    "centered-clipping": Case(CenteredClipping(radius=5.0, iterations=3), clipped),
    "fltrust": Case(FLTrust(TRUSTED), fltrust),
}

MIXABLE = [name for name in CASES if name != "fltrust"]


def cohort(attack: str = "none", seed: int = 1, size: int = SIZE) -> npt.NDArray[np.float32]:
    """Updates of which the third and the seventh are byzantine; those of trusted clients never are."""
    rng = np.random.default_rng(seed)
    updates = rng.normal(0.05, 0.1, (NUM_UPDATES, size))
    honest = np.delete(updates, [3, 7], axis=0)
    bad: dict[str, Any] = {
        "none": updates[[3, 7]],
        "huge": rng.normal(0, 1e6, (2, size)),
        "largest": np.full((2, size), 3e38),
        "opposite": -10 * honest.mean(axis=0),
        "a little": honest.mean(axis=0) - 1.5 * honest.std(axis=0),
        "zero": 0.0,
    }
    updates[[3, 7]] = bad[attack]
    return updates.astype(np.float32)


def contributions(number: int) -> list[Contribution]:
    return [Contribution(1.0 + index, client_id=f"c{index}") for index in range(number)]


def gathered(
    rule: Rule, updates: Iterable[Vector], state: State | None = None, known: Sequence[Contribution] | None = None
) -> Partial:
    """The partial result, after the first state if no other is given."""
    blocks = [VectorBlocks(update) for update in updates]
    size = blocks[0].size if blocks else 0
    partial = rule.start(size)
    for update, contribution in zip(blocks, known or contributions(len(blocks)), strict=True):
        partial = rule.fold(partial, update, contribution)
    assert rule.gather is not None
    remembered = rule.init(size) if state is None else state
    return rule.gather({name: VectorBlocks(vector) for name, vector in remembered.items()}, partial)


def run(robust: Robust, updates: npt.NDArray[np.float32], inner: Rule | None = None, seed: int = 4) -> Vector:
    rule = robust.build(seed)(weighted_mean() if inner is None else inner)
    return rule.apply(rule.init(updates.shape[1]), gathered(rule, updates))[0]
