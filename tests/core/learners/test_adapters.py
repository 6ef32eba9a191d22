"""Adapters under the algorithms of local training, example-level privacy, secure aggregation, and with bad input."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
import torch
from torch import nn

from fedplat.client_state import ClientState
from fedplat.errors import ModelError
from fedplat.pytorch import dp
from fedplat.pytorch.huggingface import HuggingFaceLearner
from fedplat.pytorch.training import Learner, LocalOptions, LocalTraining, TensorExamples, Trainee, train
from fedplat.simulation import Federation, Run, simulate
from fedplat.simulation.scenario.file import parse
from support import language
from support.jobs import write_job

pytestmark = pytest.mark.slow  # the imports alone take 10 seconds
CLIPPING: Any = importlib.import_module("fedplat.pytorch.dp.clipping")
TOKENS = torch.from_numpy(np.random.default_rng(2).integers(0, language.NUM_TOKENS, (16, 9)))
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]
PRIVATE: dict[str, Any] = {"dp_noise_multiplier": 1e-9, "dp_max_grad_norm": 1e3, "dp_delta": 1e-5}


class Logits(nn.Module):
    """A language model with logits [batch, tokens, time], as the cross entropy takes them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens).logits.transpose(1, 2)


def make_both() -> Any:
    """Adapters whose factor B is not zero, so that both factors have gradients."""
    model = language.make_adapted()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.02)
    return model


def make_ffa() -> Any:
    """FFA-LoRA: A is part of the base."""
    model = language.make_adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    return model


def learner_of(make: Any = make_both, share: Any = "trained") -> Learner:
    return Learner(model=lambda: Logits(make()), share=share)


def work(config: dict[str, Any], rows: slice = slice(None)) -> LocalTraining:
    options = LocalOptions.from_config({"epochs": 1, "batch_size": 0, "learning_rate": 0.5} | config)
    return LocalTraining(
        examples=TensorExamples(INPUTS[rows], TARGETS[rows]),
        options=options,
        seed=1,
        noise_seed=1,
        client_state=ClientState(),
    )


@pytest.mark.parametrize("kind", ["flat", "ghost"])
def test_unclipped_gradients_of_examples_are_those_of_a_loop(kind: dp.Clipping) -> None:
    trainee = Trainee(learner_of())
    loss, module, expected = trainee.learner.loss, trainee.module, trainee.parameters()
    sums = {name: torch.zeros_like(value) for name, value in expected.items()}
    for row in range(4):
        loss(module(INPUTS[row : row + 1]), TARGETS[row : row + 1]).backward()
        for name, value in expected.items():
            assert value.grad is not None
            sums[name] += value.grad
            value.grad = None
    with dp.clipping(module, loss, kind, 1e9) as clipper:
        clipper.add(INPUTS[:4], TARGETS[:4])
        found = clipper.take()
    for (name, total), value in zip(sums.items(), found, strict=True):
        assert total.abs().max() > 1e-4, name
        torch.testing.assert_close(value, total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["flat", "per_layer", "ghost"])
def test_private_adapters_move_and_reload(kind: str) -> None:
    learner = learner_of(language.make_adapted)  # B is zero, so A has no gradient in the first step
    start, results = learner.initial(), []
    for options in ({"dp": kind, **PRIVATE}, {}):
        model = start.copy()
        trainee = Trainee(learner)
        for _ in range(2):  # the draws of private steps are those of all examples with a batch of all
            train(trainee, model, work(options))
        results.append(model)
        assert all(np.any(model[name] != start[name]) for name in start)
    for name in start:
        np.testing.assert_allclose(results[0][name], results[1][name], atol=2e-6)
    again = Trainee(learner)
    again.load(results[0], ClientState())
    for name, value in again.shared_tensors().items():
        np.testing.assert_array_equal(value.numpy(), results[0][name])


@pytest.mark.parametrize("kind", ["flat", "ghost"])
def test_a_weight_without_gradients_of_examples_is_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in opacus issue 820, where adapters kept their values without a word."""
    trainee = Trainee(learner_of())
    name, lost = next(iter(trainee.parameters().items()))
    before = {name: value.clone() for name, value in trainee.module.state_dict().items()}
    if kind == "flat":
        sample = CLIPPING._sample

        def lose_gradients(module: Any, each: Any, count: int) -> Any:
            return sample(module, each, count) * (each is not lost)

        monkeypatch.setattr(CLIPPING, "_sample", lose_gradients)
    else:
        hooks = CLIPPING.GradSampleHooksFastGradientClipping
        compute = hooks.get_clipping_coef

        def lose(self: Any) -> Any:
            found = compute(self)
            lost._norm_sample = torch.zeros(len(INPUTS))  # type: ignore[attr-defined]
            return found

        monkeypatch.setattr(hooks, "get_clipping_coef", lose)
    with pytest.raises(
        ModelError, match=f"the gradient of the parameter '{name}' is not zero, but Opacus computes zer"
    ):
        train(trainee, trainee.learner.initial(), work({"dp": kind, **PRIVATE}))
    for name, value in trainee.module.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(("ffa", "lowest", "highest"), [(True, 3.8, 4.2), (False, 5.0, 7.5)])
def test_the_noise_of_the_effective_weight(ffa: bool, lowest: float, highest: float) -> None:
    """Twice the noise is four times its variance if A is frozen; else the noises of both factors are multiplied."""
    model = make_ffa() if ffa else language.make_adapted()
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    trained = [value for value in layer.parameters() if value.requires_grad]
    assert len(trained) == (1 if ffa else 2)
    start, variances = [value.detach().clone() for value in trained], []
    for deviation in (0.05, 0.1):
        noise, squares = dp.make_noise(3), []
        for _ in range(200):
            with torch.no_grad():
                for value, first in zip(trained, start, strict=True):
                    value.copy_(noise.add_noise(first, deviation))
            squares.append(layer.get_delta_weight("default").detach().square().mean().item())  # B is zero: the mean is
        variances.append(np.mean(squares))
    assert lowest <= variances[1] / variances[0] <= highest


@pytest.mark.parametrize("share", ["trained", "all"])
def test_one_inner_step_of_diloco_is_a_step_on_all_batches(share: str) -> None:
    """DiLoCo with H = 1 and inner SGD (Douillard et al. 2023, arXiv 2311.08105)."""
    learner = learner_of(make_both if share == "trained" else language.make_llama, share)
    start = learner.initial()
    together, models = start.copy(), []
    train(Trainee(learner), together, work({}))
    for number in range(4):
        models.append(start.copy())
        train(Trainee(learner), models[-1], work({}, slice(4 * number, 4 * number + 4)))
    for name in start:
        mean = np.mean([each[name].astype(np.float64) for each in models], axis=0)
        np.testing.assert_allclose(mean, together[name], atol=3e-6)
    assert any(np.abs(together[name] - start[name]).max() > 1e-3 for name in start)


def simulate_ffa(more: str, rounds: int = 1) -> Run:
    tokens, labels = language.Text(24, seed=4).arrays()
    parts = np.split(np.arange(24), 4)
    learner = HuggingFaceLearner(model=make_ffa, arguments={"per_device_train_batch_size": 3})
    text = write_job(
        rounds=rounds,
        config={"max_steps": 2, "learning_rate": 1e-2},
        selection={"goal": 4, "min_fraction": 1.0, "close": "deadline"},
        updates={"weighting": "uniform", "clip_norm": 5.0, "outlier_factor": 0.0, "max_weight_factor": 0.0},
        more=more + '[simulation]\nsecure_aggregation = "real"\n',
    )
    file = parse(text, Path(), ["simulation.engine=loop"])
    return simulate(file, data=Federation(tokens, labels, parts, tokens[:0], labels[:0]), learner=learner)


def test_secure_sums_of_ffa_adapters_are_exact_also_with_noise() -> None:
    start = HuggingFaceLearner(model=make_ffa).initial()
    plain, secure = simulate_ffa("").model, simulate_ffa("[secure_aggregation]\nbits = 24\n").model
    assert plain is not None
    assert secure is not None
    assert np.abs(plain.minus(start).to_vector()).max() > 1e-3
    step = 2 * 5.0 / (2**24 - 2)  # of a quantized entry
    assert np.abs(plain.minus(secure).to_vector()).max() <= step
    private = simulate_ffa(
        "[secure_aggregation]\n"
        '[privacy]\ntrust = "none"\nparticipation = "fixed"\nnoise_multiplier = 1.0\nmax_releases = 2\ndelta = 1e-5\n',
        rounds=2,
    )
    assert private.model is not None
    assert private.privacy is not None
    assert len(private.result.rounds) == 2
    assert np.std(private.model.to_vector()) > 0.0
