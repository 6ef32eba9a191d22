"""Learning rates, packed rows, and distillation against a loop by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat.model import Parameters
from fedplat.pytorch import server
from fedplat.pytorch.convert import from_state_dict, load_into
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.server import ServerTrainer, TrainingRun, pack_sequences
from fedplat.pytorch.server.training import divergence, learning_rate_factor
from support.ranks import scenarios


def test_the_rate_grows_from_that_of_one_rank_to_that_of_all() -> None:
    assert [learning_rate_factor("linear", 5, 4, step) for step in range(6)] == [1.0, 2.0, 3.0, 4.0, 5.0, 5.0]
    assert [learning_rate_factor("sqrt", 4, 0, step) for step in range(2)] == [2.0, 2.0]
    assert [learning_rate_factor("none", 4, 2, step) for step in range(3)] == [1.0, 1.0, 1.0]


def test_packed_rows_go_on_where_the_last_one_ended() -> None:
    rows = pack_sequences([[1, 2, 3], np.array([4, 5]), [6, 7, 8, 9]], 3, separator=0)
    inputs, targets = rows.tensors
    assert inputs.tolist() == [[1, 2, 3], [0, 4, 5], [0, 6, 7]]
    assert targets.tolist() == [[2, 3, 0], [4, 5, 0], [6, 7, 8]]
    assert inputs.dtype == torch.int64
    assert len(pack_sequences([[1, 2]], 1)) == 1
    with pytest.raises(ValueError, match="have 3 tokens: expected at least 4, for one row"):
        pack_sequences([[1, 2, 3]], 3)


def by_hand(model: Parameters, teachers: list[Parameters], work: TrainingRun, temperature: float) -> nn.Module:
    """Algorithm 1 of FedDF, all teachers at once."""
    inputs = scenarios.examples().tensors[0]
    logits: list[torch.Tensor] = []
    student = scenarios.mlp()
    for teacher in teachers:
        load_into(student, teacher)
        logits.append(student(inputs).detach())
    given = torch.softmax(torch.stack(logits).mean(0) / temperature, 1)
    load_into(student, model)
    optimizer = torch.optim.SGD(student.parameters(), lr=work.options.learning_rate)
    for step in work.plan(len(inputs), 1).steps():
        optimizer.zero_grad()
        found = torch.softmax(student(inputs[step]) / temperature, 1)
        (given[step] * (given[step] / found).log()).sum(1).mean().backward()
        optimizer.step()
    return student


def test_distillation_is_that_of_the_paper(alone: Ranks) -> None:
    trainer = ServerTrainer(model=scenarios.mlp, data=scenarios.examples())
    model, teachers = trainer.learner.initial(1), [trainer.learner.initial(seed) for seed in (2, 3, 4)]
    work = TrainingRun(options=scenarios.step(method="distill", temperature=3.0, steps=20), num_ranks=2)
    student = by_hand(model, teachers, work, 3.0)
    trained = server.distill(alone, trainer, model, iter(teachers), work)
    assert trained is not None
    assert trained.losses[-1] < trained.losses[0]
    for name, expected in student.state_dict().items():
        np.testing.assert_allclose(model[name], expected.numpy(), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="no client's model to distill"):
        server.distill(alone, trainer, model, [], work)


def test_a_divergence_is_a_mean_over_positions_too() -> None:
    student, teacher = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    flat = [each.permute(0, 2, 1).reshape(10, 3) for each in (student, teacher)]
    assert divergence(2.0)(student, teacher).item() == pytest.approx(divergence(2.0)(*flat).item(), rel=1e-6)


def client_model(start: Parameters, classes: list[int]) -> Parameters:
    """What a client has learned that has only some of the classes."""
    module = scenarios.mlp()
    load_into(module, start)
    inputs, targets = scenarios.examples(400, seed=5).tensors
    mine = torch.isin(targets, torch.tensor(classes))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs[mine]), targets[mine]).backward()
        optimizer.step()
    return from_state_dict(module.state_dict())


def test_distillation_mends_the_average_of_clients_that_differ(alone: Ranks) -> None:
    public = TensorDataset(scenarios.examples(300, seed=6).tensors[0], torch.zeros(300))  # without targets
    trainer = ServerTrainer(model=scenarios.mlp, data=public, evaluation=scenarios.examples(500, seed=7))
    start = trainer.learner.initial(1)
    teachers = [client_model(start, classes) for classes in ([0, 1], [1, 2], [0, 2])]
    model = Parameters.from_arrays({name: np.mean([each[name] for each in teachers], 0) for name in start})
    before = server.evaluate(alone, trainer, model)["accuracy"]
    options = scenarios.step(method="distill", batch_size=32, steps=150, learning_rate=0.5)
    server.distill(alone, trainer, model, teachers, TrainingRun(options=options, num_ranks=2))
    after = server.evaluate(alone, trainer, model)["accuracy"]
    assert math.isfinite(after)
    assert after > before + 0.02, (before, after)
