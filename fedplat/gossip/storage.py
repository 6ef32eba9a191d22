"""The state of a decentralised job as it is stored: in a form for JSON, without the rules, which the job file has."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec

from fedplat.config.decoding import prepare_type
from fedplat.gossip.state import GossipRules, GossipState


def state_to_builtins(state: GossipState) -> dict[str, Any]:
    """Return what is stored of a state. Infinite distances, which JSON does not support, are left out."""
    names = (field.name for field in dataclasses.fields(state))
    stored = {name: msgspec.to_builtins(getattr(state, name)) for name in names if name != "rules"}
    stored["consensus"] = {name: x for name, x in stored["consensus"].items() if math.isfinite(x)}
    return stored


def state_from_builtins(stored: object, rules: GossipRules) -> GossipState:
    """Return a state from its stored form. Raises `msgspec.ValidationError` if it has none."""
    if not isinstance(stored, dict):
        raise msgspec.ValidationError(f"Expected `object`, got `{type(stored).__name__}`")
    whole = {**stored, "rules": msgspec.to_builtins(rules)}
    return msgspec.convert(whole, prepare_type(GossipState))
