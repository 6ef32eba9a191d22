"""Packed data as a PyTorch dataset, and the packing of token sequences of any lengths into rows of one length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, TensorDataset

from fedplat.packed import PackedReader

TensorPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class PackedDataset(Dataset[TensorPair]):
    """Pairs of inputs and targets of a folder that `fedplat data pack` wrote, read by index.

    A training reads a batch at once, and the next ones while a step is computed. `DataLoader`, also with workers, and
    `Subset` read batches at once, too. `verify` first reads every byte and compares it with the index. Raises
    `DataError` that names a file, and `MissingExtraError` without pyarrow.
    """

    def __init__(self, folder: str | Path, *, verify: bool = False) -> None:
        self.reader = PackedReader(folder)
        if verify:
            self.reader.verify()

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> TensorPair:
        inputs, targets = self.read_batch([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> list[TensorPair]:
        """Return the pairs of a batch; `DataLoader` calls this."""
        return list(zip(*self.read_batch(indices), strict=True))

    def read_batch(self, indices: Sequence[int]) -> TensorPair:
        """Return inputs [n, ...] and targets [n, ...]."""
        inputs, targets = self.reader.read(indices)
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def find_batch_reader(dataset: Dataset[Any]) -> Callable[[Sequence[int]], TensorPair] | None:
    """Return the function that reads a batch of packed data, or of a subset of it; None for other datasets."""
    if type(dataset) is PackedDataset:
        return dataset.read_batch
    if type(dataset) is torch.utils.data.Subset:
        within = find_batch_reader(dataset.dataset)
        indices = dataset.indices
        return within and (lambda batch: within([indices[index] for index in batch]))
    return None


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
