"""Ring all-reduce with pairwise masks."""

from __future__ import annotations

import itertools
import os

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.errors import SecureAggregationError
from fedplat.gossip.messages import RingPlace
from fedplat.gossip.mixing import add_parts, find_largest, quantize_share, read_integer_mean
from fedplat.gossip.ring import Ring, RingMember
from fedplat.secure_aggregation.primitives import KeyPair

Models = npt.NDArray[np.float32]


def make_ring(models: Models, shares: list[float], attempt: int = 1) -> tuple[Ring, list[KeyPair]]:
    keys = [KeyPair.draw(os.urandom) for _ in models]
    places = tuple(
        RingPlace(f"silo-{number}", "", key.public, share)
        for number, (key, share) in enumerate(zip(keys, shares, strict=True))
    )
    bound = max(find_largest(model) for model in models)
    return Ring(job_id="job", round=1, attempt=attempt, members=places, bound=bound, size=models.shape[1]), keys


def make_members(models: Models, shares: list[float]) -> list[RingMember]:
    ring, keys = make_ring(models, shares)
    return [RingMember(ring, f"silo-{i}", key, model) for i, (key, model) in enumerate(zip(keys, models, strict=True))]


def run_ring(members: list[RingMember]) -> list[list[bytes]]:
    """Pass all messages, and return those that each silo sent."""
    sent: list[list[bytes]] = [[] for _ in members]
    for step in range(2 * (len(members) - 1)):
        for number, member in enumerate(members):
            sent[number].append(member.outgoing(step))
        for number, member in enumerate(members):
            member.receive(step, sent[number - 1][step])
    return sent


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 9), st.integers(1, 50), st.integers(0, 2**32), st.sampled_from([1e-20, 1.0, 3e7]))
def test_the_mean_is_that_of_the_quantised_models_bit_for_bit(count: int, size: int, seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    models = (rng.standard_normal((count, size)) * scale).astype(np.float32)
    examples = rng.integers(1, 1000, count)
    shares = (examples / examples.sum()).tolist()
    members = make_members(models, shares)
    run_ring(members)
    bound = max(find_largest(model) for model in models)
    parts = [quantize_share(model, share, bound, count) for model, share in zip(models, shares, strict=True)]
    expected = read_integer_mean(add_parts(parts), bound, count)
    for member in members:
        np.testing.assert_array_equal(member.mean(), expected)
    assert len({member.digest() for member in members}) == 1
    weighted = np.average(models.astype(np.float64), axis=0, weights=examples)
    np.testing.assert_allclose(expected, weighted, rtol=1e-7, atol=count * bound * 2.0**-30)


def test_a_ring_of_the_same_silos_in_another_order_has_the_same_mean_bit_for_bit() -> None:
    models = np.random.default_rng(3).standard_normal((5, 101)).astype(np.float32)
    shares = np.array([0.1, 0.3, 0.2, 0.25, 0.15])
    digests = set[str]()
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        members = make_members(models[order], shares[order].tolist())
        run_ring(members)
        digests |= {member.digest() for member in members}
    assert len(digests) == 1


@pytest.mark.parametrize("count", [3, 8])
def test_each_silo_sends_the_least_number_of_bytes(count: int) -> None:
    size = 10_007
    models = np.random.default_rng(1).standard_normal((count, size)).astype(np.float32)
    members = make_members(models, [1 / count] * count)
    for sent in run_ring(members):
        assert sum(map(len, sent)) == pytest.approx(2 * (count - 1) / count * 4 * size, rel=0.01)


def test_what_a_silo_sees_is_uniformly_random_until_the_chunks_are_complete() -> None:
    count, size = 4, 200_000
    models = np.zeros((count, size), np.float32)  # unmasked, all bits would be 0
    models[0, 0] = 1.0
    sent = run_ring(make_members(models, [0.25] * count))
    for chunks in sent:
        partial = np.frombuffer(b"".join(chunks[: count - 1]), np.uint8)
        counts = np.bincount(partial, minlength=256)
        expected = partial.size / 256
        chi = float(np.sum((counts - expected) ** 2 / expected))
        assert chi < 255 + 6 * np.sqrt(2 * 255)
        bits = np.unpackbits(partial).mean()
        assert bits == pytest.approx(0.5, abs=5 / (2 * np.sqrt(8 * partial.size)))
    vectors = [np.frombuffer(chunks[0], "<u4") for chunks in sent]
    for one, other in itertools.combinations(vectors, 2):
        assert np.mean(one == other) < 1e-3


def test_a_silo_without_examples_takes_part_and_its_share_is_masked() -> None:
    models = np.array([[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]], np.float32)
    members = make_members(models, [0.5, 0.5, 0.0])
    assert np.frombuffer(members[2].outgoing(0), "<u4").any()
    run_ring(members)
    for member in members:
        np.testing.assert_array_equal(member.mean(), [2.0, 3.0])


def test_another_attempt_has_other_masks() -> None:
    models = np.ones((3, 100), np.float32)
    first, second = (make_members(models, [1 / 3] * 3)[0].outgoing(0) for _ in range(2))
    ring, keys = make_ring(models, [1 / 3] * 3)
    again = msgspec.structs.replace(ring, attempt=2)
    same_keys = [RingMember(each, "silo-0", keys[0], models[0]).outgoing(0) for each in (ring, again)]
    assert len({first, second, *same_keys}) == 4


def test_a_member_checks_the_ring() -> None:
    models = np.ones((3, 10), np.float32)
    ring, keys = make_ring(models, [1 / 3] * 3)
    with pytest.raises(ValueError, match="silo-0 is not on the ring with the key that it offered"):
        RingMember(ring, "silo-0", keys[1], models[0])
    with pytest.raises(ValueError, match="another is not on the ring"):
        RingMember(ring, "another", keys[0], models[0])
    with pytest.raises(ValueError, match=r"the model has shape \(9,\); expected \(10,\)"):
        RingMember(ring, "silo-0", keys[0], models[0][:9])
    with pytest.raises(ValueError, match="magnitude 2; expected at most the bound, 1"):
        RingMember(ring, "silo-0", keys[0], models[0] * 2)
    with pytest.raises(ValueError, match="magnitude nan"):
        RingMember(ring, "silo-0", keys[0], models[0] * np.float32(np.nan))
    twice = msgspec.structs.replace(ring, members=(ring.members[0], ring.members[0]))
    with pytest.raises(ValueError, match="more than once"):
        RingMember(twice, "silo-0", keys[0], models[0])
    weak = msgspec.structs.replace(ring.members[1], key=bytes(32))
    with pytest.raises(SecureAggregationError, match="weak"):
        RingMember(msgspec.structs.replace(ring, members=(ring.members[0], weak)), "silo-0", keys[0], models[0])
    with pytest.raises(ValueError, match="the share is -1"):
        quantize_share(models[0], -1.0, 1.0, 3)
    heavy = tuple(msgspec.structs.replace(member, share=1.0) for member in ring.members)
    with pytest.raises(ValueError, match=r"add up to 3\.0; expected 1"):
        RingMember(msgspec.structs.replace(ring, members=heavy), "silo-0", keys[0], models[0])


def test_steps_have_an_order_and_sizes() -> None:
    member = make_members(np.ones((3, 10), np.float32), [1 / 3] * 3)[0]
    with pytest.raises(ValueError, match="step 1 is not in its turn; expected 0 of 4"):
        member.outgoing(1)
    with pytest.raises(ValueError, match="the chunk of step 0 has 3 bytes; expected 16"):
        member.receive(0, b"abc")
    with pytest.raises(ValueError, match="the ring is at step 0 of 4"):
        member.mean()
    with pytest.raises(ValueError, match="expected a finite one"):
        read_integer_mean(np.zeros(1, np.uint32), float("inf"), 3)
