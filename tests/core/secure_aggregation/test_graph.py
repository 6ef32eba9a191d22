"""The graph of a group, and the numbers of neighbours that are enough."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedplat.errors import SecureAggregationError
from fedplat.secure_aggregation.messages import SecureAggregation
from fedplat.secure_aggregation.setup import Graph, default_degree, default_peers, find_parameters

PARAMETERS = {
    (50, False): [(12, 6), (22, 11)],
    (100, False): [(22, 11), (40, 21)],
    (300, False): [(36, 21), (74, 41)],
    (1000, False): [(48, 27), (98, 54)],
    (50, True): [(16, 11), (32, 22)],
    (100, True): [(32, 22), (62, 42)],
    (300, True): [(66, 46), (160, 109)],
    (1000, True): [(96, 67), (302, 206)],
}
"""Neighbours and threshold for 10 % and 20 % that collude and as many that drop out, as google/federated-compute."""


@pytest.mark.parametrize(("size", "is_active"), PARAMETERS)
def test_parameters_are_those_of_the_reference(size: int, is_active: bool) -> None:
    found = [find_parameters(size, part, part, is_active=is_active) for part in (0.1, 0.2)]
    assert found == PARAMETERS[size, is_active]


def test_no_parameters_are_found_where_there_are_none() -> None:
    with pytest.raises(SecureAggregationError, match="no graph of 40 clients"):
        find_parameters(40, 0.4, 0.4, is_active=True)


def tail(size: int, marked: int, draws: int, least: int) -> Fraction:
    """The chance that of `draws` clients at least `least` are among the `marked` ones of all."""
    ways = (math.comb(marked, k) * math.comb(size - marked, draws - k) for k in range(least, min(marked, draws) + 1))
    return Fraction(sum(ways), math.comb(size, draws))


@pytest.mark.parametrize("size", [101, 128, 300, 700, 1000])
def test_the_default_graph_is_safe_and_rarely_fails(size: int) -> None:
    graph = Graph.of(SecureAggregation(), size)
    holders = graph.degree + 1
    assert graph.threshold == math.ceil(2 * holders / 3) < holders < size
    bad = size // 10
    # A client fails if too many of its neighbours dropped out; it holds a share itself, unless it dropped out as well.
    fails = bad * tail(size - 1, bad - 1, graph.degree, graph.degree - graph.threshold + 1)
    fails += (size - bad) * tail(size - 1, bad, graph.degree, graph.degree - graph.threshold + 2)
    assert fails < Fraction(1, 2**20)
    # With c colluding neighbours, holders + c answers are to be had, of which both secrets need `threshold` each.
    read = size * tail(size - 1, bad, graph.degree, 2 * graph.threshold - holders)
    cut = Fraction(size * (size - graph.degree - 1), 2)
    cut *= (
        Fraction(math.comb(size - graph.degree, 2 * bad - graph.degree), math.comb(size, 2 * bad))
        if (graph.degree <= 2 * bad)
        else 0
    )
    assert read + cut < Fraction(1, 2**40)


@pytest.mark.parametrize("size", [50, 51, 75, 100, 101, 300, 1000])
def test_masks_hide_all_but_the_sum_from_a_third_of_the_clients(size: int) -> None:
    graph = Graph.of(SecureAggregation(), size)
    missing = int((2 * 2 / 3 - 1 + 0.1) * size)  # those that collude, and those that drop out
    assert graph.num_peers <= min(graph.degree, missing + 2)
    if missing < graph.num_peers:  # too few to cut the circle in two places
        return
    # A client, or several, are apart if half of `num_peers` consecutive clients are missing on both sides of them.
    places = size * (size - graph.num_peers - 1) // 2
    cut = Fraction(places * math.comb(size - graph.num_peers, missing - graph.num_peers), math.comb(size, missing))
    assert cut < Fraction(1, 2**41)


def test_random_survivors_are_connected() -> None:
    rng, graph = np.random.default_rng(0), Graph.of(SecureAggregation(), 100)
    for _ in range(100):
        left = {int(each) for each in rng.permutation(100)[43:]}
        found, new = set[int](), {min(left)}
        while new:
            found |= new
            new = {peer for each in new for peer in graph.peers(each)} & left - found
        assert found == left


def test_masks_are_shared_with_all_where_fewer_would_not_be_safe_enough() -> None:
    for options, size in (
        (SecureAggregation(), 49),
        (SecureAggregation(confirm=True), 100),
        (SecureAggregation(neighbours=60), 100),
        (SecureAggregation(threshold=1.0), 100),
    ):
        graph = Graph.of(options, size)
        assert graph.num_peers == graph.degree
    assert Graph.of(SecureAggregation(), 100) == Graph(100, 99, 67, default_peers(100, 2 / 3))
    assert default_peers(100, 0.51) < default_peers(100, 2 / 3) < default_peers(100, 0.9) < 99


def test_small_groups_and_thresholds_that_need_it_have_complete_graphs() -> None:
    assert default_degree(100, 2 / 3) == 99
    assert default_degree(101, 2 / 3) < 100
    assert default_degree(400, 0.51) == default_degree(400, 0.95) == 399
    assert Graph.of(SecureAggregation(neighbours=60), 50).degree == 49
    assert Graph.of(SecureAggregation(neighbours=60), 500) == Graph(500, 60, 41, 60)
    assert Graph.of(SecureAggregation(threshold=0.51), 5).threshold == 3
    assert Graph.of(SecureAggregation(threshold=1.0), 5).threshold == 5


@given(size=st.integers(3, 40), half=st.integers(1, 19), peers=st.sampled_from([2, 6, 40]), seed=st.integers(0, 1000))
def test_neighbours_are_the_nearest_and_mutual(size: int, half: int, peers: int, seed: int) -> None:
    degree = min(2 * half, size - 1)
    graph = Graph(size, degree, degree // 2 + 1, min(peers, degree))
    for position in range(size):
        neighbours = graph.neighbours(position)
        assert neighbours == sorted(set(neighbours) - {position})
        assert len(neighbours) == degree
        assert all(position in graph.neighbours(other) for other in neighbours)
        distances = [min((position - other) % size, (other - position) % size) for other in neighbours]
        assert max(distances) == math.ceil(degree / 2)
        assert set(graph.peers(position)) <= set(neighbours)
        assert len(graph.peers(position)) == graph.num_peers
        assert all(position in graph.peers(other) for other in graph.peers(position))
        assert graph.holders(position) == sorted([*neighbours, position])
    rng = np.random.default_rng(seed)
    answered = {int(each) for each in rng.permutation(size)[: rng.integers(size + 1)]}
    secrets = {int(each) for each in rng.permutation(size)[: rng.integers(size + 1)]}
    enough = all(len(answered.intersection(graph.holders(each))) >= graph.threshold for each in secrets)
    assert graph.is_recoverable(secrets, answered) == enough


def test_positions_beyond_the_group_are_refused() -> None:
    for position in (-1, 5):
        with pytest.raises(SecureAggregationError, match="is not in a group of 5"):
            Graph(5, 4, 3, 4).neighbours(position)
