"""Training on packed data has the bits of training on the same data unpacked."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fedplat.client_state import ClientState
from fedplat.errors import DataError
from fedplat.model import Parameters
from fedplat.pytorch.packed import PackedDataset
from fedplat.pytorch.training import (
    Learner,
    LocalOptions,
    LocalTraining,
    PrefetchDataset,
    Trainee,
    check_examples,
    evaluate,
    train,
)
from support.packed import edit_index, examples

CPU = torch.device("cpu")


class Pairs(Dataset[Any]):
    """The unpacked examples, with targets as Python numbers."""

    def __init__(self, count: int = 300) -> None:
        self.inputs, self.targets = examples(count)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.inputs[index]), int(self.targets[index])


def equal(found: Iterable[Any], expected: Iterable[Any]) -> None:
    for some, others in zip(found, expected, strict=True):
        for one, other in zip(some, others, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_has_the_batches_of_the_unpacked_data(packed: Path, num_workers: int) -> None:
    def batches(dataset: Dataset[Any]) -> Iterable[Any]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(dataset, 32, shuffle=True, generator=generator, num_workers=num_workers)

    data = PackedDataset(packed, verify=True)
    equal([data[7], data[-1]], [(Pairs()[i][0], torch.tensor(Pairs()[i][1])) for i in (7, 299)])
    equal(batches(data), batches(Pairs()))
    odd = range(1, 300, 2)
    equal(batches(Subset(data, odd)), batches(Subset(Pairs(), odd)))


@pytest.mark.slow
def test_workers_that_are_started_anew_open_the_data_themselves(packed: Path) -> None:
    loader = DataLoader(PackedDataset(packed), 150, num_workers=1, multiprocessing_context="spawn")
    equal(loader, DataLoader(Pairs(), 150))


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def trained(dataset: Dataset[Any], **more: Any) -> tuple[dict[str, bytes], dict[str, float]]:
    torch.manual_seed(0)
    parameters = Parameters.from_arrays({name: value.numpy() for name, value in model().state_dict().items()})
    options = LocalOptions(epochs=3, batch_size=16, learning_rate=0.1, momentum=0.9, accumulate=2)
    work = LocalTraining(
        examples=check_examples(dataset, CPU), options=options, seed=1, client_state=ClientState(), **more
    )
    trainee = Trainee(Learner(model=model))
    metrics = dict(train(trainee, parameters, work))
    metrics |= evaluate(trainee, parameters, work.examples, batch_size=50)
    return {name: np.asarray(value).tobytes() for name, value in parameters.items()}, metrics


def test_training_has_the_bits_of_the_unpacked_data(packed: Path) -> None:
    expected = trained(Pairs())
    inputs, targets = examples(300)
    assert trained(TensorDataset(torch.from_numpy(inputs), torch.from_numpy(targets))) == expected
    assert trained(PackedDataset(packed)) == expected
    assert trained(PrefetchDataset(Pairs(), batches=3)) == expected
    some = np.random.default_rng(0).permutation(300)[:77].tolist()
    assert trained(Subset(PackedDataset(packed), some)) == trained(Subset(Pairs(), some)) != expected


def test_damaged_data_ends_the_training_with_the_name_of_the_file(packed: Path) -> None:
    (packed / "shard-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"shard-00002\.arrow is missing"):
        trained(PackedDataset(packed))
    edit_index(packed, lambda index: cast("list[Any]", index["shards"]).pop())
    trained(PackedDataset(packed))
