"""Batches are read ahead in a thread: a bounded number of them, in the same order, and no longer than the training."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from fedplat.client_state import ClientState
from fedplat.model import Parameters
from fedplat.pytorch.packed import PackedDataset
from fedplat.pytorch.training import (
    Indices,
    Learner,
    LocalOptions,
    LocalTraining,
    PrefetchDataset,
    Trainee,
    check_examples,
    iterate_batches,
    train,
)

CPU = torch.device("cpu")
PATIENCE_S = 60
COUNT, SIZE = 60, 10


class Watched(Dataset[Any]):
    """Examples with an event for the batch that each ends, and the thread that read each."""

    def __init__(self, fails_at: int = -1) -> None:
        self.was_read = [threading.Event() for _ in range(COUNT // SIZE)]
        self.threads = set[int]()
        self.fails_at = fails_at

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        if index == self.fails_at:
            raise RuntimeError(f"example {index} is not readable")
        self.threads.add(threading.get_ident())
        if index % SIZE == SIZE - 1:
            self.was_read[index // SIZE].set()
        return torch.full((2,), float(index)), float(index)


@pytest.fixture(autouse=True)
def every_thread_ends() -> Iterator[None]:
    yield
    gc.collect()
    assert not readers()


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fedplat-prefetch")]


def test_the_next_batches_are_read_while_a_step_is_computed() -> None:
    data, taken = Watched(), list[int]()

    def order() -> Iterator[Indices]:
        for indices in iterate_batches(COUNT, SIZE):
            assert threading.current_thread() is threading.main_thread()
            taken.append(int(indices[0]) // SIZE)
            yield indices

    batches = check_examples(PrefetchDataset(data, batches=2), CPU).batches(order())
    for number in range(COUNT // SIZE):
        inputs, targets = next(batches)
        np.testing.assert_array_equal(targets, np.arange(number * SIZE, (number + 1) * SIZE))
        assert inputs.shape == (SIZE, 2)
        # A step is being computed now: two more batches are read, and no others.
        last = min(number + 2, COUNT // SIZE - 1)
        assert all(event.wait(PATIENCE_S) for event in data.was_read[: last + 1])
        assert taken == [*range(last + 1)]
    assert next(batches, None) is None
    assert data.threads != {threading.get_ident()}
    assert not readers()


def test_packed_data_is_read_ahead_and_other_data_only_on_request(packed: Path) -> None:
    class Inheriting(PackedDataset):
        """May draw random numbers."""

    kinds: list[tuple[Dataset[Any], bool]] = [
        (PackedDataset(packed), True),
        (Subset(Subset(PackedDataset(packed), range(200)), range(100)), True),
        (PrefetchDataset(Watched()), True),
        (Watched(), False),
        (Inheriting(packed), False),
        (Subset(Inheriting(packed), range(100)), False),
    ]
    for dataset, is_ahead in kinds:
        batches = check_examples(dataset, CPU).batches(iterate_batches(COUNT, SIZE))
        next(batches)
        assert bool(readers()) == is_ahead
        del batches
        assert not readers()


def test_random_datasets_have_the_draws_of_a_loader() -> None:
    class Noisy(Watched):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
            return super().__getitem__(index)[0] + torch.rand(2), float(index)

    def draws(batches: Iterator[Any]) -> list[Any]:
        torch.manual_seed(5)
        return [(inputs.tolist(), targets.tolist(), torch.rand(1).item()) for inputs, targets in batches]

    order = [*iterate_batches(COUNT, SIZE)]
    found = draws(check_examples(Noisy(), CPU).batches(order))
    assert found == draws(iter(DataLoader(Noisy(), SIZE, generator=torch.Generator())))


def test_an_error_of_the_reader_is_raised_at_its_batch() -> None:
    batches = check_examples(PrefetchDataset(Watched(fails_at=25)), CPU).batches(iterate_batches(COUNT, SIZE))
    assert [float(next(batches)[1][0]) for _ in range(2)] == [0, 10]
    with pytest.raises(RuntimeError, match="example 25 is not readable"):
        next(batches)
    assert not readers()


def test_an_error_of_the_order_is_raised() -> None:
    def order() -> Iterator[Indices]:
        yield np.arange(3)
        raise ValueError("no more draws")

    with pytest.raises(ValueError, match="no more draws"):
        next(check_examples(PrefetchDataset(Watched()), CPU).batches(order()))


@pytest.mark.parametrize("ending", ["close", "forget"])
def test_the_thread_ends_with_an_abandoned_training(ending: str) -> None:
    batches: Any = check_examples(PrefetchDataset(Watched()), CPU).batches(iterate_batches(COUNT, SIZE))
    next(batches)
    assert readers()
    if ending == "close":
        batches.close()
    else:
        del batches
    assert not readers()


@pytest.mark.parametrize("ending", ["stopped", "failed"])
def test_the_thread_ends_with_a_training_that_ends_early(ending: str) -> None:
    def after_step(done: int, total: int) -> bool:
        assert readers()
        if ending == "failed" and done == 2:
            raise KeyError("the step")
        return done < 2

    parameters = Parameters.from_arrays({"weight": np.zeros((1, 2), np.float32)})
    work = LocalTraining(
        examples=check_examples(PrefetchDataset(Watched()), CPU),
        options=LocalOptions(epochs=1, batch_size=SIZE, learning_rate=1e-6),
        seed=1,
        client_state=ClientState(),
        after_step=after_step,
    )
    learner = Learner(model=lambda: nn.Linear(2, 1, bias=False), loss=lambda outputs, targets: outputs.mean())
    try:
        assert train(Trainee(learner), parameters, work)["local_steps"] == 2
    except KeyError:
        assert ending == "failed"
    assert not readers()


def test_a_number_of_batches_that_is_not_possible() -> None:
    with pytest.raises(ValueError, match="batches is 0; expected at least 1"):
        PrefetchDataset(Watched(), batches=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_reach_a_gpu_through_pinned_memory(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = list[bool]()
    move = torch.Tensor.to

    def to(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        pinned.append(tensor.is_pinned() and options["non_blocking"])
        return move(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "to", to)
    data, device = PackedDataset(packed), torch.device("cuda", torch.cuda.device_count() - 1)
    order = [*iterate_batches(300, 32)]
    found = [*check_examples(data, device).batches(order)]
    monkeypatch.undo()
    assert len(pinned) == 2 * len(order)
    assert all(pinned)
    for batch, expected in zip(found, check_examples(data, CPU).batches(order), strict=True):
        for one, other in zip(batch, expected, strict=True):
            assert one.device == device
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0)
