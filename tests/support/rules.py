"""Rules by their name, with no more options than they need."""

from __future__ import annotations

from collections.abc import Mapping

from fedplat.aggregate import Rule, RuleOptions
from fedplat.config.plugins import BUILTIN

NEEDED: Mapping[str, Mapping[str, float]] = {
    "scaffold": {"num_clients": 10},
    "feddyn": {"num_clients": 10},
    "fedex_lora": {"scaling": 2.0},
    "flora": {"scaling": 2.0},
}


def make_rule(name: str) -> Rule:
    return BUILTIN.decode(RuleOptions, {"rule": name, **NEEDED.get(name, {})}).build()
