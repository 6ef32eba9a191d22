"""A client's data, as batches of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typing_extensions import override

from fedplat.pytorch.training.schedule import Indices

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class Examples(Protocol):
    """Pairs of inputs and targets."""

    def __len__(self) -> int: ...

    def batches(self, order: Iterable[Indices]) -> Iterator[Batch]:
        """Yield inputs and targets of each batch in `order`, on the device of the training."""
        ...


class TensorExamples(Examples):
    """Examples in memory, on the device of the training."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._inputs, self._targets = inputs, targets

    @override
    def __len__(self) -> int:
        return len(self._targets)

    @override
    def batches(self, order: Iterable[Indices]) -> Iterator[Batch]:
        for indices in order:
            chosen = torch.from_numpy(indices).to(self._targets.device)
            yield self._inputs[chosen], self._targets[chosen]


class DatasetExamples(Examples):
    """Examples of any map-style dataset, read on demand."""

    def __init__(self, dataset: Dataset[Any], device: torch.device) -> None:
        self._dataset, self._device = dataset, device

    @override
    def __len__(self) -> int:
        return len(cast(Any, self._dataset))

    @override
    def batches(self, order: Iterable[Indices]) -> Iterator[Batch]:
        # A loader without its own generator draws from the global one, which the model's dropout also uses.
        loader = DataLoader(self._dataset, batch_sampler=_Lists(order), generator=torch.Generator())
        for inputs, targets in loader:
            yield inputs.to(self._device), targets.to(self._device)


def make_examples(dataset: Dataset[Any], device: torch.device) -> Examples:
    """Return the examples of a dataset; plain tensors are not read one example at a time."""
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        inputs, targets = (tensor.to(device) for tensor in dataset.tensors)
        return TensorExamples(inputs, targets)
    return DatasetExamples(dataset, device)


def check_examples(dataset: Dataset[Any], device: torch.device) -> Examples:
    """Return the examples of a user's dataset. Raises `ValueError` if it has no length or is empty."""
    if not isinstance(dataset, Sized):
        raise ValueError(f"the dataset {type(dataset).__name__} has no length; expected a map-style dataset")
    if not len(dataset):
        raise ValueError("the dataset is empty; expected at least one example to train or evaluate on")
    return make_examples(dataset, device)


class _Lists:
    """Indices as lists, as DataLoader requires."""

    def __init__(self, order: Iterable[Indices]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self._order)
