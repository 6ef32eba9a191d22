"""Topologies and mixing weights, against eigenvalues and rates of the papers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.gossip import Gossip, Links, count_turns, draw_edges, gap_of, metropolis, mix_all, push_sum, spectral_gap
from fedplat.gossip.topology import Topology

TOPOLOGIES: tuple[Topology, ...] = (
    "ring",
    "torus",
    "grid",
    "exponential",
    "one-peer-exponential",
    "pairs",
    "one-pair",
    "complete",
)


def names_of(count: int) -> list[str]:
    return [f"{number:05}" for number in range(count)]


def links_of(topology: Topology, count: int, round_number: int = 1, seed: int = 0) -> Links:
    options = Gossip(topology=topology, seed=seed)
    return metropolis(count, draw_edges(options, names_of(count), round_number))


@pytest.mark.parametrize("count", [3, 8, 16])
def test_the_second_eigenvalue_of_a_ring(count: int) -> None:
    gap = spectral_gap(links_of("ring", count))
    largest = max(abs(1 / 3 + 2 / 3 * np.cos(2 * np.pi * k / count)) for k in range(1, count))
    assert gap == pytest.approx(1 - largest, abs=1e-12)


def test_the_error_along_the_second_eigenvector_decreases_by_its_eigenvalue() -> None:
    links, rounds = links_of("ring", 8), 30
    values, vectors = np.linalg.eigh(links.matrix())
    x = 5.0 + vectors[:, -2:-1]  # the mean, and an error of norm 1
    for _ in range(rounds):
        x = mix_all(links, x)
    assert values[-2] == pytest.approx(0.8047, abs=1e-4)
    assert np.linalg.norm(x - 5.0) == pytest.approx(values[-2] ** rounds, abs=1e-5 * values[-2] ** rounds)


@pytest.mark.parametrize(
    ("topology", "count", "rounds"),
    [("one-peer-exponential", 16, 4), ("grid", 16, 2), ("grid", 12, 2), ("complete", 7, 1)],
)
def test_some_topologies_are_exact_after_a_few_rounds(topology: Topology, count: int, rounds: int) -> None:
    x = np.random.default_rng(1).standard_normal((count, 3))
    mean = x.mean(axis=0)
    for number in range(1, rounds + 1):
        assert not np.allclose(x, mean, atol=1e-3)
        x = mix_all(links_of(topology, count, number), x)
    np.testing.assert_allclose(x, np.broadcast_to(mean, x.shape), atol=1e-14)


@pytest.mark.parametrize(("topology", "rate"), [("one-pair", 1 - 1 / 7), ("pairs", (1 - 1 / 7) / 2)])
def test_random_pairs_contract_at_the_rate_of_the_theory(topology: Topology, rate: float) -> None:
    count, rounds = 8, 2
    start = np.random.default_rng(2).standard_normal((count, 1))
    start -= start.mean()
    errors: list[float] = []
    for seed in range(2000):
        x = start
        for number in range(1, rounds + 1):
            x = mix_all(links_of(topology, count, number, seed), x)
        errors.append(float(np.sum(x * x) / np.sum(start * start)))
    assert np.mean(errors) == pytest.approx(rate**rounds, rel=0.05)


def test_the_gap_of_a_sequence() -> None:
    def draw(turn: int) -> Links:
        return links_of("one-peer-exponential", 8, turn + 1)

    assert count_turns(Gossip(topology="one-peer-exponential"), 8) == 3
    assert gap_of(draw, 3) == pytest.approx(1.0, abs=1e-4)
    assert gap_of(draw, 1) == pytest.approx(0.0, abs=1e-12)


@given(st.sampled_from(TOPOLOGIES), st.integers(2, 40), st.integers(1, 50), st.floats(0, 1), st.integers(0, 2**32))
def test_weights_stay_doubly_stochastic_with_any_loss(
    topology: Topology, count: int, number: int, loss: float, seed: int
) -> None:
    edges = draw_edges(Gossip(topology=topology, seed=seed), names_of(count), number)
    edges = edges[np.random.default_rng(seed).random(len(edges)) >= loss]
    matrix = metropolis(count, edges).matrix()
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0, atol=1e-14)
    assert matrix.min() >= 0.0
    assert matrix.diagonal().min() > 0.0
    columns = push_sum(count, edges).matrix().sum(axis=0)
    np.testing.assert_allclose(columns, 1.0, atol=1e-14)


@given(st.sampled_from(TOPOLOGIES), st.integers(2, 40), st.integers(1, 50), st.booleans())
def test_edges_are_in_order_and_once_each(topology: Topology, count: int, number: int, directed: bool) -> None:
    options = Gossip(topology=topology, exchange="push-sum" if directed else "neighbours")
    edges = draw_edges(options, names_of(count), number)
    pairs = [(first, second) for first, second in edges.tolist()]
    assert pairs == sorted(set(pairs))
    assert all(0 <= first < count and 0 <= second < count and first != second for first, second in pairs)
    assert directed or all(first < second for first, second in pairs)
    np.testing.assert_array_equal(edges, draw_edges(options, names_of(count), number))


@settings(max_examples=30)
@given(st.sampled_from(TOPOLOGIES), st.integers(2, 16), st.booleans())
def test_every_topology_connects_all_silos_in_time(topology: Topology, count: int, directed: bool) -> None:
    options = Gossip(topology=topology, exchange="push-sum" if directed else "neighbours")
    reached = np.eye(count, dtype=bool)
    rounds = 200 if topology in ("pairs", "one-pair") else count * count_turns(options, count)
    for number in range(1, rounds + 1):
        edges = draw_edges(options, names_of(count), number)
        links = push_sum(count, edges) if directed else metropolis(count, edges)
        reached = (links.matrix() > 0) @ reached
    assert reached.all()


def test_given_edges_between_those_who_take_part() -> None:
    options = Gossip(topology="edges", edges=(("b", "a"), ("b", "c"), ("c", "d")))
    assert draw_edges(options, ["a", "b", "d"], 1).tolist() == [[0, 1]]
    links = metropolis(4, draw_edges(options, ["a", "b", "c", "d"], 9))
    assert links.row(1) == (pytest.approx(1 / 3), ((0, pytest.approx(1 / 3)), (2, pytest.approx(1 / 3))))
    assert metropolis(3, np.empty((0, 2), np.int64)).row(2) == (1.0, ())


def test_names_must_be_sorted() -> None:
    with pytest.raises(ValueError, match="not sorted"):
        draw_edges(Gossip(), ["b", "a"], 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topology": "edges"}, 'edges: expected with topology = "edges" only'),
        ({"edges": (("a", "b"),)}, 'and it is "ring"'),
        ({"topology": "edges", "edges": (("a", "a"),)}, "'a' is a neighbour of itself"),
        ({"topology": "edges", "edges": (("a", "b"), ("b", "a"))}, "'b' and 'a' are there twice"),
        ({"exchange": "ring", "topology": "grid"}, "a ring all-reduce has no other topology"),
        ({"exchange": "push-sum", "gamma": 0.5}, 'expected with exchange = "neighbours" only'),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Gossip(**options)  # pyright: ignore[reportArgumentType]


def test_a_link_may_have_both_directions() -> None:
    options = Gossip(topology="edges", exchange="push-sum", edges=(("a", "b"), ("b", "a")))
    assert draw_edges(options, ["a", "b"], 1).tolist() == [[0, 1], [1, 0]]


def test_a_matrix_has_a_limit() -> None:
    links: npt.NDArray[np.int64] = np.empty((0, 2), np.int64)
    with pytest.raises(ValueError, match="the matrix of 2001 silos is too large; expected at most 2000"):
        metropolis(2001, links).matrix()
