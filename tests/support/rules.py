"""Rules by their name, with no more options than they need."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from fedplat.aggregate import Options, Rule

NEEDED: Mapping[str, Mapping[str, int]] = {"scaffold": {"num_clients": 10}, "feddyn": {"num_clients": 10}}


def make_rule(name: str) -> Rule:
    return msgspec.convert({"rule": name, **NEEDED.get(name, {})}, Options).build()
