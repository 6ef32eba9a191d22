"""The names of Flower's strategies in a job file, and those that are written for it: nothing here imports `flwr`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import ClassVar, Protocol, runtime_checkable

import msgspec

from fedplat.config.plugins import Kind, by_name, define


@runtime_checkable
class FlowerStrategy(Protocol):
    """The key `strategy` of a job file: a class of strategies, selected by its name."""

    def find(self) -> type | None:
        """Return the class; None for the one that Flower has under the name."""
        ...


class _StrategyName(msgspec.Struct, frozen=True):
    """The base of the records of strategies."""

    own_class: ClassVar[type | None] = None

    def find(self) -> type | None:
        """Return the class; None for the one that Flower has under the name."""
        return self.own_class


class FlowerFedAvg(_StrategyName, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="FedAvg"):
    """Flower's weighted mean."""


class FlowerFedAvgM(_StrategyName, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="FedAvgM"):
    """Flower's FedAvg with server momentum."""


class FlowerFedAdam(_StrategyName, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="FedAdam"):
    """Flower's FedAdam."""


class FlowerFedYogi(_StrategyName, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="FedYogi"):
    """Flower's FedYogi."""


class FlowerFedAdagrad(_StrategyName, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="FedAdagrad"):
    """Flower's FedAdagrad."""


class FlowerFedMedian(_StrategyName, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="FedMedian"):
    """Flower's median of each entry."""


class FlowerFedTrimmedAvg(
    _StrategyName, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="FedTrimmedAvg"
):
    """Flower's trimmed mean of each entry."""


class FlowerFedProx(_StrategyName, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="FedProx"):
    """Flower's FedProx, which is FedAvg on the server."""


class FlowerQFedAvg(_StrategyName, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="QFedAvg"):
    """Flower's q-FedAvg."""


class FlowerKrum(_StrategyName, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="Krum"):
    """Flower's Krum."""


class FlowerMultiKrum(_StrategyName, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="MultiKrum"):
    """Flower's Multi-Krum."""


class FlowerBulyan(_StrategyName, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="Bulyan"):
    """Flower's Bulyan."""


FLOWER_STRATEGIES: Mapping[str, type[FlowerStrategy]] = by_name(
    FlowerFedAvg,
    FlowerFedAvgM,
    FlowerFedAdam,
    FlowerFedYogi,
    FlowerFedAdagrad,
    FlowerFedMedian,
    FlowerFedTrimmedAvg,
    FlowerFedProx,
    FlowerQFedAvg,
    FlowerKrum,
    FlowerMultiKrum,
    FlowerBulyan,
)
"""The record of each strategy of Flower that a job may name.

Its other strategies wrap another one, for privacy, or merge decision trees, not arrays.
"""


@functools.cache
def _make_record(found: object) -> object:
    """Return the record of a class of strategies; anything else as it is."""
    methods = ("configure_train", "aggregate_train")
    if not isinstance(found, type) or issubclass(found, msgspec.Struct):
        return found
    if not all(callable(getattr(found, method, None)) for method in methods):
        return found
    return msgspec.defstruct(
        found.__name__,
        [],
        bases=(_StrategyName,),
        module=found.__module__,
        namespace={"__doc__": found.__doc__, "own_class": found},
        frozen=True,
    )


define(
    Kind(
        "flower-strategies",
        "name",
        "a Flower strategy",
        FlowerStrategy,
        ("find",),
        FLOWER_STRATEGIES,
        plain=True,
        adapt=_make_record,
    )
)
