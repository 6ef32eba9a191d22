"""The checks of codecs, on random, tiny, huge and damaged data."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from collections.abc import Iterator

import numpy as np

from fedplat.codecs import Codec, CodecError, CodecOptions
from fedplat.model import BLOCK, Vector, VectorBlocks
from fedplat.testing.errors import adopt, run_checks, wrap_errors

SIZES = (0, 1, 2, 7, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 37)
NUM_DAMAGED = 300
NUM_SEEDS = 8
MAX_BIAS = 0.25
"""Largest difference from 1 of the scale of decoded vectors, on average."""
MAX_BLOCKS = 12
"""Blocks of float32 that a decoder may hold."""


@dataclasses.dataclass(frozen=True)
class CodecUnderTest:
    """A codec, with its operations on whole vectors."""

    codec: Codec

    def encode(self, vector: Vector, seed: int = 1) -> bytes:
        """Return the payload of a vector."""
        return b"".join(self.codec.encode(VectorBlocks(vector), np.random.default_rng(seed)))

    def decode(self, payload: bytes, size: int) -> Vector:
        """Return the vector of a payload."""
        parts = [block.copy() for block in self.codec.decode(payload, size)]
        return np.concatenate([np.empty(0, np.float32), *parts])


def normal(size: int) -> Vector:
    """Return a vector with the entries of a typical update."""
    return np.random.default_rng(1).normal(0, 0.02, size).astype(np.float32)


def check_codec(options: CodecOptions) -> None:
    """Check a codec. Raises `ConformanceError` for the first check that fails."""
    adopted = adopt(options, CodecOptions)
    with wrap_errors("build"):
        codec = adopted.build()
    run_checks(CHECKS, CodecUnderTest(codec))


def check_vectors_have_their_length_again(tested: CodecUnderTest) -> Iterator[str]:
    """Require vectors of the same length, float32, from payloads within `max_bytes`."""
    for size in SIZES:
        payload, most = tested.encode(normal(size)), tested.codec.max_bytes(size)
        if len(payload) > most:
            yield f"{size} entries have {len(payload)} bytes; expected at most max_bytes(), {most}"
            return
        if size == 0 and payload:
            yield f"an empty vector has {len(payload)} bytes; expected none"
        blocks = [block.copy() for block in tested.codec.decode(payload, size)]
        if any(block.dtype != np.float32 for block in blocks):
            yield f"a block is {next(block.dtype for block in blocks if block.dtype != np.float32)}; expected float32"
        if (found := sum(block.size for block in blocks)) != size:
            yield f"{size} entries are decoded to {found}"
        elif any(block.size != BLOCK for block in blocks[:-1]):
            yield f"blocks have {sorted({block.size for block in blocks})} entries; expected {BLOCK}, except the last"


def check_vectors_stay_as_they_are(tested: CodecUnderTest) -> Iterator[str]:
    """Require that vectors are only read: error feedback subtracts what was sent from them."""
    vector = normal(BLOCK + 5)
    before = vector.copy()
    vector.flags.writeable = False
    try:
        tested.encode(vector)
    except ValueError as exc:
        yield f"encode() writes into the vector that it receives ({exc}); expected new arrays"
        return
    if vector.tobytes() != before.tobytes():
        yield "encode() changes the vector that it receives; expected new arrays"


def check_decoded_vectors_resemble_the_original(tested: CodecUnderTest) -> Iterator[str]:
    """Require each block at its place, and unchanged on average, of codecs without error feedback."""
    if tested.codec.needs_feedback:
        return
    vector = normal(2 * BLOCK + 1037)
    decoded = np.mean([tested.decode(tested.encode(vector, seed), vector.size) for seed in range(NUM_SEEDS)], axis=0)
    for start in range(0, vector.size, BLOCK):
        block, found = vector[start : start + BLOCK], decoded[start : start + BLOCK]
        scale = float(block @ found / (block @ block))
        if not abs(scale - 1.0) <= MAX_BIAS:
            yield (
                f"the entries from {start:,} on are decoded to {scale:.2f} times the original, on average; expected 1, "
                "or needs_feedback = True for a codec that omits a part"
            )
            return


def check_equal_seeds_give_equal_bytes(tested: CodecUnderTest) -> Iterator[str]:
    """Require all randomness from the generator: an upload that is repeated must be the same."""
    vector = normal(BLOCK + 5)
    if tested.encode(vector) != tested.encode(vector):
        yield "two payloads of a vector and a seed differ; expected no other randomness and no memory"


def check_blocks_can_be_read_again(tested: CodecUnderTest) -> Iterator[str]:
    """Require that a decoded update can be read more than once: rules may do so."""
    vector = normal(BLOCK + 5)
    blocks = tested.codec.decode(tested.encode(vector), vector.size)
    first, second = (np.concatenate([block.copy() for block in blocks]) for _ in range(2))
    if first.tobytes() != second.tobytes():
        yield "a payload that is read twice gives different vectors"


def check_extreme_values_stay_finite(tested: CodecUnderTest) -> Iterator[str]:
    """Require finite results, or a `CodecError`, for all finite vectors."""
    largest = float(np.finfo(np.float32).max)
    for scale in (0.0, 1e-45, 1e-40, 1e-38, 1e-30, 1e30, largest):
        vector = np.clip(normal(1000).astype(np.float64) * 50 * scale, -largest, largest).astype(np.float32)
        try:
            with np.errstate(all="ignore"):
                decoded = tested.decode(tested.encode(vector), vector.size)
        except CodecError:
            continue
        if not np.isfinite(decoded).all():
            yield f"a finite vector with entries of about {scale:g} is decoded to NaN or infinite entries"


def check_feedback_reduces_what_is_omitted(tested: CodecUnderTest) -> Iterator[str]:
    """Require a contraction of codecs with `needs_feedback`, so that what they omit does not grow.

    Karimireddy et al. 2019, arXiv 1901.09847, Assumption A: ‖x - C(x)‖ < ‖x‖.
    """
    if not tested.codec.needs_feedback:
        return
    vector = normal(2 * BLOCK + 1037)
    error = float(np.linalg.norm(vector - tested.decode(tested.encode(vector), vector.size)) / np.linalg.norm(vector))
    if not error < 1.0:
        yield f"the error of a vector is {error:.2f} times as long as the vector; with needs_feedback, expected below 1"


def check_payloads_of_another_length_are_refused(tested: CodecUnderTest) -> Iterator[str]:
    """Require a `CodecError` for payloads that are too short or too long."""
    for size in (1, 1000, BLOCK + 5):
        payload = tested.encode(normal(size))
        for wrong in (b"", payload[:-1], payload[: len(payload) // 2], payload + b"\0"):
            try:
                tested.decode(wrong, size)
            except CodecError:
                continue
            except Exception as exc:
                yield f"{len(wrong)} instead of {len(payload)} bytes raise {type(exc).__name__}; expected a CodecError"
                return
            yield f"{len(wrong)} instead of {len(payload)} bytes are decoded; expected a CodecError"
            return


def check_damaged_payloads_are_harmless(tested: CodecUnderTest) -> Iterator[str]:
    """Require a finite vector or a `CodecError` for all bytes: any client may send them."""
    rng, size = np.random.default_rng(3), 700
    good = tested.encode(normal(size))
    for _ in range(NUM_DAMAGED):
        damaged = bytearray(good)
        for position in rng.integers(0, len(good), rng.integers(1, 5)):
            damaged[position] = (0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(256)))[rng.integers(6)]
        try:
            with np.errstate(all="ignore"):
                decoded = tested.decode(bytes(damaged), size)
        except CodecError:
            continue
        except Exception as exc:
            yield f"a damaged payload raises {type(exc).__name__}: {exc}; expected a CodecError"
            return
        if not np.isfinite(decoded).all():
            yield "a damaged payload is decoded to NaN or infinite entries; expected a CodecError"
            return


def check_payloads_are_read_in_blocks(tested: CodecUnderTest) -> Iterator[str]:
    """Require that memory does not grow with the vector, which may be larger than the memory of the server."""
    size = 3 * MAX_BLOCKS * BLOCK
    payload = tested.encode(normal(size))
    tracemalloc.start()
    try:
        for _ in tested.codec.decode(payload, size):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if peak > MAX_BLOCKS * 4 * BLOCK:
        yield f"decoding {4 * size:,} bytes allocates {peak:,}; expected that it yields one block after the other"


def check_vectors_that_are_not_finite_are_refused(tested: CodecUnderTest) -> Iterator[str]:
    """Require a `CodecError` for NaN and infinite entries, which `Codec.encode` raises."""
    for bad in (math.nan, math.inf):
        vector = normal(BLOCK + 5)
        vector[BLOCK + 2] = bad
        try:
            tested.encode(vector)
        except CodecError:
            continue
        yield f"a vector with the entry {bad} is encoded; expected a CodecError"


CHECKS = (
    check_vectors_have_their_length_again,
    check_vectors_stay_as_they_are,
    check_equal_seeds_give_equal_bytes,
    check_blocks_can_be_read_again,
    check_vectors_that_are_not_finite_are_refused,
    check_extreme_values_stay_finite,
    check_feedback_reduces_what_is_omitted,
    check_decoded_vectors_resemble_the_original,
    check_payloads_of_another_length_are_refused,
    check_damaged_payloads_are_harmless,
    check_payloads_are_read_in_blocks,
)
