"""Packed data as a PyTorch dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils.data import Dataset

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
