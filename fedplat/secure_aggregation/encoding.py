"""Updates as integers that add up modulo a power of two, rotated before, and the files of masked ones.

A client multiplies its update by its weight, clips it, and rounds it to steps of a quantizer, up or down at random so
that the mean is exact. Its weight and its metrics follow as further entries. Negative numbers wrap around. The sum of a
group's vectors is decoded in the reverse order.

With noise (Kairouz, Liu and Steinke 2021, arXiv 2102.06387, Algorithm 1, with Skellam noise) the clipped update is
rotated before it is rounded, the rounding is repeated until the norm is within a bound, and each entry gets noise. All
randomness is of one key stream of AES (`privacy.noise.KeyStream`), so that it cannot be told from true randomness.

A Hadamard transform needs a power of two. Instead of padding, the first 2^k entries are transformed, and then the last
2^k, each with random signs before. The signs are public, and the same for all updates of a length.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fedplat.codecs import codec, eden, quantize
from fedplat.errors import CodecError, SecureAggregationError
from fedplat.model import Vector, VectorBlocks, blocks
from fedplat.model.blocks import l2_norm
from fedplat.privacy import noise
from fedplat.privacy.noise import KEY_BYTES, KeyStream
from fedplat.secure_aggregation.messages import word_of
from fedplat.secure_aggregation.setup import AnySetup, Encoding, ExactEncoding

Encoded = npt.NDArray[np.uint32]
"""Entries of 32 bits, of which only the lowest `Encoding.modulus` count in sums and files."""
Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.unsignedinteger[Any]]
"""Entries of either encoding, in words of `messages.word_of`."""

_ROUNDING = 1.0 - 2.0**-40
"""Factor that keeps the norm of a clipped update within the bound in spite of the rounding of 64-bit floats."""
_MAX_ROUNDINGS = 1000


@dataclasses.dataclass(frozen=True)
class Decoded:
    """The sum of the clipped updates times their weights, shape [size], the sum of the weights, and mean metrics.

    The sum of the weights is 0 with noise, since weights are not sent.
    """

    update: Vector
    weight: float
    metrics: Mapping[str, float]
    num_survivors: int


def encode(
    encoding: Encoding,
    update: Vector,
    num_examples: float,
    metrics: Mapping[str, float],
    random: Callable[[int], bytes],
) -> Encoded:
    """Return an update with its weight and metrics as integers, shape [`Encoding.length`].

    `random(count)` returns so many secret random bytes, such as `os.urandom`. A metric outside its range counts as the
    nearest value in it; one that is missing or not a number, as the middle. Raises `SecureAggregationError` for an
    update of another size or with entries that are not finite, and for a negative number of examples.
    """
    if update.shape != (encoding.size,):
        raise SecureAggregationError(f"the update has shape {update.shape}; expected ({encoding.size},)")
    if not num_examples >= 0:
        raise SecureAggregationError(f"the number of examples is {num_examples}; expected 0 or more")
    weight = min(num_examples / encoding.max_examples, 1.0) if encoding.max_examples else 1.0
    norm = l2_norm(VectorBlocks(update))
    if not math.isfinite(norm):
        raise SecureAggregationError("the update has NaN or infinite entries and cannot be clipped")
    factor = weight if weight * norm <= encoding.clip else encoding.clip / norm * _ROUNDING
    stream = KeyStream(random(KEY_BYTES))
    encoded = np.empty(encoding.length, np.uint32)
    rounded, extras = encoded.view(np.int32)[: encoding.size], encoded.view(np.int32)[encoding.size :]
    mapped = np.array([weight, *_map_metrics(encoding, metrics)])
    if encoding.noise is None:
        _round(update, factor * encoding.scale, stream, rounded)
    else:
        _round_rotated(encoding, np.multiply(update, factor, dtype=np.float32), stream, rounded)
        mapped[0] = 0.0
    _round(mapped, encoding.extras_scale, stream, extras)
    if encoding.noise is not None:
        _add_noise(stream, encoding.noise.variance, encoded[: encoding.size])
        if encoding.metrics:
            _add_noise(stream, encoding.noise.metrics_variance, encoded[encoding.size + 1 :])
    return np.bitwise_and(encoded, np.uint32(2**encoding.modulus - 1), out=encoded)


def decode(encoding: Encoding, total: Encoded, num_survivors: int) -> Decoded:
    """Decode the sum of the vectors of `num_survivors` clients of a group, without masks."""
    if total.shape != (encoding.length,):
        raise SecureAggregationError(f"the sum has shape {total.shape}; expected ({encoding.length},)")
    if not 1 <= num_survivors <= encoding.max_clients:
        raise SecureAggregationError(
            f"the sum is of {num_survivors} clients; expected from 1 to {encoding.max_clients}, the most that fit"
        )
    shift = 32 - encoding.modulus
    lifted = np.left_shift(total, shift).view(np.int32)
    lifted >>= shift  # copies the highest bit of the number, its sign
    update = np.empty(encoding.size, np.float32)
    np.multiply(lifted[: encoding.size], 1.0 / encoding.scale, out=update, casting="same_kind")
    if encoding.noise is not None:
        rotate_back(update)
    weight, *means = (lifted[encoding.size :] / max(encoding.extras_scale, 1)).tolist()
    metrics = {
        name: (low + high) / 2.0 + (high - low) / 2.0 * mean / num_survivors
        for (name, low, high), mean in zip(encoding.metrics, means, strict=True)
    }
    return Decoded(update, weight, metrics, num_survivors)


def encode_exact(encoding: ExactEncoding, reply: Integers) -> npt.NDArray[np.uint64]:
    """Return a copy of a reply as the words to mask, shape [`ExactEncoding.length`].

    Raises `SecureAggregationError` for a reply of another size or with an entry beyond the bound.
    """
    if reply.shape != (encoding.length,):
        raise SecureAggregationError(f"the reply has shape {reply.shape}; expected ({encoding.length},)")
    if int(reply.max()) > encoding.bound or int(reply.min()) < -encoding.bound:
        raise SecureAggregationError(f"an entry of the reply is beyond its bound, {encoding.bound}")
    return reply.astype(np.uint64)  # negative numbers wrap around


def decode_exact(encoding: ExactEncoding, total: Words, num_survivors: int) -> Integers:
    """Return the sum of the replies of `num_survivors` clients of a group, without masks; shares its memory.

    Raises `SecureAggregationError` if an entry is beyond what so many clients can add up to: a client has lied.
    """
    if total.shape != (encoding.length,) or total.dtype != np.uint64:
        raise SecureAggregationError(f"the sum is {total.dtype} {total.shape}; expected uint64 ({encoding.length},)")
    if not 1 <= num_survivors <= encoding.max_clients:
        raise SecureAggregationError(
            f"the sum is of {num_survivors} clients; expected from 1 to {encoding.max_clients}, the most that fit"
        )
    signed, most = total.view(np.int64), encoding.bound * num_survivors
    if int(signed.max()) > most or int(signed.min()) < -most:
        raise SecureAggregationError(
            f"an entry of the sum of {num_survivors} clients is beyond {most}: a client has sent more than its bound"
        )
    return signed


def merge(left: Decoded, right: Decoded) -> Decoded:
    """Return the sum of two groups; reuses the memory of the left one."""
    np.add(left.update, right.update, out=left.update)
    count = left.num_survivors + right.num_survivors
    metrics = {
        name: (value * left.num_survivors + right.metrics[name] * right.num_survivors) / count
        for name, value in left.metrics.items()
    }
    return Decoded(left.update, left.weight + right.weight, metrics, count)


def _map_metrics(encoding: Encoding, metrics: Mapping[str, float]) -> Iterator[float]:
    for name, low, high in encoding.metrics:
        value = metrics.get(name, math.nan)
        yield 0.0 if math.isnan(value) else min(max((value - low) / (high - low) * 2.0 - 1.0, -1.0), 1.0)


def _round_rotated(encoding: Encoding, vector: Vector, stream: KeyStream, out: npt.NDArray[np.int32]) -> None:
    """Rotate a vector in place, and round it until its norm is within `Encoding.sensitivity`.

    Each attempt succeeds with a probability of at least 1 - `noise.BETA`, and in practice of nearly 1.
    """
    rotate(vector)
    norm = l2_norm(VectorBlocks(vector))
    factor = encoding.scale if norm <= encoding.clip else encoding.clip / norm * encoding.scale
    factor *= _ROUNDING
    for _ in range(_MAX_ROUNDINGS):
        if _round(vector, factor, stream, out) <= encoding.sensitivity**2:
            return
    raise SecureAggregationError(
        f"the rounded update was beyond its bound {_MAX_ROUNDINGS} times, which cannot be by chance"
    )


def _round(
    values: npt.NDArray[np.floating[Any]], factor: float, stream: KeyStream, out: npt.NDArray[np.int32]
) -> float:
    """Round values times a factor, below 2^24, up or down at random; return the square of the result's norm."""
    square = 0.0
    for block in blocks(values.size):
        scaled = np.multiply(values[block], factor, dtype=np.float64)
        # So few bits that a whole number below 2^24 remains: the sum is exact.
        scaled += (stream.words(scaled.size) >> np.uint32(4)) * 2.0**-28
        np.floor(scaled, out=scaled)
        out[block] = scaled
        square += float(np.square(scaled, out=scaled).sum())
    return square


def _add_noise(stream: KeyStream, variance: float, encoded: Encoded) -> None:
    for block in blocks(encoded.size):
        part = encoded[block]
        part += noise.draw_skellam(stream, variance, part.size).astype(np.uint32)  # negative numbers wrap around


def file_bytes(setup: AnySetup) -> int:
    """Return the size of the file of a masked update."""
    return len(_header(setup)) + _entries_bytes(setup.encoding.length, setup.encoding.modulus)


def write_file(setup: AnySetup, masked: Words) -> Iterator[bytes]:
    """Yield the content of the file of a masked update: the digest of the setup, and the entries, packed."""
    encoding = setup.encoding
    assert masked.shape == (encoding.length,)
    yield _header(setup)
    whole, rest = divmod(encoding.modulus, 8)
    word = word_of(encoding.modulus).newbyteorder("<")
    for block in blocks(masked.size):
        columns = np.ascontiguousarray(masked[block], word).view(np.uint8).reshape(-1, word.itemsize)
        yield columns[:, :whole].tobytes()
        if rest:
            yield quantize.pack(columns[:, whole] & np.uint8(2**rest - 1), rest)


def check_file(path: Path, setup: AnySetup) -> None:
    """Raise `SecureAggregationError` unless a file is that of a masked update for this setup."""
    with path.open("rb") as file:
        _open(file, setup)
        *_, last = blocks(setup.encoding.length)
        file.seek(_entries_bytes(last.start, setup.encoding.modulus), os.SEEK_CUR)
        _read(file, last.stop - last.start, setup.encoding.modulus)  # only the last block has padding


def add_file(path: Path, setup: AnySetup, total: Words) -> None:
    """Add a masked update to a sum, shape [`Encoding.length`]; raises as `check_file`, and the sum is then lost."""
    assert total.shape == (setup.encoding.length,)
    with path.open("rb") as file:
        _open(file, setup)
        for block in blocks(total.size):
            part = total[block]
            np.add(part, _read(file, part.size, setup.encoding.modulus), out=part)


def _header(setup: AnySetup) -> bytes:
    return b"fedplat masked update 1 " + setup.digest.hex().encode() + b"\n"


def _entries_bytes(count: int, modulus: int) -> int:
    whole, rest = divmod(modulus, 8)
    return whole * count + (quantize.packed_bytes(count, rest) if rest else 0)


def _open(file: IO[bytes], setup: AnySetup) -> None:
    """Read the header of a file, and check it and the length."""
    expected, found = file_bytes(setup), os.fstat(file.fileno()).st_size
    if found != expected:
        raise SecureAggregationError(f"the masked update has {found} bytes; expected {expected}")
    header = _header(setup)
    if file.read(len(header)) != header:
        raise SecureAggregationError(
            "the file is not a masked update for this attempt; expected one that begins with the digest of its setup"
        )


def _read(file: IO[bytes], count: int, modulus: int) -> Words:
    whole, rest = divmod(modulus, 8)
    content = file.read(_entries_bytes(count, modulus))
    word = word_of(modulus).newbyteorder("<")
    if whole == word.itemsize:
        return np.frombuffer(content, word)
    columns = np.zeros((count, 4), np.uint8)
    columns[:, :whole] = np.frombuffer(content, np.uint8, whole * count).reshape(count, whole)
    if rest:
        try:
            columns[:, whole] = quantize.unpack(codec.PlainSource(memoryview(content)[whole * count :]), count, rest)
        except CodecError as exc:
            raise SecureAggregationError(f"the masked update is invalid: {exc}") from exc
    return columns.view("<u4").reshape(-1)


def rotate(vector: Vector) -> None:
    """Rotate a vector in place."""
    for part, flips in _steps(vector):
        _flip(part, flips)
        _transform(part)


def rotate_back(vector: Vector) -> None:
    """Undo `rotate`, in place."""
    for part, flips in reversed(_steps(vector)):
        _transform(part)
        _flip(part, flips)


def _steps(vector: Vector) -> list[tuple[Vector, npt.NDArray[np.uint32]]]:
    """Return the parts that are transformed one after the other, each with the sign bits to flip."""
    count = 1 << (vector.size.bit_length() - 1)
    parts = [vector[:count]] if count == vector.size else [vector[:count], vector[-count:]]
    stream = KeyStream(hashlib.sha256(b"fedplat rotation 1 %d" % vector.size).digest())
    return [(part, _draw_flips(stream, count)) for part in parts]


def _draw_flips(stream: KeyStream, count: int) -> npt.NDArray[np.uint32]:
    """Draw random sign bits of float32 numbers: the highest bit or 0."""
    flips = np.unpackbits(stream.words(-(-count // 32)).view(np.uint8), count=count).astype(np.uint32)
    flips <<= np.uint32(31)
    return flips


def _flip(part: Vector, flips: npt.NDArray[np.uint32]) -> None:
    bits = part.view(np.uint32)
    bits ^= flips


def _transform(part: Vector) -> None:
    """Multiply by the normalized Hadamard matrix, its own inverse: over the columns of a table, then over its rows."""
    exponent = part.size.bit_length() - 1
    table = np.multiply(part.reshape(1 << exponent // 2, -1), np.float32(2.0 ** (-exponent / 2)))
    table = eden.hadamard(np.ascontiguousarray(eden.hadamard(table).T))
    part.reshape(table.shape[::-1])[:] = table.T
