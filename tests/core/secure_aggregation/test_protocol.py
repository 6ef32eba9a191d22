"""The sum without masks is that of the survivors' vectors, bit for bit, for all drop-outs in all steps."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.errors import SecureAggregationError
from fedplat.secure_aggregation import primitives
from fedplat.secure_aggregation.unmasking import make_roster
from support.secure_group import SecureGroup, make_setup

STAYS, LEAVES_BEFORE_SHARING, LEAVES_BEFORE_MASKING, LEAVES_BEFORE_ANSWERING, LEAVES_BEFORE_CONFIRMING = range(5)


def circle(size: int, neighbours: int, position: int) -> set[int]:
    if neighbours >= size - 1:
        return set(range(size))
    return {(position + step) % size for step in range(-neighbours // 2, neighbours // 2 + 1)}


@settings(max_examples=40, deadline=None)
@given(
    exits=st.lists(st.sampled_from([STAYS] * 5 + [1, 2, 3]), min_size=3, max_size=11),
    neighbours=st.sampled_from([0, 4, 6]),
    modulus=st.sampled_from([32, 24, 9]),
    threshold=st.sampled_from([0.51, 2 / 3, 0.8]),
    minimum=st.integers(2, 4),
)
def test_the_sum_is_exact_for_every_admissible_pattern_of_drop_outs(
    exits: list[int], neighbours: int, modulus: int, threshold: float, minimum: int
) -> None:
    size = len(exits)
    setup = make_setup(
        size, neighbours=neighbours, modulus=modulus, bits=min(modulus - 1, 20), threshold=threshold, minimum=minimum
    )
    if size < minimum:
        return
    holders = [circle(size, neighbours or size, each) for each in range(size)]
    needed = max(len(holders[0]) // 2 + 1, math.ceil(threshold * len(holders[0]) - 1e-9))
    required = max(needed, 3)  # a client's own limit is three
    shared = {each for each in range(size) if exits[each] != LEAVES_BEFORE_SHARING}
    alive = {
        each for each in shared if exits[each] != LEAVES_BEFORE_MASKING and len(shared & holders[each]) >= required
    }
    answering = {
        each
        for each in alive
        if exits[each] != LEAVES_BEFORE_ANSWERING
        and len(alive & holders[each]) >= required
        and len(alive) >= max(minimum, 3)
    }
    is_possible = all(len(answering & holders[each]) >= needed for each in shared)

    group = SecureGroup(setup, size)
    group.share(sorted(shared))
    for position in sorted(shared):
        if exits[position] != LEAVES_BEFORE_MASKING:
            if position in alive:
                masked = group.mask(position)
                assert (masked != group.vectors[position]).any()
            else:
                with pytest.raises(SecureAggregationError, match="have sent shares"):
                    group.mask(position)
    request = group.request()
    for position in sorted(alive):
        if exits[position] != LEAVES_BEFORE_ANSWERING:
            if position in answering:
                group.answer(position, request)
            else:
                with pytest.raises(SecureAggregationError, match="surviv"):
                    group.answer(position, request)
    assert group.graph.is_recoverable(shared, answering) == is_possible or not shared
    masked_total = group.total.copy()
    if is_possible and alive:
        assert not group.unmask()
        assert group.total.tobytes() == group.expected.tobytes()
    elif shared:
        with pytest.raises(SecureAggregationError, match="cannot be removed"):
            group.unmask()
        assert group.total.tobytes() == masked_total.tobytes()


def run_four(exits: Sequence[int], *, confirm: bool) -> SecureGroup:
    """Four clients, of which any three recover a secret, take their steps until they leave."""
    group = SecureGroup(make_setup(4, threshold=0.51, confirm=confirm), 4)

    def remaining(*left: int) -> list[int]:
        return [position for position, each in enumerate(exits) if each not in left]

    group.share(remaining(LEAVES_BEFORE_SHARING))
    for position in remaining(LEAVES_BEFORE_SHARING, LEAVES_BEFORE_MASKING):
        group.mask(position)
    left = [LEAVES_BEFORE_SHARING, LEAVES_BEFORE_MASKING, LEAVES_BEFORE_CONFIRMING]
    request = group.request(confirming=remaining(*left) if confirm else ())
    for position in remaining(*left, LEAVES_BEFORE_ANSWERING):
        group.answer(position, request)
    group.unmask()
    return group


@pytest.mark.parametrize("confirm", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_sum_of_four_clients_is_exact_for_every_pattern_with_three_that_stay_and_for_no_other(
    confirm: bool,
) -> None:
    num_exact = 0
    for exits in itertools.product(range(5 if confirm else 4), repeat=4):
        with contextlib.suppress(SecureAggregationError):
            group = run_four(exits, confirm=confirm)
            if not group.vectors:  # all have left, and no client or server refuses the sum of none
                continue
            assert group.total.tobytes() == group.expected.tobytes()
            assert exits.count(STAYS) >= 3
            num_exact += 1
    assert num_exact == 1 + 4 * (4 if confirm else 3)  # all stay, or one of four leaves before any of the steps


def test_masks_are_shared_with_the_nearest_only_and_still_cancel_with_drop_outs() -> None:
    group = SecureGroup(make_setup(50), 50)
    assert group.graph.num_peers < group.graph.degree == 49
    with mock.patch.object(primitives, "apply_masks", wraps=primitives.apply_masks) as apply:
        group.reach_masking(dropped=[0, 1, 2, 17])
    assert [len(call.args[2]) + len(call.args[3]) for call in apply.call_args_list] == [group.graph.num_peers + 1] * 46
    request = group.request()
    for position in group.survivors.survivors[5:]:
        group.answer(position, request)
    assert not group.unmask()
    assert group.total.tobytes() == group.expected.tobytes()


@pytest.mark.parametrize("workers", [1, 3])
def test_long_vectors_and_several_threads_give_the_same_sum(workers: int) -> None:
    group = SecureGroup(make_setup(6, length=100_003, modulus=27), 6).reach_answers(dropped=[4])
    assert not group.unmask(workers)
    assert group.total.tobytes() == group.expected.tobytes()


@pytest.mark.slow
def test_a_large_group_has_a_graph_and_survives_drop_outs() -> None:
    group = SecureGroup(make_setup(101), 101)
    assert group.graph.degree < 100
    group.share(set(range(101)) - {7})
    for position in group.sent.keys() - {0, 33, 34, 90}:
        group.mask(position)
    request = group.request()
    for position in group.vectors.keys() - {5, 60}:
        group.answer(position, request)
    assert not group.unmask()
    assert group.total.tobytes() == group.expected.tobytes()


def test_clients_confirm_the_survivors_to_each_other() -> None:
    group = SecureGroup(make_setup(6, confirm=True), 6).reach_masking(dropped=[2])
    request = group.request(confirming=[0, 1, 3, 4])
    for position in (0, 1, 3, 4, 5):  # 5 was late with its confirmation, but sees those of enough others
        group.answer(position, request)
    assert not group.unmask()
    assert group.total.tobytes() == group.expected.tobytes()


def test_each_message_can_be_sent_again() -> None:
    group = SecureGroup(make_setup(4, confirm=True), 4)
    client = group.participants[0]
    assert client.advertise() == client.advertise() == group.members[0].keys.to_bytes()
    group.share()
    assert client.share(make_roster(group.members, 0)) == group.sent[0].to_bytes()
    for position in range(4):
        group.mask(position)
    request = group.request(confirming=range(4))
    assert client.confirm(group.survivors.to_bytes()) == client.confirm(group.survivors.to_bytes())
    assert client.answer(request) == client.answer(request)
