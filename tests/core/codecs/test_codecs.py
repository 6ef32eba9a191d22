"""What each codec promises: no bias, its paper's error, the bytes that it sends, and what it refuses."""

from __future__ import annotations

import math
import struct
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from fedplat.codecs import Bf16, Codec, CodecError, Eden, Plain, Quantize, TopK, with_error_feedback
from fedplat.codecs.codec import PlainSource
from fedplat.codecs.eden import CENTROIDS, hadamard
from fedplat.codecs.quantize import pack, packed_bytes, unpack
from fedplat.model import BLOCK, Vector, VectorBlocks
from support.codecs import decoded, encoded, normal, round_trip

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = arrays.arrays(np.float32, st.integers(0, 200), elements=FINITE)


def error(result: Vector, vector: Vector) -> float:
    """The squared error, normalised."""
    wide = vector.astype(np.float64)
    return float(np.square(result - wide).sum() / np.square(wide).sum())


@settings(max_examples=200, deadline=None)
@given(VECTORS)
def test_bfloat16_is_rounded_as_the_library_does(vector: Vector) -> None:
    with np.errstate(over="ignore"):
        expected = vector.astype(ml_dtypes.bfloat16).astype(np.float32)
    largest = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    assert np.array_equal(round_trip(Bf16().build(), vector), np.clip(expected, -largest, largest))


@settings(max_examples=100, deadline=None)
@given(VECTORS, st.sampled_from([Plain(), Plain(zstd=True), Bf16(zstd=True), Quantize(bits=4), Quantize(zstd=True)]))
def test_any_finite_vector_comes_back_finite(vector: Vector, options: Any) -> None:
    result = round_trip(options.build(), vector)
    assert result.shape == vector.shape
    assert np.isfinite(result).all()


@pytest.mark.parametrize(
    "options",
    [Quantize(bits=8), Quantize(bits=4), *(Eden(bits=bits) for bits in (1, 2, 3, 4)), Eden(bits=1, zstd=True)],
    ids=str,
)
@pytest.mark.parametrize("shape", ["normal", "few large ones", "sparse"])
def test_the_mean_over_seeds_is_the_vector(options: Any, shape: str) -> None:
    """Each entry's mean error is 0, within the standard error of this many draws."""
    size, num_seeds = 1500, 400
    vector = normal(size)
    if shape == "few large ones":
        vector[::97] *= 30
    elif shape == "sparse":
        vector[np.arange(size) % 40 > 0] = 0
    codec: Codec = options.build()
    errors = np.stack([round_trip(codec, vector, seed) - vector for seed in range(num_seeds)]).astype(np.float64)
    means, variances = errors.mean(axis=0), errors.var(axis=0)
    # An entry close to a level rarely leaves it, so this many draws do not give its own variance.
    assert (np.abs(means) < 5 * np.sqrt((variances + variances.mean()) / num_seeds)).all()
    assert np.square(means).sum() * num_seeds / variances.sum() < 1.25


@pytest.mark.parametrize(("bits", "expected"), [(1, 0.5708), (2, 0.1331), (3, 0.0358), (4, 0.0096)])
def test_edens_error_is_that_of_the_paper(bits: Any, expected: float) -> None:
    """Vargaftik et al. 2022; the vectors vary as updates do."""
    rng = np.random.default_rng(bits)
    for vector in (
        rng.normal(0, 1, 4 * BLOCK),
        rng.lognormal(0, 1, 4 * BLOCK),
        rng.standard_t(3, 4 * BLOCK),
        rng.normal(0, 1, 4 * BLOCK) * (rng.random(4 * BLOCK) < 0.02),
        np.ones(4 * BLOCK),
    ):
        single = vector.astype(np.float32)
        assert error(round_trip(Eden(bits=bits).build(), single), single) == pytest.approx(expected, rel=0.02)


def test_edens_scale_is_right_for_every_rotation() -> None:
    """⟨x, decoded⟩ = ‖x‖² (the paper's Section 3), for any vector."""
    for vector in (normal(1000), np.eye(1, 1000, 3, dtype=np.float32)[0], np.ones(16, np.float32)):
        for seed in range(5):
            result = round_trip(Eden(bits=1).build(), vector, seed)
            assert float(result @ vector) == pytest.approx(float(vector @ vector), rel=1e-4)


@pytest.mark.parametrize("bits", CENTROIDS)
def test_centroids_are_those_of_lloyd_and_max(bits: int) -> None:
    """Each centroid is the mean of a normal distribution between the boundaries around it."""
    centroids = CENTROIDS[bits].astype(np.float64)
    bounds = np.array([-np.inf, *((centroids[1:] + centroids[:-1]) / 2), np.inf])
    means = -np.diff(stats.norm.pdf(bounds)) / np.diff(stats.norm.cdf(bounds))
    np.testing.assert_allclose(centroids, means, atol=2e-7)


@pytest.mark.parametrize(("dimension", "num_columns"), [(1, 3), (2, 1), (16, 5), (1024, 64)])
def test_the_hadamard_transform_is_sylvesters_matrix(dimension: int, num_columns: int) -> None:
    matrix = np.ones((1, 1))
    while len(matrix) < dimension:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    rows = np.random.default_rng(1).integers(-9, 9, (dimension, num_columns)).astype(np.float32)
    assert np.array_equal(hadamard(rows.copy()), matrix @ rows)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_packed_numbers_are_unpacked(bits: int, count: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, count).astype(np.uint8)
    packed = pack(codes, bits)
    assert len(packed) == packed_bytes(count, bits)
    assert np.array_equal(unpack(PlainSource(memoryview(packed)), count, bits), codes)
    if bits < 8 and count % 8:
        with pytest.raises(CodecError, match="padding bits"):
            unpack(PlainSource(memoryview(packed[:-1] + b"\xff")), count, bits)


def test_quantised_levels_stay_and_zeros_too() -> None:
    levels = np.arange(-7, 8).astype(np.float32) * np.float32(0.5)
    assert np.array_equal(round_trip(Quantize(bits=4).build(), levels), levels)
    assert not round_trip(Quantize(bits=8).build(), np.zeros(1000, np.float32)).any()


@pytest.mark.parametrize(("bits", "scale"), [(4, math.nan), (4, math.inf), (8, -1.0)])
def test_bad_scales_are_refused(bits: Any, scale: float) -> None:
    for codec, offset in ((Quantize(bits=bits).build(), 0), (Eden(bits=1).build(), 8)):
        payload = bytearray(encoded(codec, normal(100)))
        payload[offset : offset + 4] = struct.pack("<f", scale)
        with pytest.raises(CodecError, match="scale"):
            decoded(codec, bytes(payload), 100)


def test_a_number_that_no_writer_writes_is_refused() -> None:
    payload = bytearray(encoded(Quantize(bits=8).build(), normal(100)))
    payload[-1] = 255
    with pytest.raises(CodecError, match="number above 254"):
        decoded(Quantize(bits=8).build(), bytes(payload), 100)


@settings(max_examples=200, deadline=None)
@given(arrays.arrays(np.float32, st.integers(0, 300), elements=FINITE), st.sampled_from([0.001, 0.01, 0.3, 0.69, 1]))
def test_the_largest_entries_are_sent(vector: Vector, fraction: float) -> None:
    result = round_trip(TopK(fraction=fraction, values="fp32").build(), vector)
    kept = math.ceil(fraction * vector.size)
    expected = np.zeros_like(vector)
    order = np.argsort(-np.abs(vector), kind="stable")[:kept]  # of equal entries, the first
    expected[order] = vector[order]
    assert np.array_equal(result, expected)


def test_the_largest_entries_are_those_of_all_blocks() -> None:
    vector = normal(3 * BLOCK + 5)
    vector[BLOCK : BLOCK + 1000] += 1
    result = round_trip(TopK(fraction=1000 / (vector.size + 1)).build(), vector)
    assert set(np.flatnonzero(result)) == set(range(BLOCK, BLOCK + 1000))
    size = len(encoded(TopK(fraction=0.01).build(), normal(16 * BLOCK)))
    assert size * 8 / (16 * BLOCK * 0.01) == pytest.approx(16 + 8.2, abs=0.2)  # a value and the gap before it


def topk_payload(header: tuple[int, int], unary: bytes, values: bytes) -> bytes:
    """A block whose Rice code has the parameter 0 (for half of all entries), so that gaps are unary."""
    return struct.pack("<II", *header) + unary + values


def test_hostile_indices_are_refused() -> None:
    codec, ones = TopK(fraction=0.5).build(), b"\x80\x3f" * 500
    good, longer = b"\x55" * 125, b"\x55" * 124 + b"\x15" + b"\x01"
    payload = topk_payload((500, 125), good, ones)
    assert np.array_equal(np.flatnonzero(decoded(codec, payload, 1000)), np.arange(0, 1000, 2))
    for payload, expected in (
        (topk_payload((500, 126), longer, ones), "an entry at 1000"),
        (topk_payload((499, 125), good[:-1] + b"\x15", ones[2:]), "1 entries too few"),
        (topk_payload((501, 125), b"\x57" + good[1:], ones + b"\x80\x3f"), "501 entries in a block"),
        (topk_payload((499, 125), good, ones), "expected 499"),
        (topk_payload((500, 126), good + b"\0", ones), "no byte more"),
        (topk_payload((500, 2**32 - 1), good, ones), "4294967295 bytes of gaps"),
        (topk_payload((500, 125), good, ones[2:] + b"\x80\x7f"), "NaN or infinite"),
    ):
        with pytest.raises(CodecError, match=expected):
            decoded(codec, payload, 1000)


@pytest.mark.parametrize("options", [TopK(fraction=0.05), TopK(fraction=0.05, zstd=True), Eden(bits=1)], ids=str)
def test_error_feedback_loses_nothing(options: Any) -> None:
    """Stich et al. 2018: the sum of the sent vectors is the sum of the input vectors, less the residual."""
    size, rng = BLOCK + 100, np.random.default_rng(1)
    feedback = with_error_feedback(codec := options.build())
    residual = feedback.init(size)
    wanted, sent = np.zeros(size), np.zeros(size)
    for _ in range(20):
        vector = rng.normal(1, 0.5, size).astype(np.float32)
        before = residual.copy()
        payload, after = feedback.encode(residual, VectorBlocks(vector), rng)
        assert np.array_equal(residual, before)
        residual = after
        wanted += vector
        sent += decoded(codec, payload, size)
    np.testing.assert_allclose(sent, wanted - residual, atol=1e-3)
    assert error(sent.astype(np.float32), wanted.astype(np.float32)) < 0.75  # nearly all of 20 rounds' 5 % arrived


def test_error_feedback_refuses_a_residual_of_another_model() -> None:
    feedback = with_error_feedback(TopK().build())
    with pytest.raises(CodecError, match="5 entries and the residual 4"):
        feedback.encode(feedback.init(4), VectorBlocks(normal(5)), np.random.default_rng(1))


def frames(*contents: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(content)) + content for content in contents)


def compressed(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


def without_size(content: bytes) -> bytes:
    engine = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return engine.compress(content) + engine.flush()


@pytest.mark.fault("F27")
def test_bombs_and_strange_frames_are_refused() -> None:
    codec, ones = Plain(zstd=True).build(), np.ones(1000, np.float32)
    size = 50 * BLOCK
    for payload, expected in (
        (frames(compressed(bytes(2**26))), "claims 67108864 bytes"),
        (frames(without_size(bytes(4000))), "claims 18446744073709551615 bytes"),
        (frames(compressed(b"")), "claims 0 bytes"),
        (frames(compressed(bytes(4001))), "claims 4001 bytes"),
        (frames(compressed(bytes(4000)) + b"more"), "unused data"),
        (frames(compressed(bytes(4000))[:-1]), "cannot be decompressed"),
        (frames(b"no frame at all"), "cannot be decompressed"),
        (frames(b""), "cannot be decompressed"),
        (struct.pack("<I", 2**32 - 1), "expected 4294967299 or more"),
    ):
        tracemalloc.start()
        with pytest.raises(CodecError, match=expected):
            decoded(codec, payload, size)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20
    good = encoded(codec, ones)
    with pytest.raises(CodecError):
        decoded(codec, good + frames(compressed(bytes(4))), 1000)
    with pytest.raises(CodecError, match="4004 bytes; expected 4000"):
        decoded(codec, frames(compressed(bytes(4004))), 1000)


def test_zstd_takes_nothing_away_and_makes_smaller() -> None:
    vector = normal(2 * BLOCK)
    for options, wrapped, most in ((Plain(), Plain(zstd=True), 0.9), (Bf16(), Bf16(zstd=True), 0.8)):
        assert np.array_equal(round_trip(options.build(), vector), round_trip(wrapped.build(), vector))
        small, large = (len(encoded(each.build(), vector)) for each in (wrapped, options))
        assert small < most * large
    noise: npt.NDArray[Any] = np.random.default_rng(1).integers(0, 2**31, 2 * BLOCK, dtype=np.uint32)
    noise &= np.uint32(0xBFFFFFFF)  # finite, and as random as can be
    codec = Plain(zstd=True).build()
    assert len(encoded(codec, noise.view(np.float32))) <= codec.max_bytes(noise.size)


@pytest.mark.parametrize(
    ("record", "value"),
    [(Eden, {"bits": 5}), (Quantize, {"bits": 3}), (TopK, {"fraction": 0}), (TopK, {"values": "fp8"})],
)
def test_values_out_of_range_are_refused(record: Any, value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        record(**value)


def test_the_signs_of_a_rotation_come_from_the_seed_alone() -> None:
    """Philox as its paper defines it: every reader of a payload, on any platform, computes these 128 bits."""
    first, second = (int(draw) for draw in np.random.Philox(key=0x0706050403020100).random_raw(2))
    assert (first, second) == (0x39D98F77E2F5E929, 0x153BAD64A826FDA2)
    payload = bytes(range(8)) + struct.pack("<f", 0.25) + bytes([0b10110001, 0b01101110])
    result = decoded(Eden(bits=1).build(), payload, 16)
    bits = np.unpackbits(np.frombuffer(payload[12:], np.uint8), bitorder="little").astype(np.float64)
    matrix = np.array([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    flips = [np.diag([-1.0 if draw >> place & 1 else 1.0 for place in range(16)]) for draw in (first, second)]
    expected = flips[0] @ matrix @ flips[1] @ matrix @ (bits * 2 - 1) * 0.25 * 0.7978846
    np.testing.assert_allclose(result, expected, atol=1e-5)
