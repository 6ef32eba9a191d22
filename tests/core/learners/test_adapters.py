"""Adapters under the algorithms of local training, example-level privacy, secure aggregation, and with bad input."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
import torch
import transformers
from torch import nn

from fedplat.client_state import ClientState
from fedplat.errors import ModelError
from fedplat.learner import Round
from fedplat.model import Parameters
from fedplat.model.turns import Turn
from fedplat.pytorch import dp
from fedplat.pytorch.huggingface import HuggingFaceLearner
from fedplat.pytorch.training import Learner, LocalOptions, LocalTraining, TensorExamples, Trainee, train
from fedplat.simulation import Federation, Run, simulate
from fedplat.simulation.federated.training import training_seed
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


def make_tied() -> Any:
    config = language.make_llama().config
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def test_diloco_of_a_model_with_tied_weights_is_that_of_torch() -> None:
    """Each worker's AdamW continues, and SGD with Nesterov's momentum takes the mean movement as its gradient."""
    num_workers, num_rounds, num_steps, rate = 4, 4, 3, 1e-3
    inner: dict[str, Any] = {"optimizer": "adamw", "learning_rate": rate, "weight_decay": 0.1, "keep_optimizer": True}
    text = write_job(
        rounds=num_rounds,
        config={"epochs": 1, "max_steps": num_steps, "batch_size": 0, **inner},
        selection={"goal": num_workers, "min_fraction": 1.0},
        updates={"weighting": "uniform"},
        aggregation={"rule": "fedavgm", "learning_rate": 0.7, "momentum": 0.9, "nesterov": True},
    )
    parts = np.split(np.arange(16), num_workers)
    inputs, targets = INPUTS.numpy(), TARGETS.numpy()
    data = Federation(inputs, targets, parts, inputs[:0], targets[:0])
    found = simulate(parse(text, Path(), ["simulation.engine=loop"]), data=data, learner=learner_of(make_tied, "all"))
    assert found.model is not None
    outer, *workers = [Logits(make_tied()) for _ in range(num_workers + 1)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=rate, weight_decay=0.1) for each in workers]
    following = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    first = {name: value.clone() for name, value in outer.state_dict().items()}
    for _ in range(num_rounds):
        for worker, optimizer, rows in zip(workers, optimizers, parts, strict=True):
            worker.load_state_dict(outer.state_dict())
            for _ in range(num_steps):
                optimizer.zero_grad()
                nn.functional.cross_entropy(worker(INPUTS[rows]), TARGETS[rows]).backward()
                optimizer.step()
        for value, *trained in zip(outer.parameters(), *(each.parameters() for each in workers), strict=True):
            value.grad = value.detach() - torch.stack([each.detach() for each in trained]).mean(0)
        following.step()
    for name, value in outer.state_dict().items():
        if name in found.model:
            np.testing.assert_allclose(found.model[name], value.numpy(), atol=3e-6)
            assert (value - first[name]).abs().max() > 5 * rate
    assert "model.lm_head.weight" not in found.model  # the tied weights are there once


PARTS = np.split(np.arange(24), 4)
CONFIG = {"max_steps": 2, "learning_rate": 1e-2}
CLIP = 5.0


def simulate_adapters(learner: HuggingFaceLearner, more: str, rounds: int, clip: float = CLIP, **config: Any) -> Run:
    tokens, labels = language.Text(24, seed=4).arrays()
    text = write_job(
        rounds=rounds,
        config={**CONFIG, **config},
        selection={"goal": 4, "min_fraction": 1.0, "close": "deadline"},
        updates={"weighting": "uniform", "clip_norm": clip, "outlier_factor": 0.0, "max_weight_factor": 0.0},
        more=more + '[simulation]\nsecure_aggregation = "real"\n',
    )
    file = parse(text, Path(), ["simulation.engine=loop"])
    return simulate(file, data=Federation(tokens, labels, PARTS, tokens[:0], labels[:0]), learner=learner)


def make_learner(make: Callable[[], Any]) -> HuggingFaceLearner:
    return HuggingFaceLearner(model=make, arguments={"per_device_train_batch_size": 3})


def simulate_ffa(more: str, rounds: int = 1) -> Run:
    return simulate_adapters(make_learner(make_ffa), more, rounds)


def test_secure_sums_of_ffa_adapters_are_exact_also_with_noise() -> None:
    start = HuggingFaceLearner(model=make_ffa).initial()
    plain, secure = simulate_ffa("").model, simulate_ffa("[secure_aggregation]\nbits = 24\n").model
    assert plain is not None
    assert secure is not None
    assert np.abs(plain.minus(start).to_vector()).max() > 1e-3
    step = 2 * CLIP / (2**24 - 2)  # of a quantized entry
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


PRIVATE_TABLE = (
    '[privacy]\ntrust = "{}"\nparticipation = "fixed"\nnoise_multiplier = {}\nmax_releases = 2\ndelta = 1e-5\n'
)


def test_a_factor_that_rests_is_neither_sent_nor_moved_in_a_simulation() -> None:
    """RoLoRA, plain, masked, and with the noise of the clients: the bytes of B, then of A, as the reference says."""
    learner, alternate = make_learner(make_both), "*lora_B*, *lora_A*"
    start, states = learner.initial(), [ClientState() for _ in PARTS]
    sizes = [Turn.of(alternate, number).select_uploaded(start.schema).file_size_bytes for number in (1, 2)]
    assert sizes != [start.schema.file_size_bytes] * 2
    first, second = (simulate_adapters(learner, "", rounds, alternate=alternate) for rounds in (1, 2))
    assert [each.bytes_up for each in second.result.rounds] == [4.0 * size for size in sizes]
    assert first.model is not None
    assert second.model is not None
    for name in start:
        assert np.array_equal(start[name], first.model[name]) == ("lora_A" in name)
        assert np.array_equal(first.model[name], second.model[name]) == ("lora_B" in name)
    mean = np.mean([update.to_vector() for update in train_all(learner, start, states, alternate=alternate)], axis=0)
    np.testing.assert_allclose(first.model.minus(start).to_vector(), mean, rtol=0, atol=1e-6)
    secure = simulate_adapters(learner, "[secure_aggregation]\nbits = 24\n", 2, alternate=alternate).model
    assert secure is not None
    assert np.abs(second.model.minus(secure).to_vector()).max() <= 1e-4  # the second round trains from other values
    table = "[secure_aggregation]\n" + PRIVATE_TABLE.format("none", 1.0)
    private = simulate_adapters(learner, table, 1, alternate=alternate).model
    assert private is not None
    for name in start:
        assert np.array_equal(start[name], private[name]) == ("lora_A" in name)


def train_all(
    learner: HuggingFaceLearner, start: Parameters, states: Sequence[ClientState], **config: Any
) -> list[Parameters]:
    """Return the updates of all clients in the first round of a simulation."""
    updates: list[Parameters] = []
    for client, (rows, state) in enumerate(zip(PARTS, states, strict=True)):
        data, trained = tuple(each[rows] for each in language.Text(24, seed=4).arrays()), start.copy()
        this = Round(number=1, num_rounds=1, seed=training_seed(0, client, 1), client_state=state)
        learner.train_round(trained, data, {**CONFIG, **config}, this)
        updates.append(trained.minus(start))
    return updates


def test_the_server_adds_noise_to_the_clipped_sum_of_adapters() -> None:
    """Central privacy: (Σ clipped updates + N(0, (z C)²)) / goal (McMahan et al. 2018, arXiv 1710.06963)."""
    learner, clip = make_learner(make_ffa), 0.02
    start = learner.initial()
    updates = [each.to_vector().astype(float) for each in train_all(learner, start, [ClientState() for _ in PARTS])]
    norms = [np.linalg.norm(each) for each in updates]
    assert min(norms) > clip  # all are clipped
    mean = sum(each * clip / norm for each, norm in zip(updates, norms, strict=True)) / 4
    models = [simulate_adapters(learner, PRIVATE_TABLE.format("server", z), 1, clip) for z in (1e-6, 2.0)]
    exact, noised = (each.model for each in models)
    assert exact is not None
    assert noised is not None
    np.testing.assert_allclose(exact.minus(start).to_vector(), mean, rtol=0, atol=1e-5 * clip)
    noise = (noised.minus(start).to_vector() - mean) * 4 / (2.0 * clip)
    assert abs(noise.mean()) < 4 / noise.size**0.5
    assert abs(noise.std() - 1) < 4 / (2 * noise.size) ** 0.5
    cost = models[1].privacy
    assert cost is not None
    # The delta of a Gaussian release (Balle and Wang 2018, arXiv 1805.06530, Theorem 8), with μ = 1 / z.
    cdf, epsilon, mu = NormalDist().cdf, cost.epsilon, 1 / 2.0
    delta = cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)
    assert (cost.releases, delta) == (1, pytest.approx(1e-5, rel=0.02))
