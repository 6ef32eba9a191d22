"""One suite for all policies: add one by adding a row to `CASES`."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from msgspec import Struct

from fedplat.plugins import BUILTIN
from fedplat.sampling import POLICIES, ClientHistory, Policy
from support.waiting import Waiting, heard

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
SIZES = (0, 1, 2, 7, 40, 300)
every_policy = pytest.mark.parametrize("name", CASES)


def make(name: str) -> Policy:
    return BUILTIN.decode(Policy, CASES[name])


def some(total: int) -> Waiting:
    """Clients of all kinds: with and without labels, known, broken, and new; some report nonsense."""
    sizes = ("1", "30", "1e300", "-4", "0", "nan", "inf", "many", "")
    labels = [
        ({"region": f"r{i % 3}"} if i % 5 else {}) | ({"size": sizes[i % len(sizes)]} if i % 7 else {})
        for i in range(total)
    ]
    strange = (
        ClientHistory(1, 1),
        heard(1e300, 1e9, num_examples=1e300),
        heard(0.0, 0.0, num_examples=0.0),
        heard(1e-300),
    )
    pasts = {i: strange[i // 3 % 5] if i // 3 % 5 < 4 else heard(0.5, i % 20, round_=4) for i in range(0, total, 3)}
    return Waiting(labels, pasts, 9, [0.0, 5.0, 4.0, 3.0, 2.0, 1e100, 0.0, 1.0])


def test_every_policy_has_a_row() -> None:
    assert {case["policy"] for case in CASES.values()} == POLICIES.keys()


def test_the_union_and_the_table_agree() -> None:
    for name, record in POLICIES.items():
        config = cast(type[Struct], record).__struct_config__
        assert (config.tag, config.tag_field, config.frozen) == (name, "policy", True)
    assert {type(make(name)) for name in CASES} == set(POLICIES.values())


@every_policy
@pytest.mark.parametrize("total", SIZES)
@pytest.mark.parametrize("count", [1, 2, 5, 40, 1000])
def test_a_draw_holds_different_candidates_and_no_more_than_wanted(name: str, total: int, count: int) -> None:
    policy, rng = make(name), np.random.default_rng(total)
    for _ in range(5):
        drawn = policy.draw(some(total), count, rng)
        assert all(type(index) is int and 0 <= index < total for index in drawn)
        assert len(set(drawn)) == len(drawn)
        if not policy.is_trial:
            assert len(drawn) == min(count, total)


@every_policy
def test_a_seed_draws_the_same_again_and_changes_nothing(name: str) -> None:
    one, two = some(300), some(300)
    draws = [make(name).draw(one, 40, np.random.default_rng(7)) for _ in range(2)]
    assert draws[0] == draws[1]
    assert one == two
    if CASES[name].get("rate") != 1.0:
        assert sorted(make(name).draw(one, 40, np.random.default_rng(8))) != sorted(draws[0])


@every_policy
def test_in_the_end_everybody_is_drawn(name: str) -> None:
    policy, rng, labels, pasts = make(name), np.random.default_rng(3), some(40).labels, dict[int, ClientHistory]()
    for round_ in range(1, 301):
        for index in policy.draw(Waiting(labels, pasts, round_), 8, rng):
            pasts[index] = heard(1.0 + index, index % 7, round_=round_, num_examples=1 + index % 5)
    assert pasts.keys() == set(range(40))


@every_policy
def test_all_clients_are_drawn_where_no_more_wait_than_are_wanted(name: str) -> None:
    if not make(name).is_trial:
        assert sorted(make(name).draw(some(40), 40, np.random.default_rng(0))) == list(range(40))
