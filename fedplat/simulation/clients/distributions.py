"""Distributions of client properties, as tables of a TOML file: `speed = { kind = "lognormal", median = 50.0 }`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from fedplat.config import plugins, user_code
from fedplat.errors import PluginError

Floats = npt.NDArray[np.float64]
Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]
NotNegative = Annotated[float, Meta(ge=0.0, le=1e15)]
AboveZero = Annotated[float, Meta(gt=0.0, le=1e15)]


@runtime_checkable
class Distribution(Protocol):
    """A table of a simulation file: the options of a distribution, selected by the key `kind`."""

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        """Draw `count` values."""
        ...


class Constant(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="constant"):
    """The same value for all clients."""

    value: Finite

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        """Draw `count` values."""
        return np.full(count, self.value)


class UniformRange(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"):
    """Any value from `low` to `high` is equally likely."""

    low: Finite
    high: Finite

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise ValueError(f"high = {self.high}: expected at least low, which is {self.low}")

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        """Draw `count` values."""
        return rng.uniform(self.low, self.high, count)


class Lognormal(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """exp(N(ln median, sigma²)); with sigma = 1 a tenth of all are below 0.28 medians, and a tenth above 3.6."""

    median: AboveZero
    sigma: Annotated[float, Meta(ge=0.0, le=10.0)] = 1.0

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        """Draw `count` values."""
        return rng.lognormal(math.log(self.median), self.sigma, count)


class Pareto(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="pareto"):
    """At least `minimum`, and above x with the probability (minimum / x)^shape: a few values are very large."""

    minimum: AboveZero
    shape: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.5

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        """Draw `count` values."""
        return self.minimum * (1.0 + rng.pareto(self.shape, count))


class Empirical(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="empirical"):
    """One of `values`, all equally likely or by `weights`."""

    values: Annotated[list[Finite], Meta(min_length=1, max_length=1_000_000)]
    weights: list[NotNegative] = []

    def __post_init__(self) -> None:
        if self.weights and (len(self.weights) != len(self.values) or not sum(self.weights) > 0.0):
            raise ValueError(f"weights: expected {len(self.values)} numbers, as many as values, and not all of them 0")

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        """Draw `count` values."""
        weights = np.array(self.weights) / sum(self.weights) if self.weights else None
        return np.array(self.values)[rng.choice(len(self.values), count, p=weights)]


DISTRIBUTIONS: Mapping[str, type[Distribution]] = plugins.by_name(Constant, UniformRange, Lognormal, Pareto, Empirical)
"""The options record of each built-in distribution, by its name in a simulation file."""

plugins.define(plugins.Kind("distributions", "kind", "a distribution", Distribution, ("draw",), DISTRIBUTIONS))


def draw(distribution: Distribution, count: int, rng: np.random.Generator, key: str, *, positive: bool) -> Floats:
    """Draw finite values, above 0 if `positive`; `key` is that of the distribution in a file.

    Raises `PluginError` or `UserCodeError` for a plugin that draws something else.
    """
    if plugins.is_builtin(distribution, Distribution):
        return distribution.draw(count, rng)
    action = f'{key} = "{plugins.name_of(distribution)}": draw()'
    with user_code.wrap_errors(action):
        drawn = np.asarray(distribution.draw(count, rng))
    if drawn.shape != (count,) or drawn.dtype.kind not in "fiu":
        raise PluginError(f"{action} returned {drawn.dtype}{list(drawn.shape)}; expected float64[{count}]")
    wrong = ~np.isfinite(drawn) | (positive & (drawn <= 0))
    if wrong.any():
        expected = "above 0" if positive else "only"
        raise PluginError(f"{action} returned {drawn[wrong][0]} for a client; expected finite numbers {expected}")
    return drawn.astype(np.float64)


def smallest(distribution: Distribution) -> float:
    """Return the smallest value that can be drawn, to validate options; 0 if it is not known."""
    match distribution:
        case Constant():
            return distribution.value
        case UniformRange():
            return distribution.low
        case Pareto():
            return distribution.minimum
        case Empirical():
            return min(distribution.values)
        case _:  # lognormal, or a plugin, whose values are checked when they are drawn
            return 0.0


_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_STEP = np.uint64(0x9E3779B97F4A7C15)


def hash_uniform(seed: int, *numbers: npt.NDArray[Any] | int) -> Floats:
    """Return uniform numbers in [0, 1) that depend only on the arguments.

    A random generator for each of a million clients would cost microseconds and kilobytes each. Source: Steele et al.
    2014, "Fast Splittable Pseudorandom Number Generators", the finalizer of SplitMix64, applied once for each number.
    """
    state = np.uint64(seed % 2**64)
    with np.errstate(over="ignore"):
        mixed = np.atleast_1d(np.asarray(state))
        for number in numbers:
            mixed = mixed + _STEP * (np.asarray(number).astype(np.uint64) + np.uint64(1))
            mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
            mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
            mixed = mixed ^ (mixed >> np.uint64(31))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def hashed_normal(seed: int, *numbers: npt.NDArray[Any] | int) -> Floats:
    """Return standard normal numbers that depend only on the arguments (Box and Muller 1958)."""
    radius = np.sqrt(-2.0 * np.log1p(-hash_uniform(seed, *numbers, 0)))
    return radius * np.cos(2.0 * math.pi * hash_uniform(seed, *numbers, 1))
