"""The profile of a training's steps as metrics of its attempt, and the bottleneck that they name, in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping

SHARES = ("compute", "communication", "bubble", "input")
"""What the time of a step is spent on."""
_PREFIX, _TIME, _SLOWEST = "step_", "step_s", "step_slowest_rank"


def to_metrics(step_s: float, shares: Mapping[str, float], slowest_rank: int | None) -> dict[str, float]:
    """Return a profile as metrics: `step_s` in seconds, `step_compute` and the other shares of 1, and a rank's number.

    `slowest_rank` is None for a single rank.
    """
    metrics = {_TIME: step_s} | {f"{_PREFIX}{name}": shares[name] for name in SHARES}
    return metrics if slowest_rank is None else metrics | {_SLOWEST: float(slowest_rank)}


def describe(metrics: Mapping[str, float]) -> str:
    """Return the bottleneck in one line; empty unless the metrics have a whole profile."""
    names = {name: f"{_PREFIX}{name}" for name in SHARES}
    if not all(math.isfinite(metrics.get(name, math.nan)) for name in (_TIME, *names.values())):
        return ""
    shares = {name: metrics[key] for name, key in names.items()}
    bottleneck = max(SHARES, key=lambda name: shares[name])
    others = ", ".join(f"{name} {100 * value:.0f} %" for name, value in shares.items() if name != bottleneck)
    slowest = metrics.get(_SLOWEST, math.nan)
    end = f"; slowest rank {slowest:.0f}" if math.isfinite(slowest) else ""
    share = f"{100 * shares[bottleneck]:.0f} % of {metrics[_TIME]:.3g} s for a step"
    return f"the bottleneck is {bottleneck}: {share} ({others}){end}"


def without_profile(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the other metrics, if they have a whole profile, and all of them otherwise."""
    if not describe(metrics):
        return dict(metrics)
    own = {_TIME, _SLOWEST, *(f"{_PREFIX}{name}" for name in SHARES)}
    return {name: value for name, value in metrics.items() if name not in own}
