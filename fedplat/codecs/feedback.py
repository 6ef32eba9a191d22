"""Error feedback: the error of a codec is added to the next vector, so that nothing is lost over time.

Source: Stich et al. 2018, "Sparsified SGD with Memory", arXiv 1809.07599, Algorithm 1; Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD", arXiv 1901.09847, Algorithm 1 (EF-SGD).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from fedplat.codecs.codec import Codec
from fedplat.errors import CodecError
from fedplat.model import Blocks, Vector, blocks


@dataclasses.dataclass(frozen=True)
class ErrorFeedback:
    """A pair of pure functions for encoding with a residual.

    - `init(size)` returns the first residual, zeros;
    - `encode(residual, vector, rng)` returns the payload of vector + residual, and the next residual: that sum minus
      the decoded payload. It modifies neither argument, and raises `CodecError` as the codec does.

    >>> feedback = with_error_feedback(TopK(fraction=0.5).build())
    >>> vector = VectorBlocks(np.array([1, 3], np.float32))
    >>> payload, residual = feedback.encode(feedback.init(2), vector, np.random.default_rng(1))
    >>> residual
    array([1., 0.], dtype=float32)
    """

    init: Callable[[int], Vector]
    encode: Callable[[Vector, Blocks, np.random.Generator], tuple[bytes, Vector]]


def with_error_feedback(codec: Codec) -> ErrorFeedback:
    """Add error feedback to a codec: the sum of all decoded vectors is the sum of all vectors minus the residual.

    Besides the next residual, only the payload is in memory.
    """

    def encode(residual: Vector, vector: Blocks, rng: np.random.Generator) -> tuple[bytes, Vector]:
        if vector.size != residual.size:
            raise CodecError(f"the vector has {vector.size} entries and the residual {residual.size}")
        target = _Sum(vector, residual)
        payload = b"".join(codec.encode(target, rng))
        error = np.empty_like(residual)
        for part, exact, decoded in zip(blocks(error.size), target, codec.decode(payload, error.size), strict=True):
            np.subtract(exact, decoded, out=error[part])
        return payload, error

    return ErrorFeedback(init=lambda size: np.zeros(size, np.float32), encode=encode)


class _Sum:
    def __init__(self, left: Blocks, right: Vector) -> None:
        self._left, self._right = left, right

    @property
    def size(self) -> int:
        return self._left.size

    def __iter__(self) -> Iterator[Vector]:
        for part, block in zip(blocks(self.size), self._left, strict=True):
            with np.errstate(over="ignore"):  # the codec refuses values that are not finite
                total = block + self._right[part]
            yield total
