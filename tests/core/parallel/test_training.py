"""Training on the server's data: the same on one process and on two."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedplat.config.plugins import Plugins
from fedplat.errors import TrainingError
from fedplat.local_options import Pins
from fedplat.metrics import Perplexity
from fedplat.model import Parameters
from fedplat.parallel import Parallel
from fedplat.pytorch import server
from fedplat.pytorch.convert import load_into
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.server import DataParallelGradients, ServerTrainer, TrainingRun
from fedplat.pytorch.training import (
    Learner,
    LocalOptions,
    LocalTraining,
    SingleProcessGradients,
    TensorExamples,
    Trainee,
    train,
)
from fedplat.pytorch.training.tokenizers import tokenizer_sha256
from support.ranks import scenarios
from support.ranks.scenarios import Arrays

Found = Callable[[str], Arrays]


def assert_same_bits(one: Arrays, two: Arrays) -> None:
    assert one.keys() == two.keys()
    for name, expected in one.items():
        np.testing.assert_array_equal(two[name], expected, err_msg=name)


@pytest.mark.parametrize("name", [pytest.param("rich", marks=pytest.mark.slow), "norm", "bf16", "distilled", "fewer"])
def test_two_logical_ranks_give_the_same_bits_on_one_process_and_on_two(
    of_one: Found, of_two: Found, name: str
) -> None:
    assert_same_bits(of_one(name), of_two(name))


def plain_losses(model: Parameters, work: TrainingRun, step_size: int) -> tuple[nn.Module, list[float]]:
    """A straightforward loop: SGD on all examples of a step at once."""
    module = scenarios.mlp()
    load_into(module, model)
    optimizer = torch.optim.SGD(module.parameters(), lr=work.options.learning_rate, momentum=work.options.momentum)
    inputs, targets = scenarios.examples().tensors
    losses: list[float] = []
    for step in work.plan(len(inputs), 1).steps():
        assert len(step) in (step_size, len(inputs) % step_size)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(inputs[step]), targets[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return module, losses


def test_two_ranks_have_the_losses_of_one_process_with_the_double_batch(alone: Ranks, of_two: Found) -> None:
    trainer = ServerTrainer(model=scenarios.mlp, data=scenarios.examples())
    work = TrainingRun(options=scenarios.warm(batch_size=16, epochs=5, momentum=0.9), num_ranks=1)
    one, two = scenarios.learned(alone, trainer, work), of_two("halves")
    module, losses = plain_losses(trainer.learner.initial(1), work, 16)
    assert len(losses) == 15  # of which every third has 13 examples, 7 and 6 for each rank
    assert losses[-1] < losses[0] / 2
    for found in (one, two):
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
        for name, expected in module.state_dict().items():
            np.testing.assert_allclose(found[name], expected.numpy(), rtol=1e-4, atol=1e-6)


def test_more_ranks_than_examples_share_them(alone: Ranks) -> None:
    trainer = ServerTrainer(model=scenarios.mlp, data=scenarios.examples())
    work = TrainingRun(options=scenarios.warm(epochs=3), num_ranks=64)
    found = scenarios.learned(alone, trainer, work)
    _, losses = plain_losses(trainer.learner.initial(1), work, scenarios.NUM_EXAMPLES)
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)


def test_an_own_loss_that_is_a_mean_is_divided_among_ranks(alone: Ranks) -> None:
    plugins = Plugins(folder=Path(__file__).resolve().parents[3] / "examples" / "plugins")
    config = {"epochs": 2, "batch_size": 16, "learning_rate": 0.1, "algorithm": "fedlc.py:FedLC", "tau": 1.0}
    options = LocalOptions.from_config(config, plugins)
    models: list[Parameters] = []
    for gradients in (SingleProcessGradients(), DataParallelGradients(alone, 3, seed=0)):
        learner = ServerTrainer(model=scenarios.mlp, data=scenarios.examples()).learner
        models.append(learner.initial(1))
        examples = TensorExamples(*scenarios.examples().tensors)
        work = LocalTraining(examples=examples, options=options, seed=4, gradients=gradients)
        train(Trainee(learner), models[-1], work)
    for name, expected in models[0].items():
        np.testing.assert_allclose(models[1][name], expected, rtol=1e-4, atol=1e-6)


def test_running_statistics_are_those_of_logical_rank_0(alone: Ranks) -> None:
    trainer = ServerTrainer(model=scenarios.norm_net, data=scenarios.examples())
    work = TrainingRun(options=scenarios.step(batch_size=6, steps=1), num_ranks=3)
    model = trainer.learner.initial(1)
    found = scenarios.learned(alone, trainer, work, model)
    first = next(work.plan(scenarios.NUM_EXAMPLES, 6).steps())[:6]
    inputs = scenarios.examples().tensors[0][first].numpy()
    expected = 0.1 * (inputs @ model["0.weight"].T + model["0.bias"]).mean(0)
    np.testing.assert_allclose(found["1.running_mean"], expected, rtol=1e-4, atol=1e-6)
    assert found["1.num_batches_tracked"] == 1


def test_an_evaluation_is_that_of_one_process(of_one: Found, of_two: Found) -> None:
    one, two = of_one("scored"), of_two("scored")
    assert two["accuracy"] == one["accuracy"]
    assert two["loss"] == pytest.approx(float(one["loss"]), rel=1e-6)
    assert two["f1"] == one["f1"]


def test_what_one_rank_cannot_do_all_of_them_refuse(of_one: Found, of_two: Found) -> None:
    assert of_two("refused")["text"].tobytes() == b"the trainer cannot be used on rank 1: OSError: no such disk"
    assert of_one("refused")["text"].tobytes() == b"the trainer cannot be used on rank 0: OSError: no such disk"


def test_each_rank_leaves_a_trace(of_two: Found, folder_of_two: Path) -> None:
    assert len(of_two("traced")["losses"]) == 7
    files = sorted((folder_of_two / "traces").glob("*.pt.trace.json"))
    assert [file.name.partition(".")[0] for file in files] == ["rank0", "rank1"]
    for file in files:
        events = json.loads(file.read_text("utf-8"))["traceEvents"]
        names = {event.get("name") for event in events}
        assert {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4", "aten::linear"} <= names
        assert "ProfilerStep#5" not in names


@pytest.mark.fault("F35")
def test_a_killed_training_resumes_from_its_checkpoint_with_the_same_bits(
    alone: Ranks, folder_of_two: Path, tmp_path: Path
) -> None:
    whole = scenarios.learned(alone, *scenarios.checkpointed(tmp_path))
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-000000000012"]
    assert max(path.name for path in (folder_of_two / "saved").glob("step-*")) == "step-000000000006"
    done: list[int] = []

    def note(step: int, total: int) -> None:
        done.append(step)

    trainer, work = scenarios.checkpointed(folder_of_two, note=note)
    assert_same_bits(whole, scenarios.learned(alone, trainer, work))  # on one process instead of two
    assert done == [7, 8, 9, 10, 11, 12]
    assert_same_bits(whole, scenarios.learned(alone, trainer, work))  # at its end already


def test_a_checkpoint_of_another_training_is_refused(alone: Ranks, tmp_path: Path) -> None:
    trainer, work = scenarios.checkpointed(tmp_path)
    scenarios.learned(alone, trainer, work)
    with pytest.raises(TrainingError, match=r"step-000000000012 does not belong to this training: expected one of"):
        scenarios.learned(alone, dataclasses.replace(trainer, model=scenarios.mlp), work)


def test_a_checkpoint_that_cannot_be_written_ends_no_training(
    alone: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "saved").write_text("a file where the folder should be")
    found = scenarios.learned(alone, *scenarios.checkpointed(tmp_path))
    assert np.isfinite(found["losses"]).all()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["A checkpoint cannot be written"] * 4


def on_a_base() -> nn.Module:
    torch.manual_seed(4)  # the weights of a base do not depend on a job
    module = scenarios.mlp()
    module[0].requires_grad_(False)  # type: ignore[index]
    return module


def test_a_trainer_shares_what_is_trained(alone: Ranks) -> None:
    whole = ServerTrainer(model=on_a_base, data=scenarios.examples(), evaluation=scenarios.examples(200, 7))
    shared = dataclasses.replace(whole, share="trained", metrics=(Perplexity(),))
    models = [each.learner.initial(0) for each in (whole, shared)]
    assert set(models[1]) == {"2.weight", "2.bias"}
    base = shared.learner.base_sha256()
    with pytest.raises(
        TrainingError, match="rank 0: ModelError: the job does not state the base that its model is for"
    ):
        server.evaluate(alone, shared, shared.learner.initial(0))
    run = TrainingRun(options=scenarios.warm(), num_ranks=2, pins=Pins(base_sha256="0" * 64))
    with pytest.raises(TrainingError, match=f"the SHA-256 {base}; expected the same base on all participants"):
        server.train(alone, shared, shared.learner.initial(0), run)
    divided = dataclasses.replace(run, parallel=Parallel(shard=2))
    with pytest.raises(
        TrainingError, match=r'so it cannot train with share = "trained"; expected a job without \[pool'
    ):
        server.train(alone, shared, shared.learner.initial(0), divided)
    found: list[dict[str, float]] = []
    for trainer, model, stated in zip((whole, shared), models, ("", base), strict=True):
        server.train(alone, trainer, model, dataclasses.replace(run, pins=Pins(base_sha256=stated)))
        found.append(server.evaluate(alone, trainer, model, pins=Pins(base_sha256=stated)))
    for name in models[1]:
        np.testing.assert_array_equal(models[1][name], models[0][name])
    assert found[1].pop("perplexity") == pytest.approx(math.exp(found[0]["loss"]), rel=1e-6)
    assert found[1] == found[0]


class Words:
    """A tokenizer, as far as its digest is concerned."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self._words)}


def test_a_trainer_has_the_tokenizer_that_the_job_states(alone: Ranks) -> None:
    def refuse_model() -> nn.Module:
        raise AssertionError("a model was made")

    one, other = Words("a", "b"), Words("b", "a")
    digests = [tokenizer_sha256(each) for each in (one, other)]
    plain = ServerTrainer(model=refuse_model, data=scenarios.examples(8), evaluation=scenarios.examples(8))
    named = dataclasses.replace(plain, tokenizer=one)
    model = Learner(model=scenarios.mlp).initial(0)
    for trainer, stated, message in (
        (named, digests[1], f"the tokenizer here has the SHA-256 {digests[0]}; expected the same tokenizer on all"),
        (named, "", "the job does not state the tokenizer that its model is for; expected tokenizer_sha256 in its"),
        (plain, digests[0], "the trainer here does not name the tokenizer of its data; expected one with tokenizer="),
    ):
        pins = Pins(tokenizer_sha256=stated)
        for parallel in (None, Parallel()):  # also where ranks divide the model
            work = TrainingRun(options=scenarios.warm(), num_ranks=1, parallel=parallel, pins=pins)
            with pytest.raises(TrainingError, match=message):
                server.train(alone, trainer, model, work)
            with pytest.raises(TrainingError, match=message):
                server.evaluate(alone, trainer, model, parallel=parallel, pins=pins)
    pins = Pins(tokenizer_sha256=digests[0])
    usable = dataclasses.replace(named, model=scenarios.mlp)
    assert server.train(alone, usable, model, TrainingRun(options=scenarios.warm(), num_ranks=1, pins=pins)) is not None
    assert server.evaluate(alone, usable, model, pins=pins)["loss"] > 0.0


def test_a_trainer_that_cannot_be_used_gives_a_reason(alone: Ranks) -> None:
    def learned(trainer: ServerTrainer, num_ranks: int = 1) -> None:
        scenarios.learned(alone, trainer, TrainingRun(options=scenarios.warm(), num_ranks=num_ranks))

    with pytest.raises(TrainingError, match="the dataset is empty"):
        learned(ServerTrainer(model=scenarios.mlp, data=lambda: scenarios.examples(0)))
    with pytest.raises(TrainingError, match="BatchNorm cannot be trained on a single example; expected at least 128"):
        learned(ServerTrainer(model=scenarios.norm_net, data=scenarios.examples), 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["norm", "halves", "scored"])
def test_gpus_compute_the_same_as_a_cpu(of_one: Found, of_gpus: Found, name: str) -> None:
    on_cpu, on_gpus = of_one(name), of_gpus(name)
    for key, expected in on_cpu.items():
        np.testing.assert_allclose(on_gpus[key], expected, rtol=1e-3, atol=1e-4, err_msg=key)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpus_learn_in_bf16_and_from_teachers(of_gpus: Found) -> None:
    for name in ("rich", "bf16", "distilled"):
        losses = of_gpus(name)["losses"]
        assert np.isfinite(losses).all()
