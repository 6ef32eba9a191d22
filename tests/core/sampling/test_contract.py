"""One suite for all policies: add one by adding a row to `CASES`."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from msgspec import Struct

from fedplat.config.plugins import BUILTIN
from fedplat.sampling import POLICIES, Policy
from fedplat.testing import check_policy
from fedplat.testing.policies import make_fleet

CASES: dict[str, dict[str, Any]] = {
    "uniform": {"policy": "uniform"},
    "poisson": {"policy": "poisson", "rate": 0.3},
    "poisson-all": {"policy": "poisson", "rate": 1.0},
    "weighted-examples": {"policy": "weighted"},
    "weighted-label": {"policy": "weighted", "label": "size", "max_weight": 50.0},
    "stratified": {"policy": "stratified", "label": "region"},
    "stratified-equal": {"policy": "stratified", "label": "region", "shares": "equal"},
    "oort": {"policy": "oort", "pacer_s": 10.0},
    "oort-speed": {"policy": "oort", "pacer_s": 10.0, "speed": "size", "window": 2},
}
LABELS = {
    "region": ["eu", "us", "asia"],
    "size": ["1", "30", "1e300", "-4", "0", "nan", "inf", "many", ""],
}
"""Values of the labels above; some are not numbers."""
every_policy = pytest.mark.parametrize("name", CASES)


def make(name: str) -> Policy:
    return BUILTIN.decode(Policy, CASES[name])


def test_every_policy_has_a_row() -> None:
    assert {case["policy"] for case in CASES.values()} == POLICIES.keys()


def test_the_union_and_the_table_agree() -> None:
    for name, record in POLICIES.items():
        config = cast(type[Struct], record).__struct_config__
        assert (config.tag, config.tag_field, config.frozen) == (name, "policy", True)
    assert {type(make(name)) for name in CASES} == set(POLICIES.values())


@every_policy
def test_the_public_checks(name: str) -> None:
    check_policy(make(name), LABELS)


@every_policy
def test_another_seed_draws_other_clients(name: str) -> None:
    if CASES[name].get("rate") != 1.0:
        fleet = make_fleet(300, LABELS)
        one, two = (make(name).draw(fleet, 40, np.random.default_rng(seed)) for seed in (7, 8))
        assert sorted(one) != sorted(two)
