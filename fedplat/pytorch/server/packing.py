"""Packing of token sequences of any lengths into rows of one length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset


def pack_sequences(
    sequences: Iterable[Sequence[int] | npt.NDArray[np.integer]], length: int, separator: int | None = None
) -> TensorDataset:
    """Concatenate sequences of tokens and cut them into rows of `length` tokens, so that no step computes padding.

    Row i has the tokens `[i * length, (i + 1) * length)` of the stream as its input, and those shifted by one as its
    target: int64 [rows, length] both. `separator` is appended to each sequence. An incomplete row at the end of the
    stream is dropped. Raises `ValueError` if there are too few tokens for one row.
    """
    if length < 1:
        raise ValueError(f"length = {length}: expected at least 1")
    end = [] if separator is None else [np.array([separator])]
    parts = [part for each in sequences for part in (np.asarray(each, np.int64).reshape(-1), *end)]
    stream = torch.from_numpy(np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64))
    num_rows = (len(stream) - 1) // length
    if num_rows < 1:
        raise ValueError(f"the sequences have {len(stream)} tokens: expected at least {length + 1}, for one row")
    used = num_rows * length
    return TensorDataset(stream[:used].view(num_rows, length), stream[1 : used + 1].view(num_rows, length))
