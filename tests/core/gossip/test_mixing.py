"""Mixing: the mean with lost messages, push-sum, compressed gossip, and the distance that silos report."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedplat.codecs import Bf16, Codec, Plain, Quantize, TopK
from fedplat.gossip import (
    Gossip,
    choco_gamma,
    choco_rate,
    combine,
    compress,
    distance_from_mean,
    draw_edges,
    follow,
    measure_consensus,
    measure_quality,
    metropolis,
    mix,
    mix_all,
    push_all,
    push_sum,
    spectral_gap,
)
from fedplat.gossip.topology import Links, Topology

Floats = npt.NDArray[np.float64]


def names_of(count: int) -> list[str]:
    return [f"{number:05}" for number in range(count)]


def ring(count: int) -> Links:
    return metropolis(count, draw_edges(Gossip(), names_of(count), 1))


@pytest.mark.parametrize("topology", ["ring", "pairs", "exponential", "grid"])
def test_the_mean_is_constant_with_a_third_of_the_messages_lost(topology: Topology) -> None:
    count, rng = 32, np.random.default_rng(3)
    x = rng.standard_normal((count, 5)) * 100.0
    mean, start = x.mean(axis=0), distance_from_mean(x)
    for number in range(1, 301):
        edges = draw_edges(Gossip(topology=topology), names_of(count), number)
        x = mix_all(metropolis(count, edges[rng.random(len(edges)) >= 0.3]), x)
    np.testing.assert_allclose(x.mean(axis=0), mean, rtol=0, atol=1e-11)
    assert distance_from_mean(x) < 0.05 * start


def test_one_silo_computes_its_row() -> None:
    count, rng = 8, np.random.default_rng(4)
    links, x = ring(count), rng.standard_normal((count, 100_000)).astype(np.float32)
    expected = links.matrix() @ x.astype(np.float64)
    for silo in range(count):
        _, neighbours = links.row(silo)
        found = mix(x[silo], [(weight, x[j]) for j, weight in neighbours])
        np.testing.assert_allclose(found, expected[silo], atol=1e-6)
        assert found.dtype == np.float32
    assert mix(x[0], []) is not x[0]
    np.testing.assert_array_equal(mix(x[0], []), x[0])
    with pytest.raises(ValueError, match=r"has the shape \(3,\); expected \(100000,\)"):
        mix(x[0], [(0.5, x[0][:3])])


@pytest.mark.parametrize(("codec", "scale"), [(Quantize(bits=4), 50.0), (TopK(fraction=0.2), 0.3)])
def test_compressed_gossip_makes_no_variance_negative(codec: Quantize | TopK, scale: float) -> None:
    count, size, rng, built = 4, 40, np.random.default_rng(6), codec.build()
    links, spreads = ring(count), (range(10, 20), range(30, 35))
    x = rng.normal(scale=scale, size=(count, size)).astype(np.float32)
    is_spread = np.isin(np.arange(size), [*spreads[0], *spreads[1]])
    x[:, is_spread] = rng.random((count, 15), np.float32)
    copies, num_negative = np.zeros_like(x), 0
    for _ in range(10):
        copies = np.stack([compress(built, x[silo], copies[silo], rng)[1] for silo in range(count)])
        rows = [[(weight, copies[j]) for j, weight in links.row(silo)[1]] for silo in range(count)]
        free = np.stack([mix(x[silo], rows[silo], copies[silo], 0.8) for silo in range(count)])
        x = np.stack([mix(x[silo], rows[silo], copies[silo], 0.8, spreads) for silo in range(count)])
        num_negative += int((free[:, is_spread] < 0).sum())
        np.testing.assert_array_equal(x, np.where(is_spread, np.maximum(free, 0), free))
    assert num_negative > 0


def test_push_sum_converges_to_the_mean_with_silent_senders() -> None:
    count, rng = 16, np.random.default_rng(5)
    options = Gossip(topology="exponential", exchange="push-sum")
    x = rng.standard_normal((count, 4))
    mean, sums, weights = x.mean(axis=0), x.copy(), np.ones((count, 1))
    for number in range(1, 121):
        edges = draw_edges(options, names_of(count), number)
        links = push_sum(count, edges[rng.random(count)[edges[:, 0]] >= 0.3])
        sums, weights = push_all(links, sums), push_all(links, weights)
        assert weights.sum() == pytest.approx(count, abs=1e-11)
    np.testing.assert_allclose(sums.sum(axis=0), x.sum(axis=0), atol=1e-11)
    np.testing.assert_allclose(sums / weights, np.broadcast_to(mean, x.shape), atol=1e-9)
    assert np.ptp(weights) > 0.01  # without the division, the silos would not agree on the mean


def test_push_sum_of_one_peer_is_exact() -> None:
    options, x = Gossip(topology="one-peer-exponential", exchange="push-sum"), np.arange(8.0)[:, None]
    sums, weights = x, np.ones((8, 1))
    for number in (1, 2, 3):
        links = push_sum(8, draw_edges(options, names_of(8), number))
        sums, weights = push_all(links, sums), push_all(links, weights)
    np.testing.assert_allclose(sums / weights, 3.5, atol=1e-14)


@given(st.integers(2, 12), st.integers(0, 2**32), st.floats(0, 1))
def test_one_silo_combines_what_it_got(count: int, seed: int, loss: float) -> None:
    rng = np.random.default_rng(seed)
    edges = draw_edges(Gossip(topology="exponential", exchange="push-sum"), names_of(count), 1)
    links = push_sum(count, edges[rng.random(len(edges)) >= loss])
    sums, weights = rng.standard_normal((count, 3)), rng.random(count)
    for silo in range(count):
        own, senders = links.row(silo)
        got, mass = combine((own, sums[silo], weights[silo]), [(share, sums[j], weights[j]) for j, share in senders])
        np.testing.assert_allclose(got, push_all(links, sums)[silo], atol=1e-14)
        assert mass == pytest.approx(push_all(links, weights[:, None])[silo, 0], abs=1e-14)


def run_choco(codec: Codec, gamma: float, rounds: int, size: int = 2000, loss: float = 0.0) -> tuple[Floats, Floats]:
    """Return the error of each round, ‖X - X̄‖² + ‖X - X̂‖² as in Theorem 2, and the change of the mean."""
    count, rng = 8, np.random.default_rng(6)
    edges = draw_edges(Gossip(), names_of(count), 1)
    x = rng.standard_normal((count, size)).astype(np.float32)
    copies, mean, errors = np.zeros_like(x), x.mean(axis=0, dtype=np.float64), list[float]()
    for _ in range(rounds):
        for silo in range(count):
            payload, following = compress(codec, x[silo], copies[silo], rng)
            if not errors:
                np.testing.assert_array_equal(follow(codec, copies[silo], payload), following)
            copies[silo] = following
        links = metropolis(count, edges[rng.random(len(edges)) >= loss])
        x = np.stack(
            [
                mix(x[silo], [(weight, copies[j]) for j, weight in links.row(silo)[1]], copies[silo], gamma)
                for silo in range(count)
            ]
        )
        apart = x.astype(np.float64) - mean
        errors.append(float(np.sum(apart * apart) + np.sum((x.astype(np.float64) - copies) ** 2)))
    return np.array(errors), np.abs(x.mean(axis=0, dtype=np.float64) - mean)


def test_choco_without_compression_is_gossip() -> None:
    errors, _ = run_choco(Plain().build(), 1.0, 20, size=50)
    links = ring(8)
    x = np.random.default_rng(6).standard_normal((8, 50))
    mean = x.mean(axis=0)
    before = x
    for _ in range(20):
        x, before = mix_all(links, x), x
    assert errors[-1] == pytest.approx(float(np.sum((x - mean) ** 2) + np.sum((x - before) ** 2)), rel=1e-4)


@pytest.mark.parametrize(
    ("codec", "gamma"),
    [(Bf16().build(), 1.0), (Quantize(bits=8).build(), 0.9), (Quantize(bits=4).build(), 0.6)],
    ids=["bf16", "8 bits", "4 bits"],
)
def test_choco_converges_linearly_where_quantised_gossip_stalls(codec: Codec, gamma: float) -> None:
    errors, drift = run_choco(codec, gamma, 90, size=256)
    assert errors[-1] < 1e-8 * errors[0]
    assert drift.max() < 1e-6  # rounding to float32

    count, rng, links = 8, np.random.default_rng(6), ring(8)
    x = rng.standard_normal((count, 256)).astype(np.float32)
    start = distance_from_mean(x)
    for _ in range(90):  # each silo sends a quantised model and mixes what it got with its own model
        sent = np.stack([compress(codec, each, np.zeros_like(each), rng)[1] for each in x])
        x = np.stack([mix(x[i], [(weight, sent[j]) for j, weight in links.row(i)[1]]) for i in range(count)])
    assert distance_from_mean(x) > 1e-4 * start


def test_choco_with_top_k_stays_below_the_bound_of_its_theorem() -> None:
    fraction, links = 0.1, ring(8)
    gap = spectral_gap(links)
    beta = float(np.linalg.norm(np.eye(8) - links.matrix(), 2))
    errors, drift = run_choco(TopK(fraction=fraction, values="fp32").build(), choco_gamma(gap, beta, fraction), 20)
    bound = errors[0] * choco_rate(gap, fraction) ** np.arange(20)
    assert (errors <= bound * (1 + 1e-6)).all()
    assert drift.max() < 1e-5  # rounding to float32

    faster, _ = run_choco(TopK(fraction=fraction, values="fp32").build(), 0.1, 80, size=200)
    halves = faster[40] / faster[0], faster[-1] / faster[40]
    assert max(halves) < 0.3  # as fast at the end as at the beginning: it does not stall


def test_choco_keeps_the_mean_when_edges_are_lost() -> None:
    errors, drift = run_choco(Quantize(bits=8).build(), 0.8, 150, size=300, loss=0.3)
    assert drift.max() < 1e-6
    assert errors[-1] < 1e-6 * errors[0]


def test_the_quality_of_codecs() -> None:
    vector, rng = np.random.default_rng(7).standard_normal(10_000).astype(np.float32), np.random.default_rng(8)
    assert measure_quality(Plain().build(), vector, rng) == 1.0
    assert measure_quality(TopK(fraction=0.2, values="fp32").build(), vector, rng) > 0.2
    assert measure_quality(Bf16().build(), vector, rng) > 1 - 2**-16
    assert measure_quality(Plain().build(), np.zeros(3, np.float32), rng) == 1.0


@given(st.integers(2, 12), st.integers(0, 2**32), st.floats(0, 0.6))
def test_the_reported_distance_bounds_the_true_one(count: int, seed: int, loss: float) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 6)) + 3.0
    edges = draw_edges(Gossip(topology="complete"), names_of(count), 1)
    lost = edges[rng.random(len(edges)) >= loss]
    norms = np.sum(x * x, axis=1).tolist()

    def measure(some: npt.NDArray[np.int64]) -> tuple[float, float]:
        found = measure_consensus(some, np.sum((x[some[:, 0]] - x[some[:, 1]]) ** 2, axis=1).tolist(), norms)
        return found.bound, found.norm

    true = distance_from_mean(x)
    assert measure(edges) == (pytest.approx(true), pytest.approx(np.linalg.norm(x) / math.sqrt(count)))
    assert measure(lost)[0] >= true * (1 - 1e-9)


def test_distances_without_a_bound() -> None:
    pair = np.array([[0, 1]])
    found = measure_consensus(pair, [4.0], [1.0, 1.0, 1.0])
    assert (found.bound, found.estimate) == (math.inf, pytest.approx(math.sqrt(4.0 / 3.0)))
    assert found.relative == found.estimate
    nothing = np.empty((0, 2), np.int64)
    assert measure_consensus(nothing, [], [1.0, 1.0]).relative == math.inf
    assert measure_consensus(nothing, [], [4.0]).relative == 0.0
    assert measure_consensus(pair, [0.0], [0.0, 0.0]).relative == 0.0
