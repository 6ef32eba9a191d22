"""The rule `flower`: a strategy of Flower (https://flower.ai), or one that is written for it, makes the next version.

This file has the options. `strategy_rule.py` calls the strategy, and is imported when it is first used: only the
server, or a simulation, needs `flwr`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Annotated

import msgspec
from msgspec import Meta

from fedplat import errors, model
from fedplat.aggregate import algebra, mean
from fedplat.aggregate.robust.inputs import keep_updates
from fedplat.config.plugins import add_builtin
from fedplat.flower.strategies import FlowerStrategy

Value = bool | int | float | Annotated[str, Meta(max_length=1000)]


def _import_rule() -> ModuleType:
    """Import the code that calls strategies. Raises `MissingExtraError` without `flwr`."""
    from fedplat.flower import app

    app.check_version()
    from fedplat.flower import strategy_rule

    return strategy_rule


class FlowerAggregation(algebra.BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="flower"):
    """Options of the rule `flower` (extra "flower" of the server)."""

    strategy: FlowerStrategy
    """Class of the strategy, such as `strategy = "FedAdam"`."""
    options: dict[str, Value] = msgspec.field(default_factory=dict[str, Value])
    """Arguments of the class, such as `options = { eta = 0.01 }`."""

    def build(self) -> algebra.Rule:
        """Return the rule with these options. It imports `flwr` when it is used."""

        def gather(state: Mapping[str, model.Blocks], partial: algebra.Partial) -> algebra.Partial:
            return _import_rule().aggregate(self.strategy, self.options, partial)

        def misfit(schema: model.Schema) -> str:
            try:
                _import_rule().make_strategy(self.strategy, self.options)
            except errors.FedplatError as exc:
                return str(exc)
            return ""

        return dataclasses.replace(
            keep_updates(mean.weighted_mean()),
            gather=gather,
            keeps_memory=True,
            requirements=algebra.ClientRequirements(misfit=misfit),
        )


add_builtin("rules", FlowerAggregation)
