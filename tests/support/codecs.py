"""Vectors, encoded and decoded again."""

from __future__ import annotations

import numpy as np

from fedplat.codecs import Codec
from fedplat.model import BLOCK, Vector, VectorBlocks


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
