"""All aggregation rules with options, and NumPy references of a few lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.aggregate import Contribution, RuleOptions
from fedplat.config.plugins import BUILTIN
from fedplat.model import BLOCK, Vector

SIZE = BLOCK + 38  # more than one block, and not a whole number of them; SCAFFOLD has halves
Wide = npt.NDArray[np.float64]
Updates = list[tuple[Vector, Contribution]]
Reference = Callable[[Any, list[Updates]], Iterator[Wide]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A rule's options in a job file, values to refuse, and the paper's formula in float64: rounds to steps."""

    options: dict[str, Any]
    bad: dict[str, Sequence[Any]]
    reference: Reference


BAD_RATE = (0, -0.1, float("inf"), float("nan"), "fast", True)
BAD_PART = (0, -0.1, 1.1, float("nan"))
BAD_COUNT = (0, -1, 1.5, "many", True)
BAD_DECAY = (-0.1, 1, 1.5, float("nan"))
BAD_TAU = (0, -1e-3, 1e-40, float("inf"))


def on_means(formula: Callable[[Any, Iterator[Wide]], Iterator[Wide]]) -> Reference:
    """A rule that sees the weighted means of the updates only."""

    def reference(o: Any, rounds: list[Updates]) -> Iterator[Wide]:
        return formula(o, (weighted(updates, lambda u, c: u) / total_weight(updates) for updates in rounds))

    return reference


def weighted(updates: Updates, term: Callable[[Wide, Contribution], Any]) -> Any:
    return sum(c.weight * term(update.astype(np.float64), c) for update, c in updates)


def total_weight(updates: Updates) -> float:
    return sum(c.weight for _, c in updates)


def fedavg(o: Any, deltas: Iterator[Wide]) -> Iterator[Wide]:
    return (o.learning_rate * delta for delta in deltas)


def fedavgm(o: Any, deltas: Iterator[Wide]) -> Iterator[Wide]:
    velocity = np.zeros(SIZE)
    for delta in deltas:
        velocity = o.momentum * velocity + delta
        yield o.learning_rate * (delta + o.momentum * velocity if o.nesterov else velocity)


def adaptive(second_moment: Callable[[Any, Wide, Wide], Wide]) -> Reference:
    def formula(o: Any, deltas: Iterator[Wide]) -> Iterator[Wide]:
        m, v = np.zeros(SIZE), np.full(SIZE, o.tau**2)
        for delta in deltas:
            m = o.beta1 * m + (1 - o.beta1) * delta
            v = second_moment(o, v, delta)
            yield o.learning_rate * m / (np.sqrt(v) + o.tau)

    return on_means(formula)


def fednova(o: Any, rounds: list[Updates]) -> Iterator[Wide]:
    for updates in rounds:
        total = total_weight(updates)
        tau_eff = weighted(updates, lambda u, c: c.metrics["local_steps"]) / total
        yield o.learning_rate * tau_eff * weighted(updates, lambda u, c: u / c.metrics["local_steps"]) / total


def qfedavg(o: Any, rounds: list[Updates]) -> Iterator[Wide]:
    """Algorithm 2 as it is written: with the gradients L (w - w_k)."""
    q, lipschitz = o.q, 1 / o.local_learning_rate

    def h(update: Wide, c: Contribution) -> float:
        loss, squared = c.metrics["loss_before"], float(np.sum(np.square(-lipschitz * update)))
        return q * loss ** (q - 1) * squared + lipschitz * loss**q

    for updates in rounds:
        deltas = weighted(updates, lambda u, c: c.metrics["loss_before"] ** q * -lipschitz * u)
        yield -deltas / weighted(updates, h)


def divided_by_number(rate: str) -> Reference:
    def reference(o: Any, rounds: list[Updates]) -> Iterator[Wide]:
        return (getattr(o, rate) * weighted(updates, lambda u, c: u) / len(updates) for updates in rounds)

    return reference


def mean(o: Any, deltas: Iterator[Wide]) -> Iterator[Wide]:
    """Of a model without adapters: `test_factors.py` has those with them."""
    return deltas


def easgd(o: Any, rounds: list[Updates]) -> Iterator[Wide]:
    return (weighted(updates, lambda u, c: u) for updates in rounds)


def scaffold(o: Any, rounds: list[Updates]) -> Iterator[Wide]:
    """The vector is x, and then c."""
    for updates in rounds:
        mean = weighted(updates, lambda u, c: u) / total_weight(updates)
        yield np.concatenate([o.learning_rate * mean[: SIZE // 2], len(updates) / o.num_clients * mean[SIZE // 2 :]])


def feddyn(o: Any, rounds: list[Updates]) -> Iterator[Wide]:
    """With the server's state as the paper has it, and any alpha."""
    alpha, h = 0.3, np.zeros(SIZE)
    for updates in rounds:
        mean = weighted(updates, lambda u, c: u) / total_weight(updates)
        h = h - alpha / o.num_clients * len(updates) * mean
        yield mean - h / alpha


CASES = {
    "fedavg": Case({"learning_rate": 0.7}, {"learning_rate": BAD_RATE}, on_means(fedavg)),
    "fedavgm": Case(
        {"learning_rate": 0.5, "momentum": 0.8, "nesterov": True},
        {"learning_rate": BAD_RATE, "momentum": BAD_DECAY, "nesterov": (1, "yes", None)},
        on_means(fedavgm),
    ),
    "fedadam": Case(
        {"learning_rate": 0.03, "beta1": 0.8, "beta2": 0.95, "tau": 0.01},
        {"learning_rate": BAD_RATE, "beta1": BAD_DECAY, "beta2": BAD_DECAY, "tau": BAD_TAU},
        adaptive(lambda o, v, d: o.beta2 * v + (1 - o.beta2) * d**2),
    ),
    "fedyogi": Case(
        {"learning_rate": 0.03, "beta1": 0.8, "beta2": 0.95, "tau": 0.01},
        {"learning_rate": BAD_RATE, "beta1": BAD_DECAY, "beta2": BAD_DECAY, "tau": BAD_TAU},
        adaptive(lambda o, v, d: v - (1 - o.beta2) * d**2 * np.sign(v - d**2)),
    ),
    "fedadagrad": Case(
        {"learning_rate": 0.03, "beta1": 0.3, "tau": 0.01},
        {"learning_rate": BAD_RATE, "beta1": BAD_DECAY, "tau": BAD_TAU},
        adaptive(lambda o, v, d: v + d**2),
    ),
    "fednova": Case(
        {"learning_rate": 0.7, "max_local_steps": 100.0},
        {"learning_rate": BAD_RATE, "max_local_steps": BAD_RATE},
        fednova,
    ),
    "qfedavg": Case(
        {"q": 0.7, "local_learning_rate": 0.05, "max_loss": 100.0},
        {"q": (-0.1, 11, float("nan")), "local_learning_rate": BAD_RATE, "max_loss": BAD_RATE},
        qfedavg,
    ),
    "fedbuff": Case({"learning_rate": 0.7}, {"learning_rate": BAD_RATE}, divided_by_number("learning_rate")),
    "fedasync": Case({"mixing": 0.7}, {"mixing": BAD_PART}, divided_by_number("mixing")),
    "easgd": Case({}, {}, easgd),
    "scaffold": Case(
        {"num_clients": 10, "learning_rate": 0.7}, {"num_clients": BAD_COUNT, "learning_rate": BAD_RATE}, scaffold
    ),
    "feddyn": Case({"num_clients": 10}, {"num_clients": BAD_COUNT}, feddyn),
    "fedex_lora": Case({"scaling": 2.0}, {"scaling": BAD_RATE}, on_means(mean)),
    "flora": Case({"scaling": 2.0}, {"scaling": BAD_RATE}, on_means(mean)),
}


def make_options(name: str) -> RuleOptions:
    return BUILTIN.decode(RuleOptions, {"rule": name, **CASES[name].options})
