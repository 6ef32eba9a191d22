"""Updates as integers, their sums, and the files of masked updates."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy import linalg

from fedplat.errors import SecureAggregationError
from fedplat.model import BLOCK
from fedplat.privacy import noise
from fedplat.privacy.noise import KeyStream
from fedplat.secure_aggregation.encoding import (
    add_file,
    check_file,
    decode,
    encode,
    file_bytes,
    merge,
    rotate,
    rotate_back,
    write_file,
)
from fedplat.secure_aggregation.messages import SecureAggregation
from fedplat.secure_aggregation.setup import Encoding, LocalNoise, Setup

SIZE = 1000
PLAIN = Encoding(
    size=SIZE, clip=2.0, bits=16, modulus=32, max_examples=50.0, max_clients=20, metrics=(("loss", 0.0, 8.0),)
)


def key(seed: int) -> Callable[[int], bytes]:
    return np.random.default_rng(seed).bytes


def total_of(vectors: list[npt.NDArray[np.uint32]]) -> npt.NDArray[np.uint32]:
    return np.array(vectors).sum(axis=0, dtype=np.uint32)


def setup_of(encoding: Encoding) -> Setup:
    options = SecureAggregation(bits=encoding.bits, modulus=encoding.modulus)
    return Setup("job", 1, 1, "digest", "task", options, encoding, minimum=2)


@pytest.mark.parametrize(("bits", "modulus"), [(16, 32), (8, 13), (20, 25), (2, 8)])
def test_the_sum_is_that_of_the_weighted_and_clipped_updates(bits: int, modulus: int) -> None:
    encoding = replace(PLAIN, bits=bits, modulus=modulus)
    rng = np.random.default_rng(1)
    updates = [rng.normal(0.0, scale, SIZE).astype(np.float32) for scale in (0.01, 0.05, 0.3, 3.0)]
    examples, losses = [10.0, 50.0, 1000.0, 25.0], [0.5, 4.0, 100.0, math.nan]
    vectors = [
        encode(encoding, update, count, {"loss": loss, "other": 1.0}, key(number))
        for number, (update, count, loss) in enumerate(zip(updates, examples, losses, strict=True))
    ]
    weights = np.minimum(np.array(examples) / 50.0, 1.0)
    weighted = [weight * update.astype(np.float64) for weight, update in zip(weights, updates, strict=True)]
    clipped = [vector * min(1.0, 2.0 / np.linalg.norm(vector)) for vector in weighted]

    found = decode(encoding, total_of(vectors), 4)
    step = 2.0 / (2 ** (bits - 1) - 1)
    error = (found.update - np.sum(clipped, axis=0)) / step
    assert np.abs(error).max() < 4.01  # each client's rounding is below one step
    assert np.abs(error.mean()) < 6 * 1.0 / math.sqrt(SIZE)  # at most half a step of deviation from each of four
    extra = 1.0 / encoding.extras_scale
    assert found.weight == pytest.approx(weights.sum(), abs=4 * extra)
    assert found.metrics["loss"] == pytest.approx((0.5 + 4.0 + 8.0 + 4.0) / 4, abs=8 * extra)
    assert found.num_survivors == 4


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 24), st.integers(1, 20), st.integers(0, 2**32))
def test_the_largest_updates_of_all_clients_fit(bits: int, num_clients: int, seed: int) -> None:
    """The largest entry of all, from each client, in the least modulus that a job may have."""
    modulus = max(8, math.ceil(math.log2(20 * (2**bits - 1))))
    encoding = replace(PLAIN, size=3, bits=bits, modulus=modulus, max_examples=0.0, max_clients=20)
    update = np.array([0.0, -1e30, 1.0], np.float32)
    found = decode(encoding, total_of([encode(encoding, update, 1.0, {}, key(seed))] * num_clients), num_clients)
    assert found.update[0] == 0.0
    assert found.update[1] == pytest.approx(-2.0 * num_clients, rel=1.0 / encoding.levels)
    assert found.weight == num_clients


def test_rounding_is_fair_and_uses_secret_randomness() -> None:
    encoding = replace(PLAIN, size=200_000, bits=12, max_examples=0.0)
    update = np.full(encoding.size, 0.3 / encoding.scale, np.float32)
    first, second = (encode(encoding, update, 1.0, {}, os.urandom) for _ in range(2))
    assert set(first[: encoding.size].tolist()) == {0, 1}
    assert first[: encoding.size].mean() == pytest.approx(0.3, abs=6 * math.sqrt(0.21 / encoding.size))
    both = (first & second)[: encoding.size]
    assert both.mean() == pytest.approx(0.09, abs=6 * math.sqrt(0.09 * 0.91 / encoding.size))


def test_whole_numbers_stay_what_they_are() -> None:
    encoding = replace(PLAIN, size=3, bits=24, clip=float(2**23 - 1), max_examples=0.0)
    update = np.array([2**23 - 1, 0, 0], np.float32)
    for seed in range(200):
        assert encode(encoding, update, 1.0, {"loss": 8.0}, key(seed)).tolist() == [2**23 - 1, 0, 0, 2**20, 2**20]


@pytest.mark.parametrize(
    ("update", "examples", "text"),
    [
        (np.zeros(SIZE + 1, np.float32), 1.0, "expected (1000,)"),
        (np.full(SIZE, np.nan, np.float32), 1.0, "NaN or infinite"),
        (np.full(SIZE, np.inf, np.float32), 1.0, "NaN or infinite"),
        (np.zeros(SIZE, np.float32), -1.0, "expected 0 or more"),
        (np.zeros(SIZE, np.float32), math.nan, "expected 0 or more"),
    ],
)
def test_what_cannot_be_encoded(update: npt.NDArray[np.float32], examples: float, text: str) -> None:
    with pytest.raises(SecureAggregationError) as caught:
        encode(PLAIN, update, examples, {}, os.urandom)
    assert text in str(caught.value)


def test_a_sum_of_more_clients_than_fit_is_refused() -> None:
    for count in (0, 21):
        with pytest.raises(SecureAggregationError, match="expected from 1 to 20"):
            decode(PLAIN, np.zeros(PLAIN.length, np.uint32), count)


def test_groups_add_up() -> None:
    rng = np.random.default_rng(2)
    updates = [rng.normal(0.0, 0.01, SIZE).astype(np.float32) for _ in range(3)]
    vectors = [
        encode(PLAIN, update, 50.0, {"loss": loss}, os.urandom)
        for update, loss in zip(updates, (1.0, 2.0, 6.0), strict=True)
    ]
    whole = merge(decode(PLAIN, total_of(vectors[:2]), 2), decode(PLAIN, vectors[2], 1))
    assert whole.update == pytest.approx(np.sum(updates, axis=0), abs=3 / PLAIN.scale)
    assert (whole.weight, whole.num_survivors) == (3.0, 3)
    assert whole.metrics["loss"] == pytest.approx(3.0, abs=1e-4)


@pytest.mark.parametrize("modulus", [8, 11, 16, 23, 31, 32])
def test_files_hold_all_bits_and_add_up(tmp_path: Path, modulus: int) -> None:
    setup = setup_of(replace(PLAIN, size=70_001, bits=4, modulus=modulus))
    rng = np.random.default_rng(3)
    masked = [rng.integers(0, 2**32, setup.encoding.length, np.uint32) for _ in range(2)]
    total = np.zeros(setup.encoding.length, np.uint32)
    for number, vector in enumerate(masked):
        path = tmp_path / str(number)
        path.write_bytes(b"".join(write_file(setup, vector)))
        assert path.stat().st_size == file_bytes(setup)
        check_file(path, setup)
        add_file(path, setup, total)
    mask = np.uint32(2**modulus - 1)
    np.testing.assert_array_equal(total & mask, total_of(masked) & mask)
    assert file_bytes(setup) <= 100 + setup.encoding.length * modulus / 8 + modulus


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    setup = setup_of(replace(PLAIN, size=5, modulus=27))
    content = b"".join(write_file(setup, np.zeros(setup.encoding.length, np.uint32)))
    padding = content[:-1] + bytes([content[-1] | 0x80])
    other = b"".join(write_file(replace(setup, attempt=2), np.zeros(setup.encoding.length, np.uint32)))
    for wrong, text in (
        (content[:-1], "expected"),
        (content + b"\0", "expected"),
        (b"", "has 0 bytes"),
        (other, "not a masked update for this attempt"),
        (padding, "padding bits"),
    ):
        path = tmp_path / "masked"
        path.write_bytes(wrong)
        with pytest.raises(SecureAggregationError, match=text):
            check_file(path, setup)
        with pytest.raises(SecureAggregationError, match=text):
            add_file(path, setup, np.zeros(setup.encoding.length, np.uint32))


NOISY = replace(
    PLAIN,
    metrics=(("accuracy", 0.0, 1.0), ("loss", 0.0, 8.0)),
    noise=LocalNoise(scale=500.0, variance=1e6, metrics_scale=1000, metrics_variance=400.0),
)


def no_noise(stream: KeyStream, variance: float, size: int) -> npt.NDArray[np.int64]:
    return np.zeros(size, np.int64)


def norms(encoding: Encoding, update: npt.NDArray[np.float32], seed: int) -> tuple[float, float, float]:
    """The norms of an encoded update without its noise, of the weight, and of the metrics."""
    with mock.patch.object(noise, "draw_skellam", no_noise):
        encoded = encode(encoding, update, 1e9, {"loss": 1e9, "accuracy": -1.0}, key(seed))
    signed = encoded.view(np.int32).astype(np.float64)
    model, weight, metrics = np.split(signed, [encoding.size, encoding.size + 1])
    return float(np.linalg.norm(model)), float(np.linalg.norm(weight)), float(np.linalg.norm(metrics))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 70),
    st.sampled_from([0.01, 0.5, 3.0, 1000.0]),
    st.integers(0, 2**32),
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=70),
    st.booleans(),
)
def test_no_update_is_beyond_the_sensitivity(
    size: int, norm: float, seed: int, values: list[float], is_turned: bool
) -> None:
    """`norm` in steps; also updates that are rotated to equal entries, such as those in the middle of two steps."""
    assert NOISY.noise is not None
    encoding = replace(NOISY, size=size, noise=replace(NOISY.noise, scale=norm / NOISY.clip))
    update = np.resize(np.array(values, np.float32), size)
    if is_turned:
        update = np.full(size, 0.5 / encoding.scale, np.float32)
        rotate_back(update)
    model, weight, metrics = norms(encoding, update, seed)
    assert model <= encoding.sensitivity
    assert encoding.sensitivity <= norm + math.sqrt(size)
    assert weight == 0.0  # it would be a release without noise
    assert metrics <= math.sqrt(2.0) * 1000


def test_rounding_is_repeated_until_the_norm_is_within_the_bound() -> None:
    """Entries between two steps: the norm is two standard deviations below its bound, and beyond it sometimes."""
    assert NOISY.noise is not None
    encoding = replace(NOISY, noise=replace(NOISY.noise, scale=math.sqrt(SIZE) / 2 / NOISY.clip))
    update = np.full(SIZE, 0.5 / encoding.scale, np.float32)
    rotate_back(update)
    with mock.patch.object(KeyStream, "words", autospec=True, side_effect=KeyStream.words) as draws:
        found = [norms(encoding, update, seed)[0] for seed in range(200)]
    num_roundings = sum(call.args[1] == SIZE for call in draws.call_args_list)
    assert 200 < num_roundings < 200 + 30
    assert max(found) <= encoding.sensitivity < math.sqrt(SIZE / 2 + 3 * math.sqrt(SIZE / 4))
    assert min(found) > math.sqrt(SIZE / 2 - 5 * math.sqrt(SIZE / 4))


@pytest.mark.parametrize("size", [1, 2, 3, 32, 48, 63])
def test_the_rotation_is_two_signed_hadamard_transforms(size: int) -> None:
    top = 2 ** (size.bit_length() - 1)
    turned = np.eye(size, dtype=np.float32)
    for row in turned:
        rotate(row)
    np.testing.assert_allclose(turned @ turned.T, np.eye(size), atol=1e-6)
    first, last = np.eye(size), np.eye(size)
    first[:top, :top] = linalg.hadamard(top) / math.sqrt(top)
    if top < size:
        last[-top:, -top:] = linalg.hadamard(top) / math.sqrt(top)
    # Its first row, but for the signs, of which only those between the transforms change the absolute values.
    signs = np.sign(np.linalg.solve(last.T, turned[0]) * first[0])
    np.testing.assert_allclose(np.abs(turned[0]), np.abs((first[0] * signs) @ last), atol=1e-6)
    for row in turned:
        rotate_back(row)
    np.testing.assert_allclose(turned, np.eye(size), atol=1e-6)


def test_a_single_large_entry_is_spread_over_all() -> None:
    for size in (2**12, 2**12 + 1, 2**13 - 1):
        for position in (0, 1, size - 1):
            update = np.zeros(size, np.float32)
            update[position] = 1.0
            rotate(update)
            assert np.abs(update).max() < 7 / math.sqrt(2**12)


def test_the_noisy_sum_is_that_of_the_clipped_updates() -> None:
    rng = np.random.default_rng(5)
    updates = [rng.normal(0.0, 1.0, SIZE).astype(np.float32) for _ in range(20)]
    vectors = [encode(NOISY, update, 50.0, {"loss": 2.0, "accuracy": 0.75}, key(n)) for n, update in enumerate(updates)]
    found = decode(NOISY, total_of(vectors), 20)
    expected = np.sum([2.0 * update / np.linalg.norm(update) for update in updates], axis=0)
    error = (found.update - expected) * NOISY.scale
    assert error.std() == pytest.approx(math.sqrt(20e6), rel=0.1)  # 4.5 standard errors
    assert abs(error.mean()) < 5 * math.sqrt(20e6 / SIZE)
    assert found.weight == 0.0
    assert found.metrics["loss"] == pytest.approx(2.0, abs=5 * 4.0 * math.sqrt(20 * 400) / 1000 / 20)
    assert found.metrics["accuracy"] == pytest.approx(0.75, abs=5 * 0.5 * math.sqrt(20 * 400) / 1000 / 20)
    again = encode(NOISY, updates[0], 50.0, {}, key(0))
    np.testing.assert_array_equal(again[:SIZE], vectors[0][:SIZE])  # all randomness is that of the key


def test_the_noise_multiplier_that_a_client_can_compute() -> None:
    noise = NOISY.noise
    assert noise is not None
    model = math.sqrt(5 * noise.variance) / NOISY.sensitivity
    metrics = math.sqrt(5 * noise.metrics_variance / 2) / noise.metrics_scale
    assert NOISY.noise_multiplier(5) == pytest.approx((model**-2 + metrics**-2) ** -0.5)
    assert replace(NOISY, metrics=()).noise_multiplier(5) == pytest.approx(model)
    assert PLAIN.noise_multiplier(5) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        replace(PLAIN, bits=10**9),
        replace(PLAIN, modulus=33),
        replace(PLAIN, clip=1e-310),
        replace(PLAIN, clip=math.inf),
        replace(PLAIN, max_clients=0),
        replace(PLAIN, max_examples=math.nan),
    ],
)
def test_a_setup_out_of_range_is_refused(wrong: Encoding) -> None:
    """A client reads it from a server, which it does not trust."""
    assert Setup.from_bytes(setup_of(PLAIN).to_bytes()) == setup_of(PLAIN)
    with pytest.raises(SecureAggregationError, match="cannot be read"):
        Setup.from_bytes(replace(setup_of(PLAIN), encoding=wrong).to_bytes())


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("expected a range", {"metrics": (("loss", 1.0, 1.0),)}),
        ("expected at most 16777216", {"noise": LocalNoise(1e9, 1.0, 1, 1.0)}),
        ("the metrics have no noise", {"noise": LocalNoise(1.0, 1.0, 1, 0.0)}),
        ("the metrics have no noise", {"noise": LocalNoise(1.0, 1.0, 0, 1.0)}),
    ],
)
def test_an_encoding_that_contradicts_itself_is_refused(text: str, changes: dict[str, Any]) -> None:
    content = msgspec.msgpack.encode(
        msgspec.to_builtins(setup_of(PLAIN)) | {"encoding": msgspec.to_builtins(PLAIN) | msgspec.to_builtins(changes)}
    )
    with pytest.raises(SecureAggregationError, match=text):
        Setup.from_bytes(content)


def test_blocks_are_multiples_of_eight() -> None:
    assert BLOCK % 8 == 0  # only the last block of a file has padding
