"""A client's examples within tensors of all clients' examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fedplat.pytorch.training.examples import Batch
from fedplat.pytorch.training.schedule import Indices

_BLOCK_ENTRIES = 1 << 22
"""Input entries gathered in one call: 16 MiB, which takes far fewer calls than one for each batch."""


@dataclass(frozen=True, slots=True)
class PartExamples:
    """The examples of `inputs` and `targets` at the indices `part`."""

    inputs: torch.Tensor
    targets: torch.Tensor
    part: Indices

    def __len__(self) -> int:
        return len(self.part)

    def batches(self, order: Iterable[Indices]) -> Iterator[Batch]:
        """Yield inputs and targets of each batch in `order`, which contains indices of `part`."""
        for block in self._blocks(order):
            sizes = [len(indices) for indices in block]
            chosen = torch.from_numpy(self.part[np.concatenate(block)]).to(self.inputs.device)
            inputs, targets = self.inputs.index_select(0, chosen), self.targets.index_select(0, chosen)
            yield from zip(inputs.split(sizes), targets.split(sizes), strict=True)

    def _blocks(self, order: Iterable[Indices]) -> Iterator[list[Indices]]:
        most = max(1, _BLOCK_ENTRIES // max(1, self.inputs[0].numel()))
        block: list[Indices] = []
        size = 0
        for indices in order:
            if block and size + len(indices) > most:
                yield block
                block, size = [], 0
            block.append(indices)
            size += len(indices)
        if block:
            yield block
