"""A client's data, as batches of tensors that are read ahead of the steps, and the examples of each step."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate
from typing_extensions import override

from fedplat.local_options import LocalOptions
from fedplat.pytorch.packed import find_batch_reader


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
    """Examples of any map-style dataset, read on demand: batch by batch if it is packed, otherwise one by one.

    Up to `ahead` batches are read before they are needed, by a thread; with 0, there is no thread.
    """

    def __init__(self, dataset: Dataset[Any], device: torch.device, ahead: int = 0) -> None:
        self._dataset, self._device, self._ahead = dataset, device, ahead
        self._read_packed = find_batch_reader(dataset)
        # A copy from pinned memory does not wait, so the device computes meanwhile.
        self._pins = device.type == "cuda"

    @override
    def __len__(self) -> int:
        return len(cast(Any, self._dataset))

    @override
    def batches(self, order: Iterable[Indices]) -> Iterator[Batch]:
        # Closed at the end of this generator, also when that is abandoned in the middle.
        with contextlib.closing(self._read_all(order)) as batches:
            for inputs, targets in batches:
                yield self._move(inputs), self._move(targets)

    def _read_all(self, order: Iterable[Indices]) -> Generator[Batch]:
        if self._ahead:
            yield from read_ahead(order, self._read, self._ahead, self._device)
        else:
            yield from map(self._read, order)

    def _read(self, indices: Indices) -> Batch:
        """Return a batch in the host's memory. Draws no random numbers, unlike a DataLoader."""
        chosen = indices.tolist()
        if self._read_packed is not None:
            inputs, targets = self._read_packed(chosen)
        elif (read := getattr(self._dataset, "__getitems__", None)) is not None:
            inputs, targets = self._collate(read(chosen))
        else:
            inputs, targets = self._collate([self._dataset[index] for index in chosen])
        if self._pins:
            return _map_tensors(torch.Tensor.pin_memory, inputs), targets.pin_memory()
        return inputs, targets

    def _collate(self, examples: list[Any]) -> Batch:
        """Return a batch of examples. Raises `ValueError` unless they are pairs of inputs and targets."""
        try:
            batch: Any = default_collate(examples)
        except (RuntimeError, TypeError) as exc:
            raise ValueError(
                f"examples of the dataset {type(self._dataset).__name__} cannot be joined to a batch: {exc}; expected "
                "pairs (input, target) of equal shapes"
            ) from exc
        if not isinstance(batch, list | tuple) or len(cast(Any, batch)) != 2 or not isinstance(batch[1], torch.Tensor):
            raise ValueError(
                f"the dataset {type(self._dataset).__name__} returned a {type(examples[0]).__name__} for an example; "
                "expected a pair (input, target), where the input may be a dict of tensors and the target is a number "
                "or a tensor"
            )
        return cast(Batch, tuple(batch))

    def _move(self, value: Any) -> Any:
        return _map_tensors(lambda tensor: tensor.to(self._device, non_blocking=self._pins), value)


def _map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return tensors, and dicts and sequences of them, changed alike."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _map_tensors(change, each) for name, each in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_map_tensors(change, each) for each in cast(Sequence[Any], value)]
    return value


def make_examples(dataset: Dataset[Any], device: torch.device) -> Examples:
    """Return the examples of a dataset; plain tensors are not read one example at a time."""
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        inputs, targets = (tensor.to(device) for tensor in dataset.tensors)
        return TensorExamples(inputs, targets)
    if type(dataset) is PrefetchDataset:
        return DatasetExamples(dataset.dataset, device, dataset.batches)
    return DatasetExamples(dataset, device, BATCHES_AHEAD if find_batch_reader(dataset) else 0)


def as_dataset(data: object) -> Dataset[Any] | None:
    """Return data as a map-style dataset: a dataset, a list of pairs, or a pair of arrays; None for a function.

    Raises `ValueError` for anything else.
    """
    if isinstance(data, DataLoader):
        raise ValueError(
            "the data is a DataLoader, and jobs set batches and their order; expected its dataset, .dataset"
        )
    if isinstance(data, tuple) and all(isinstance(each, list) or hasattr(each, "shape") for each in cast(Any, data)):
        arrays = cast("tuple[Any, ...]", data)
        if len(arrays) != 2:
            raise ValueError(f"the data are {len(arrays)} arrays; expected a pair of them, (inputs, targets)")
        inputs, targets = map(_as_tensor, arrays, ("inputs", "targets"))
        if len(inputs) != len(targets):
            raise ValueError(f"there are {len(inputs)} inputs and {len(targets)} targets; expected one target for each")
        return TensorDataset(inputs, targets)
    if isinstance(data, Mapping) or hasattr(data, "iloc"):
        raise ValueError(
            f"the data is a {type(data).__name__}, which has no examples by number; expected a pair of arrays, such as "
            "(table[inputs], table[target])"
        )
    if isinstance(data, Dataset) or hasattr(data, "__getitem__"):
        return cast("Dataset[Any]", data)
    if not callable(data):
        raise ValueError(
            f"the data is a {type(data).__name__}; expected a dataset of (input, target) pairs, a pair of arrays, or a "
            "function that returns one"
        )
    return None


def _as_tensor(values: Any, name: str) -> torch.Tensor:
    """Return an array of numbers as a tensor; fractions are float32. Raises `ValueError` for others."""
    if not isinstance(values, torch.Tensor):
        if np.ma.is_masked(values):
            raise ValueError(f"the {name} have masked values; expected all values, or only the rows that have them")
        try:
            array = np.array(values)
            if array.dtype.kind == "u" and array.itemsize > 1:  # PyTorch can hardly compute with these
                array = array.astype(np.int64)
            values = torch.as_tensor(np.array(array.tolist()) if array.dtype.kind == "O" else array)
        except (TypeError, ValueError) as exc:
            raise ValueError(f"the {name} cannot be a tensor: {exc}; expected an array of numbers") from exc
    return values.float() if values.dtype == torch.float64 else values


def check_examples(data: object, device: torch.device) -> Examples:
    """Return the examples of a user's dataset. Raises `ValueError` if it has no length or is empty."""
    dataset = as_dataset(data)
    if dataset is None:
        raise ValueError(f"the data is a {type(data).__name__}; expected a dataset of (input, target) pairs")
    if not isinstance(dataset, Sized):
        raise ValueError(f"the dataset {type(dataset).__name__} has no length; expected a map-style dataset")
    if not len(dataset):
        raise ValueError("the dataset is empty; expected at least one example to train or evaluate on")
    return make_examples(dataset, device)


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


Indices: TypeAlias = npt.NDArray[np.int64]


def iterate_batches(num_examples: int, batch_size: int) -> Iterator[Indices]:
    """Yield all examples once, in batches; the last may be short. A `batch_size` of 0 means one batch."""
    size = batch_size or num_examples
    for start in range(0, num_examples, size):
        yield np.arange(start, min(start + size, num_examples))


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """The local steps of one training: each epoch is a permutation, cut into steps; the last may be short.

    `seed` determines the order. `fraction` of the steps is done, at least one. The last batch is dropped if it has
    fewer than `smallest` examples and is not the only one: BatchNorm cannot train on a single example.
    """

    num_examples: int
    options: LocalOptions
    seed: int
    fraction: float = 1.0
    smallest: int = 1

    @property
    def batch_size(self) -> int:
        """Maximum number of examples in a batch."""
        return self.options.batch_size or self.num_examples

    @property
    def step_size(self) -> int:
        """Examples of a step, except for the last one of an epoch."""
        return self.batch_size * self.options.accumulate

    @property
    def used(self) -> int:
        """Examples used in an epoch."""
        last = self.num_examples % self.batch_size
        left_out = self.num_examples > self.batch_size and last < self.smallest
        return self.num_examples - (last if left_out else 0)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch."""
        return math.ceil(self.used / self.step_size)

    @property
    def num_steps(self) -> int:
        """Total number of steps."""
        whole = self.options.num_steps or self.options.epochs * self.steps_per_epoch
        return max(1, math.floor(self.fraction * whole + 1e-9))

    def steps(self) -> Iterator[Indices]:
        """Yield the examples of each step, epoch by epoch; every call yields the same."""
        rng = np.random.default_rng([self.seed, 0])
        left = self.num_steps
        while left:
            order = rng.permutation(self.num_examples)[: self.used]
            for start in range(0, min(self.used, left * self.step_size), self.step_size):
                yield order[start : start + self.step_size]
            left -= min(left, self.steps_per_epoch)

    def batches_of(self, step: Indices) -> list[Indices]:
        """Return the batches of one step, up to `accumulate` of them."""
        return [step[start : start + self.batch_size] for start in range(0, len(step), self.batch_size)]
