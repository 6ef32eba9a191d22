"""A client's data, as batches of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedplat.pytorch.training.schedule import Indices

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class Examples(Protocol):
    """Pairs of inputs and targets."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def batches(self, order: Iterable[Indices]) -> Iterator[Batch]:
        """Inputs and targets of each batch in `order`, on the device of the training."""
        ...


class TensorExamples:
    """Examples that are in memory, on the device where they are used."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._inputs, self._targets = inputs, targets

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._targets)

    def batches(self, order: Iterable[Indices]) -> Iterator[Batch]:
        """Inputs and targets of each batch."""
        for indices in order:
            chosen = torch.from_numpy(indices).to(self._targets.device)
            yield self._inputs[chosen], self._targets[chosen]


class DatasetExamples:
    """Examples of any map-style dataset, read as they are needed."""

    def __init__(self, dataset: Dataset[Any], device: torch.device) -> None:
        self._dataset, self._device = dataset, device

    def __len__(self) -> int:
        """Number of examples."""
        return len(cast(Any, self._dataset))

    def batches(self, order: Iterable[Indices]) -> Iterator[Batch]:
        """Inputs and targets of each batch."""
        # A generator of its own: a loader without one draws from the global one, which the model's dropout uses too.
        loader = DataLoader(self._dataset, batch_sampler=_Lists(order), generator=torch.Generator())
        for inputs, targets in loader:
            yield inputs.to(self._device), targets.to(self._device)


def examples_of(dataset: Dataset[Any], device: torch.device) -> Examples:
    """The examples of a dataset; those of plain tensors are not read one by one."""
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        inputs, targets = (tensor.to(device) for tensor in dataset.tensors)
        return TensorExamples(inputs, targets)
    return DatasetExamples(dataset, device)


def examples_to_use(dataset: Dataset[Any], device: torch.device) -> Examples:
    """The examples of a dataset that somebody gave to train or evaluate on. Raises `ValueError` for none at all."""
    if not isinstance(dataset, Sized):
        raise ValueError(f"the dataset {type(dataset).__name__} has no length; expected a map-style dataset")
    if not len(dataset):
        raise ValueError("the dataset is empty; expected at least one example to train or evaluate on")
    return examples_of(dataset, device)


class _Lists:
    """Indices as DataLoader wants them."""

    def __init__(self, order: Iterable[Indices]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self._order)
