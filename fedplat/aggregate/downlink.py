"""The step that clients can be sent: encoded, and what the codec lost added to the next one.

Source: Tang et al. 2019, "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-pass Error-Compensated
Compression", arXiv 1905.05957, Algorithm 1, the server's half: with the step v and the residual δ of the version
before, v ← v + δ is encoded, everybody moves by Q(v), and δ ← v - Q(v). The server moves by Q(v) too, so a version *is*
the one before plus the decoded payload, and whoever has that one needs the payload only.

The codec's randomness comes from a seed that anyone can compute (`seed_of`). It is no secret: it protects nobody's
data, since what it rotates or rounds is the step that is then published. It has to be found again after a crash,
because a recomputed version must have the same bits; and each version of a job has its own, so that errors do not add
up. Who knows it beforehand may at most choose updates that the codec encodes badly, which stay in the residual.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np

from fedplat.aggregate.algebra import Rule, State, Wrapper
from fedplat.aggregate.optimizer import server_optimizer
from fedplat.codecs import Codec, with_error_feedback
from fedplat.model import Vector, VectorBlocks, blocks


def seed_of(job_id: str, version: int) -> int:
    """The seed for the step that leads to a version of a job."""
    return int.from_bytes(hashlib.sha256(f"downlink {job_id} {version}".encode()).digest(), "big")


def compress_step(codec: Codec, seed: int, keep: Callable[[bytes], None]) -> Wrapper:
    """Makes a rule's step what `codec` leaves of it; the state `residual` is what it has left out so far.

    `keep` is given the payload whenever a step was computed. Codecs work on whole vectors, so the rule is not
    blockwise any more. `apply` raises `CodecError` for a step that is not finite.
    """
    feedback = with_error_feedback(codec)

    def init(size: int) -> State:
        return {"residual": feedback.init(size)}

    def update(state: State, delta: Vector) -> tuple[Vector, State]:
        payload, residual = feedback.encode(state["residual"], VectorBlocks(delta), np.random.default_rng(seed))
        keep(payload)
        step = np.empty_like(delta)
        for part, decoded in zip(blocks(step.size), codec.decode(payload, step.size), strict=True):
            step[part] = decoded
        return step, {"residual": residual}

    def wrap(inner: Rule) -> Rule:
        return dataclasses.replace(server_optimizer(init, update)(inner), blockwise=False)

    return wrap
