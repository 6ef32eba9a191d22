"""One suite for all codecs: add one by adding rows to `CASES`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from fedplat.codecs import CODECS, Codec, CodecError, Options
from fedplat.model import BLOCK, Vector, VectorBlocks

LARGEST = float(np.finfo(np.float32).max)
SIZES = (0, 1, 2, 7, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 37)


@dataclasses.dataclass(frozen=True)
class Case:
    """A codec's options in a job file, and the most that the error may be: a bound for each entry of the vector."""

    options: dict[str, Any]
    bound: Callable[[Vector], Vector]


CASES = {
    "bf16": Case({"codec": "bf16"}, lambda x: np.maximum(np.abs(x) * 2.0**-8, 2.0**-134)),
}
every_codec = pytest.mark.parametrize("name", CASES)
every_size = pytest.mark.parametrize("size", SIZES)


def make_codec(name: str) -> Codec:
    return msgspec.convert(CASES[name].options, Options).build()


def normal(size: int, seed: int = 1) -> Vector:
    return np.random.default_rng(seed).normal(0, 0.02, size).astype(np.float32)


def encoded(codec: Codec, vector: Vector, seed: int = 1) -> bytes:
    return b"".join(codec.encode(VectorBlocks(vector), np.random.default_rng(seed)))


def decoded(codec: Codec, payload: bytes, size: int) -> Vector:
    blocks = codec.decode(payload, size)
    assert blocks.size == size
    parts = [block.copy() for block in blocks]
    assert all(part.dtype == np.float32 and part.size == BLOCK for part in parts[:-1])
    return np.concatenate([np.empty(0, np.float32), *parts])


def round_trip(codec: Codec, vector: Vector, seed: int = 1) -> Vector:
    return decoded(codec, encoded(codec, vector, seed), vector.size)


def test_every_codec_has_a_row() -> None:
    assert {case.options["codec"] for case in CASES.values()} == CODECS.keys()


def test_the_union_and_the_table_agree() -> None:
    for name, record in CODECS.items():
        assert type(msgspec.convert({"codec": name}, Options)) is record
        assert msgspec.to_builtins(record())["codec"] == name


@every_codec
@every_size
def test_the_error_is_bounded(name: str, size: int) -> None:
    codec, vector = make_codec(name), normal(size)
    payload = encoded(codec, vector)
    assert len(payload) <= codec.max_bytes(size)
    result = decoded(codec, payload, size)
    assert result.shape == vector.shape
    assert (np.abs(result.astype(np.float64) - vector) <= CASES[name].bound(vector)).all()


def extremes() -> Iterator[Vector]:
    for scale in (1e-45, 1e-40, 1e-38, 1e-30, 1e30):
        yield (normal(1000) * np.float32(50) * np.float32(scale)).astype(np.float32)
    yield np.zeros(1000, np.float32)
    yield np.full(1000, -0.0, np.float32)
    yield np.eye(1, 1000, 500, dtype=np.float32)[0]
    yield np.where(np.arange(1000) % 2, 1e-42, 1e20).astype(np.float32)


@every_codec
@pytest.mark.parametrize("vector", list(extremes()), ids=lambda vector: f"{vector.max():.0e}")
def test_tiny_and_huge_values_stay_in_bounds(name: str, vector: Vector) -> None:
    result = round_trip(make_codec(name), vector)
    assert np.isfinite(result).all()
    assert (np.abs(result.astype(np.float64) - vector) <= CASES[name].bound(vector)).all()


@every_codec
def test_the_largest_numbers_come_back_finite_or_are_refused(name: str) -> None:
    codec = make_codec(name)
    for vector in (np.full(1000, LARGEST, np.float32), np.array([LARGEST, -LARGEST, 1], np.float32)):
        try:
            result = round_trip(codec, vector)
        except CodecError as exc:
            if "too large" not in str(exc):
                raise
        else:
            assert np.isfinite(result).all()


@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(name: str, bad: float) -> None:
    vector = normal(BLOCK + 5)
    vector[BLOCK + 2] = bad
    with pytest.raises(CodecError, match="NaN or infinite"):
        encoded(make_codec(name), vector)


@every_codec
def test_equal_seeds_give_equal_bytes_and_blocks_can_be_drawn_again(name: str) -> None:
    codec, vector = make_codec(name), normal(BLOCK + 5)
    payload = encoded(codec, vector)
    assert payload == encoded(codec, vector)
    blocks = codec.decode(np.frombuffer(payload, np.uint8), vector.size)
    first, second = ([block.copy() for block in blocks] for _ in range(2))
    assert all((left == right).all() for left, right in zip(first, second, strict=True))


@every_codec
@pytest.mark.parametrize("size", [1, 1000, BLOCK + 5])
def test_a_payload_of_another_length_is_refused(name: str, size: int) -> None:
    codec, payload = make_codec(name), encoded(make_codec(name), normal(size))
    for wrong in (b"", payload[:-1], payload[: len(payload) // 2], payload + b"\0", payload + payload):
        with pytest.raises(CodecError):
            decoded(codec, wrong, size)
    with pytest.raises(CodecError, match="at most 0"):
        codec.decode(payload, 0)


@every_codec
def test_damaged_payloads_give_finite_vectors_or_our_own_error(name: str) -> None:
    codec, size, rng = make_codec(name), 700, np.random.default_rng(3)
    good = encoded(codec, normal(size))
    for _ in range(300):
        damaged = bytearray(good)
        for position in rng.integers(0, len(good), rng.integers(1, 5)):
            damaged[position] = (0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(256)))[rng.integers(6)]
        try:
            result = decoded(codec, bytes(damaged), size)
        except CodecError:
            continue
        assert result.size == size
        assert np.isfinite(result).all()
