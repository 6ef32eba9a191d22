"""Hogwild: processes that change common weights without locks."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat.errors import TrainingError
from fedplat.model import Parameters
from fedplat.pytorch.convert import from_state_dict, load_into
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel.parts import divide
from fedplat.pytorch.server import ServerTrainer, TrainingRun
from fedplat.pytorch.server.data_parallel import LockFreeSgd
from support.ranks import hogwild, scenarios
from support.ranks.group import RankError, RankGroup, Zygote

HERE = "support.ranks.hogwild"


@pytest.fixture(scope="module")
def two(zygote: Zygote) -> Generator[RankGroup]:
    """Two workers."""
    with zygote.group(2) as group:
        yield group


def serial(trainer: ServerTrainer, data: TensorDataset, work: TrainingRun) -> Parameters:
    """A straightforward loop of SGD on the parts of all ranks, one after the other."""
    inputs, targets = data.tensors
    module = trainer.model()
    load_into(module, trainer.learner.initial(1))
    table = work.options
    parts = divide(work.plan(len(inputs), 1), work.num_ranks, range(work.num_ranks), work.seed)
    for part in itertools.chain.from_iterable(parts):
        if not part.share:
            continue
        loss = nn.functional.cross_entropy(module(inputs[part.indices]), targets[part.indices])
        weights = list(module.parameters())
        for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data -= table.learning_rate * slope.add(weight.data, alpha=table.weight_decay)
    return from_state_dict(module.state_dict())


def serial_disjoint() -> str:
    work = TrainingRun(options=hogwild.warm(), num_ranks=hogwild.NUM_RANKS)
    return serial(hogwild.DISJOINT, hogwild.disjoint_examples(), work).to_bytes().hex()


def loss_of(model: str) -> float:
    """The mean squared error of the model with these bytes."""
    found = Parameters.from_bytes(bytes.fromhex(model))
    inputs, targets = (tensor.numpy() for tensor in hogwild.noisy_examples().tensors)
    return float(np.square(inputs @ found["weight"].T + found["bias"] - targets).mean())


@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.01}])
def test_one_worker_has_the_bits_of_sgd(alone: Ranks, changes: dict[str, Any]) -> None:
    trainer = ServerTrainer(model=scenarios.mlp, data=scenarios.examples())
    work = TrainingRun(options=hogwild.warm(epochs=3, **changes), num_ranks=4)
    expected = serial(trainer, scenarios.examples(), work)
    assert hogwild.train(alone, trainer, work).to_bytes() == expected.to_bytes()


def test_one_logical_rank_has_the_steps_of_either_method(alone: Ranks) -> None:
    trainer = ServerTrainer(model=scenarios.dropout_net, data=scenarios.examples())
    models = [
        hogwild.train(alone, trainer, TrainingRun(options=hogwild.warm(**changes), num_ranks=1))
        for method in ("sgd", "hogwild")
        for changes in ({"epochs": 3, "accumulate": 2, "max_grad_norm": 0.5, "method": method},)
    ]
    for name, values in models[0].items():
        np.testing.assert_allclose(models[1][name], values, rtol=1e-5, atol=1e-6)


def test_workers_with_disjoint_features_have_the_bits_of_one(two: RankGroup, alone: Ranks) -> None:
    expected = serial_disjoint()
    assert hogwild.train_disjoint(alone) == expected
    assert two.call(f"{HERE}:train_disjoint") == [expected] * 2


def test_two_workers_learn_like_one(two: RankGroup, alone: Ranks) -> None:
    one, models = loss_of(hogwild.train_dense(alone)), two.call(f"{HERE}:train_dense")
    assert models[0] == models[1]
    assert loss_of(models[0]) <= 1.1 * one
    assert one < 0.5 * loss_of(hogwild.DENSE.learner.initial(1).to_bytes().hex())


@pytest.mark.slow
@pytest.mark.fault("F35")
def test_a_killed_worker_is_harmless(zygote: Zygote, two: RankGroup, alone: Ranks, tmp_path: Path) -> None:
    with zygote.group(2) as group:
        group.begin(f"{HERE}:die", folder=str(tmp_path))
        with pytest.raises(RankError, match="gone"):
            group.result(hogwild.VICTIM)
        assert group.result(0) == "RuntimeError"
    assert max(path.name for path in tmp_path.iterdir() if not path.suffix) == "step-000000000030"
    # As the pool does: new ranks, here as many as before, resume from the checkpoint.
    expected = serial_disjoint()
    assert two.call(f"{HERE}:train_disjoint", folder=str(tmp_path), checkpoint_every=10) == [expected] * 2
    assert hogwild.train_disjoint(alone, str(tmp_path), checkpoint_every=10) == expected  # at its end already


def test_ranks_share_one_vector(two: RankGroup) -> None:
    before = two.call(f"{HERE}:share", size=1)[0]["mapped"]
    for size in (3, 5000):
        values = [float(1 + place % 2) for place in range(size)]
        assert two.call(f"{HERE}:share", size=size) == [{"zeros": True, "values": values, "mapped": before}] * 2


def test_ranks_without_common_memory_are_refused(two: RankGroup) -> None:
    for text in two.call(f"{HERE}:without_shared_memory"):
        assert text.startswith('method = "hogwild" needs ranks that share memory')


def test_trainers_with_more_state_are_refused(alone: Ranks) -> None:
    trainers = {
        "no state for each weight": ServerTrainer(
            model=scenarios.mlp, data=scenarios.examples(), optimizer=scenarios.adam
        ),
        "has BatchNorm": ServerTrainer(model=scenarios.norm_net, data=scenarios.examples()),
        "trains float32 weights": ServerTrainer(model=lambda: scenarios.mlp().double(), data=scenarios.examples()),
    }
    for text, trainer in trainers.items():
        with pytest.raises(TrainingError, match=text):
            hogwild.train(alone, trainer, TrainingRun(options=hogwild.warm(), num_ranks=1))


@pytest.mark.parametrize(("name", "value"), [("momentum", 0.9), ("scaling", "linear")])
def test_options_that_need_a_common_step_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f'{name} = .*method = "hogwild"'):
        hogwild.warm(**{name: value})


def test_sparse_gradients_change_their_rows_only() -> None:
    """The numbers are those of `torch.optim.SGD`."""
    results: list[torch.Tensor] = []
    for make in (torch.optim.SGD, LockFreeSgd):
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=True)
        before = table.weight.detach().clone()
        optimizer = make(table.parameters(), lr=0.1)
        table(torch.tensor([1, 3, 1])).square().sum().backward()
        optimizer.step()
        changed = (table.weight != before).any(1)
        assert changed.tolist() == [False, True, False, True, False]
        results.append(table.weight.detach())
    torch.testing.assert_close(*results)
