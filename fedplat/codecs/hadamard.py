"""The fast Walsh-Hadamard transform: additions in a fixed order, so the same bits on every machine.

Source: Pease 1968, "An Adaptation of the Fast Fourier Transform for Parallel Processing", J. ACM 15(2): every stage
adds and subtracts the two halves of its input and interleaves the results. So all stages are the same and read
contiguous memory; writes have a stride of whole rows. (The order of sums in BLAS depends on the processor.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]


def hadamard(rows: Rows) -> Rows:
    """Return H times `rows` of shape [2^k, m]: every column is transformed, in natural order, without a factor.

    Overwrites `rows`. H is its own inverse, except for the factor 2^k.

    >>> hadamard(np.array([[1], [2]], np.float32)).ravel()
    array([ 3., -1.], dtype=float32)
    """
    dimension, num_columns = rows.shape
    half = dimension // 2
    result = np.empty_like(rows)
    for _ in range(dimension.bit_length() - 1):
        pairs = result.reshape(half, 2, num_columns)
        np.add(rows[:half], rows[half:], out=pairs[:, 0])
        np.subtract(rows[:half], rows[half:], out=pairs[:, 1])
        rows, result = result, rows
    return rows
