"""One suite for all codecs: add one by adding rows to `CASES`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from fedplat.codecs import CODECS, Codec, CodecError, CodecOptions
from fedplat.config.plugins import BUILTIN
from fedplat.model import BLOCK, Vector
from fedplat.testing import check_codec
from support.codecs import decoded, encoded, normal, round_trip

Wide = npt.NDArray[Any]
LARGEST = float(np.finfo(np.float32).max)
SIZES = (0, 1, 2, 7, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 37)


@dataclasses.dataclass(frozen=True)
class Case:
    """A codec's options in a job file, and the most that the error may be: a bound for each entry of the vector."""

    options: dict[str, Any]
    bound: Callable[[Vector], Wide]


def of_magnitude(factor: float, smallest: float) -> Callable[[Vector], Wide]:
    return lambda x: np.maximum(np.abs(x) * factor, smallest)


EXACT = of_magnitude(0.0, 0.0)
BFLOAT16 = of_magnitude(2.0**-8, 2.0**-134)


def of_bucket(levels: int) -> Callable[[Vector], Wide]:
    """The largest magnitude of each 512 entries, with room for rounding in float32."""

    def bound(x: Vector) -> Wide:
        starts = np.arange(0, x.size, 512)
        largest = np.maximum.reduceat(np.abs(x), starts) if x.size else x
        return np.repeat(largest / levels * (1 + 1e-5) + 2.0**-149, 512)[: x.size]

    return bound


def of_unsent(fraction: float) -> Callable[[Vector], Wide]:
    """What is not sent is no larger than what is; what is sent is rounded."""

    def bound(x: Vector) -> Wide:
        magnitudes = np.sort(np.abs(x))[::-1]
        last = magnitudes[min(math.ceil(fraction * x.size), x.size) - 1] if x.size else 0.0
        return np.maximum(last, BFLOAT16(x))

    return bound


def of_rotation(x: Vector) -> Wide:
    """At most twice as long as the vector's block: rotation spreads errors, so nothing is known of an entry."""
    wide = x.astype(np.float64)
    norms = [np.linalg.norm(wide[start : start + BLOCK]) for start in range(0, x.size, BLOCK)]
    return np.repeat(2 * np.array(norms) + 2.0**-149, BLOCK)[: x.size]


CASES = {
    "none": Case({"codec": "none"}, EXACT),
    "none-zstd": Case({"codec": "none", "zstd": True}, EXACT),
    "bf16": Case({"codec": "bf16"}, BFLOAT16),
    "bf16-zstd": Case({"codec": "bf16", "zstd": True}, BFLOAT16),
    "quantize-8": Case({"codec": "quantize"}, of_bucket(127)),
    "quantize-4": Case({"codec": "quantize", "bits": 4}, of_bucket(7)),
    "quantize-4-zstd": Case({"codec": "quantize", "bits": 4, "zstd": True}, of_bucket(7)),
    "topk": Case({"codec": "topk"}, of_unsent(0.01)),
    "topk-dense": Case({"codec": "topk", "fraction": 0.7}, of_unsent(0.7)),
    "topk-fp32-zstd": Case({"codec": "topk", "fraction": 0.001, "values": "fp32", "zstd": True}, of_unsent(0.001)),
    "eden-1": Case({"codec": "eden", "bits": 1}, of_rotation),
    "eden-2": Case({"codec": "eden", "bits": 2}, of_rotation),
    "eden-3": Case({"codec": "eden", "bits": 3}, of_rotation),
    "eden-4": Case({"codec": "eden"}, of_rotation),
    "eden-4-zstd": Case({"codec": "eden", "zstd": True}, of_rotation),
}
every_codec = pytest.mark.parametrize("name", CASES)
every_size = pytest.mark.parametrize("size", SIZES)


def make_codec(name: str) -> Codec:
    return BUILTIN.decode(CodecOptions, CASES[name].options).build()


def test_every_codec_has_a_row() -> None:
    assert {case.options["codec"] for case in CASES.values()} == CODECS.keys()


def test_the_union_and_the_table_agree() -> None:
    for name, record in CODECS.items():
        assert type(BUILTIN.decode(CodecOptions, {"codec": name})) is record
        assert msgspec.to_builtins(record())["codec"] == name


@every_codec
def test_the_public_checks(name: str) -> None:
    check_codec(BUILTIN.decode(CodecOptions, CASES[name].options))


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
