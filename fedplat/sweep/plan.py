"""The configurations of a sweep: the product of its points, zipped lists and grid. Nothing here reads or runs anything.

>>> options = SweepOptions(base="a.toml", grid={"config.epochs": [1, 2]}, zip={"rounds": [5, 9], "name": ["a", "b"]})
>>> [configuration.values for configuration in expand(options)][:2]
[{'rounds': 5, 'name': 'a', 'config.epochs': 1}, {'rounds': 5, 'name': 'a', 'config.epochs': 2}]
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedplat.config.toml_text import format_toml
from fedplat.sweep.options import SweepOptions


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Values of keys of the base file; `number` counts the configurations of a sweep from 1."""

    number: int
    values: Mapping[str, Any]

    @property
    def changes(self) -> list[str]:
        """The values as `key=value` texts, the arguments of `fedplat simulate --set`."""
        return [f"{key}={format_toml(value)}" for key, value in self.values.items()]


def keys(options: SweepOptions) -> list[str]:
    """Return the keys of the base file that differ between configurations, in the order of the tables."""
    if options.search is not None:
        return list(options.search.parameters)
    return [*(options.points[0] if options.points else ()), *options.zip, *options.grid]


def num_configurations(options: SweepOptions) -> int:
    """Return the number of configurations; of a search, the number of trials."""
    if options.search is not None:
        return options.search.trials
    zipped = len(next(iter(options.zip.values()))) if options.zip else 1
    return (len(options.points) or 1) * zipped * math.prod(len(values) for values in options.grid.values())


def expand(options: SweepOptions) -> list[Configuration]:
    """Return all configurations of a sweep without a search; the last key of the grid varies fastest."""
    points = options.points or [{}]
    zipped = [dict(zip(options.zip, row, strict=True)) for row in zip(*options.zip.values(), strict=True)] or [{}]
    grid = [dict(zip(options.grid, row, strict=True)) for row in itertools.product(*options.grid.values())]
    products = itertools.product(points, zipped, grid)
    return [Configuration(number, {**a, **b, **c}) for number, (a, b, c) in enumerate(products, 1)]


def find_duplicate(configurations: Sequence[Configuration]) -> Configuration | None:
    """Return the first configuration with the values of an earlier one; None if all differ."""
    seen: set[tuple[str, ...]] = set()
    for configuration in configurations:
        if (values := tuple(configuration.changes)) in seen:
            return configuration
        seen.add(values)
    return None


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each dotted key, or the whole key if several end alike.

    >>> short_names(["config.mu", "aggregation.learning_rate", "config.learning_rate"])["config.mu"]
    'mu'
    """
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def describe(values: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return values in one line, such as `learning_rate=0.1, epochs=2`."""
    return ", ".join(f"{names[key]}={format_toml(value)}" for key, value in values.items())
