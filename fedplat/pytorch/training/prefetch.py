"""Batches that are read while the steps before them are computed."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch.utils.data import Dataset
from typing_extensions import override

from fedplat.pytorch.training.schedule import Indices

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
BATCHES_AHEAD = 2


class PrefetchDataset(Dataset[Any]):
    """A map-style dataset whose next batches a training reads in a thread, while it computes a step.

    Reading must draw no random numbers: the draws would fall between those of the model, at other points in each run.
    So this is a decision of the author, except for packed data. The thread reads at most `batches` batches ahead.
    """

    def __init__(self, dataset: Dataset[Any], batches: int = BATCHES_AHEAD) -> None:
        if batches < 1:
            raise ValueError(f"batches is {batches}; expected at least 1")
        self.dataset, self.batches = dataset, batches

    def __len__(self) -> int:
        return len(self.dataset)  # pyright: ignore[reportArgumentType] - a map-style dataset

    @override
    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def read_ahead(
    order: Iterable[Indices], read: Callable[[Indices], Batch], ahead: int, device: torch.device
) -> Iterator[Batch]:
    """Yield `read(indices)` for each of `order`, up to `ahead` batches before they are needed, in one thread.

    `order` is advanced in the calling thread, because others read it there, too. An exception of `read` is raised where
    its batch would be yielded. The thread ends with the iterator, also when that is closed or no longer used.
    """
    waiting = iter(order)
    pool = ThreadPoolExecutor(1, "fedplat-prefetch", _use_device, (device,))
    try:
        pending = deque[Future[Batch]](pool.submit(read, indices) for indices in itertools.islice(waiting, ahead))
        while pending:
            for indices in itertools.islice(waiting, 1):
                pending.append(pool.submit(read, indices))
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _use_device(device: torch.device) -> None:
    """Use a GPU in this thread: otherwise memory would be pinned by way of the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
