"""Compression of the step that is sent to clients, with error feedback: the codec's error is added to the next step.

Source: Tang et al. 2019, "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-pass Error-Compensated
Compression", arXiv 1905.05957, Algorithm 1, the server's half: with the step v and the residual δ of the previous
version, v ← v + δ is encoded, all clients move by Q(v), and δ ← v - Q(v). The server moves by Q(v) too, so a version
*is* the previous one plus the decoded payload, and a client that has the previous one needs only the payload.

The codec's randomness comes from a seed that anyone can compute (`seed_of`). It is not a secret and protects no data,
since the step that it rotates or rounds is then published. It must be reproducible after a crash, because a recomputed
version must have the same bits. Each version of a job has its own seed, so that errors do not add up. A client that
predicts the seed can at most choose updates that the codec encodes badly, and their error stays in the residual.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np

from fedplat.aggregate import algebra, server_optimizers
from fedplat.codecs import Codec, with_error_feedback
from fedplat.model import Vector, VectorBlocks, blocks


def seed_of(job_id: str, version: int) -> int:
    """Return the seed for the step that leads to a version of a job."""
    return int.from_bytes(hashlib.sha256(f"downlink {job_id} {version}".encode()).digest(), "big")


def compress_step(codec: Codec, seed: int, keep: Callable[[bytes], None]) -> algebra.Wrapper:
    """Replace a rule's step by its encoded and decoded form; the state `residual` is the accumulated error.

    `keep` is called with the payload of each computed step. Codecs work on whole vectors, so the resulting rule is not
    blockwise. `apply` raises `CodecError` for a step that is not finite.
    """
    feedback = with_error_feedback(codec)

    def init(size: int) -> algebra.State:
        return {"residual": feedback.init(size)}

    def update(state: algebra.State, delta: Vector) -> tuple[Vector, algebra.State]:
        payload, residual = feedback.encode(state["residual"], VectorBlocks(delta), np.random.default_rng(seed))
        keep(payload)
        step = np.empty_like(delta)
        for part, decoded in zip(blocks(step.size), codec.decode(payload, step.size), strict=True):
            step[part] = decoded
        return step, {"residual": residual}

    def wrap(inner: algebra.Rule) -> algebra.Rule:
        return dataclasses.replace(server_optimizers.server_optimizer(init, update)(inner), blockwise=False)

    return wrap
