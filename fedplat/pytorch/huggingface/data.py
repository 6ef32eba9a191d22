"""The examples of a training: any map-style dataset, or rows of arrays, such as those of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Subset
from typing_extensions import override

from fedplat.errors import DataError
from fedplat.learner import Data, check_data

Dataset: TypeAlias = Any
"""A map-style dataset of PyTorch or of the package `datasets`, whose examples the Trainer or the collator takes."""
Collator: TypeAlias = Callable[[list[Any]], Mapping[str, torch.Tensor]]
MakeExample: TypeAlias = Callable[[Any, Any], Any]
"""Returns an example for a row of inputs and a row of targets, both arrays."""


def make_causal_example(tokens: Any, labels: Any) -> dict[str, torch.Tensor]:
    """Return an example of tokens and of their labels, -100 for those that do not count, such as padding at the end."""
    return {
        "input_ids": torch.from_numpy(np.array(tokens, np.int64)),
        "labels": torch.from_numpy(np.array(labels, np.int64)),
    }


class ArrayExamples(torch.utils.data.Dataset[Any]):
    """The rows of two arrays as examples. Raises `DataError` for what is not a pair of arrays."""

    def __init__(self, data: Data, make: MakeExample = make_causal_example) -> None:
        self._inputs, self._targets = check_data(data)
        self._make = make

    def __len__(self) -> int:
        return len(self._targets)

    @override
    def __getitem__(self, index: int) -> Any:
        return self._make(self._inputs[index], self._targets[index])


def count_examples(data: Dataset) -> int:
    """Return the number of examples. Raises `DataError` if it is unknown or 0."""
    try:
        count = len(data)
    except TypeError as exc:
        raise DataError(
            f"the data {type(data).__name__} has no length; expected a map-style dataset, not a stream"
        ) from exc
    if not count:
        raise DataError("there are no examples; expected at least one")
    return count


def take(data: Dataset, order: Sequence[int]) -> Dataset:
    """Return the examples of a dataset in an order, which may repeat them."""
    select = getattr(data, "select", None)  # of `datasets.Dataset`, whose columns Trainers read
    return Subset(data, order) if select is None else select(order)
