"""Example-level privacy: gradients of single examples, noise and accounting, beside a few lines of NumPy."""

from __future__ import annotations

import sys
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import rdp
from opacus.accountants import RDPAccountant
from torch import nn

from fedplat.aggregate import Scaffold
from fedplat.client_state import ClientState
from fedplat.errors import JobFileError, MissingExtraError
from fedplat.model import Parameters
from fedplat.privacy import steps
from fedplat.privacy.steps import StepCharge
from fedplat.pytorch import dp
from fedplat.pytorch.training import Learner, LocalOptions, LocalTraining, TensorExamples, Trainee, train
from support.private_cases import (
    EXAMPLES,
    KINDS,
    LEARNER,
    PLAIN,
    QUIET,
    close,
    draws,
    quiet,
    reference,
    start,
    trained,
    work,
)


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_and_clipping_it_is_the_plain_training(kind: str) -> None:
    plain = trained(work(batch_size=0, momentum=0.5))[0]
    close(trained(work(batch_size=0, momentum=0.5, **quiet(dp=kind)))[0], plain)


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_without_a_finite_gradient_counts_as_none(kind: dp.Clipping) -> None:
    torch.manual_seed(1)
    module, inputs, targets = nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)
    sums: list[list[torch.Tensor]] = []
    for rows in ([0, 1, 3], [0, 1, 2, 3]):
        inputs[2] = torch.inf
        with dp.clipping(module, nn.functional.mse_loss, kind, 0.5) as clipper:
            clipper.add(inputs[rows], targets[rows])
            sums.append([each.clone() for each in clipper.take()])
    assert all(each.abs().sum() > 0.0 for each in sums[0])
    for without, with_it in zip(*sums, strict=True):
        torch.testing.assert_close(with_it, without)


def test_no_number_of_the_noise_is_used_twice() -> None:
    whole = dp.make_noise(3).add_noise(torch.zeros(10), 2.0)
    noise = dp.make_noise(3)
    parts = [noise.add_noise(torch.zeros(size), 2.0) for size in (4, 6)]
    assert torch.cat(parts).equal(whole)
    assert len(set(whole.tolist())) == 10


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dp_max_grad_norm": 0.5},
        {"dp_max_grad_norm": 2.0, "batch_size": 1},  # some steps have no example
        {"dp_max_grad_norm": 0.5, "accumulate": 2},
        {"dp_max_grad_norm": 0.5, "momentum": 0.9, "weight_decay": 0.1, "algorithm": "fedprox", "mu": 0.3},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_the_formula(kind: str, options: dict[str, Any]) -> None:
    training = work(**quiet(**options | {"dp": kind}))
    drawn = draws(training)
    if training.options.batch_size == 1:
        assert min(map(len, drawn)) == 0 < max(map(len, drawn))
    close(trained(training)[0], reference(training, drawn))


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_is_the_multiplier_times_the_norm_over_the_expected_examples(kind: str) -> None:
    """One step of gradients that are zero; the weights are numbers of the noise alone."""
    learner = Learner(model=lambda: nn.Linear(100, 100), loss=nn.functional.mse_loss)
    examples = TensorExamples(torch.zeros(40, 100), torch.zeros(40, 100))
    config = {"epochs": 1, "batch_size": 0, "learning_rate": 1.0, "dp": kind, "dp_noise_multiplier": 1.5}
    options = LocalOptions.from_config(config | {"dp_max_grad_norm": 0.2, "dp_delta": 1e-5})
    parameters = Parameters.from_arrays({"weight": np.zeros((100, 100), "f4"), "bias": np.zeros(100, "f4")})
    train(Trainee(learner), parameters, LocalTraining(examples=examples, options=options, seed=0, noise_seed=0))
    noise = parameters.to_vector()
    assert np.std(noise) == pytest.approx(1.5 * 0.2 / 40, rel=0.03)
    assert abs(np.mean(noise)) < 4 * 1.5 * 0.2 / 40 / 100
    assert np.mean(np.abs(noise) > 2 * np.std(noise)) == pytest.approx(0.0455, abs=0.008)


def test_draws_are_independent_trials() -> None:
    noise = dp.make_noise(3)
    counts = np.zeros(500)
    sizes = list[int]()
    for _ in range(400):
        drawn = noise.draw_examples(500, 0.1)
        counts[drawn] += 1
        sizes.append(len(drawn))
    assert np.mean(sizes) == pytest.approx(50, abs=1.5)
    assert np.var(sizes) == pytest.approx(45, rel=0.25)
    assert np.var(counts) == pytest.approx(36, rel=0.25)


def test_the_operating_systems_randomness_is_never_the_same() -> None:
    options = LocalOptions.from_config(PLAIN | QUIET | {"dp_noise_multiplier": 1.0, "dp_max_grad_norm": 1.0})
    seeded, free = work(**quiet(dp_noise_multiplier=1.0)), LocalTraining(examples=EXAMPLES, options=options, seed=1)
    assert trained(free)[0]["bias"] != trained(free)[0]["bias"]
    assert trained(seeded)[0]["bias"] == trained(work(**quiet(dp_noise_multiplier=1.0)))[0]["bias"]


def test_epsilon_is_that_of_all_rounds() -> None:
    """By Opacus' accountant, step by step, and near to that of dp-accounting."""
    memory, options = ClientState(), quiet(dp_noise_multiplier=1.1, dp_max_grad_norm=1.0, epochs=4)
    ours, theirs, event = list[float](), RDPAccountant(), rdp.RdpAccountant()
    for number in range(1, 4):
        metrics = trained(work(memory=ClientState(memory.contents) if number > 1 else memory, **options))[1]
        if number > 1:
            memory = ClientState(_noted(number * 12).contents)
        ours.append(metrics["epsilon"])
        assert metrics == {
            "epsilon": ours[-1],
            "noise_multiplier": 1.1,
            "private_steps": 12.0 * number,
            "local_steps": 12.0,
        }
    for _ in range(36):
        theirs.step(noise_multiplier=1.1, sample_rate=4 / 11)
    event.compose(dp_accounting.PoissonSampledDpEvent(4 / 11, dp_accounting.GaussianDpEvent(1.1)), 36)
    assert ours == sorted(ours)
    assert ours[-1] == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-9)
    assert ours[-1] == pytest.approx(event.get_epsilon(1e-5), rel=0.01)


def _noted(num_steps: int) -> ClientState:
    memory = ClientState()
    dp.RecordedLedger(memory).charge(StepCharge(1.1, 4 / 11, num_steps))
    return memory


def test_steps_that_were_not_made_are_taken_back() -> None:
    memory = ClientState()
    options = LocalOptions.from_config(PLAIN | QUIET | {"dp_noise_multiplier": 1.0})
    metrics = train(
        Trainee(LEARNER),
        start(),
        LocalTraining(
            examples=EXAMPLES,
            options=options,
            seed=0,
            client_state=memory,
            after_step=lambda done, total: done < 2 < total,
        ),
    )
    assert (metrics["local_steps"], metrics["private_steps"]) == (2, 2)
    assert metrics["epsilon"] == pytest.approx(dp.epsilon([StepCharge(1.0, 4 / 11, 2)], 1e-5))


def test_charges_add_up_and_cannot_be_taken_back_twice() -> None:
    one, other = StepCharge(1.0, 0.1, 3), StepCharge(2.0, 0.1, 3)
    assert steps.merge_charges([one, other], one) == [StepCharge(1.0, 0.1, 6), other]
    assert steps.drop_charges([one, other], one) == [other]
    with pytest.raises(ValueError, match="4 steps cannot be subtracted"):
        steps.drop_charges([one], StepCharge(1.0, 0.1, 4))
    assert dp.epsilon([], 1e-5) == 0.0


def test_scaffold_and_feddyn_remember_noised_gradients_alone() -> None:
    """Their notes follow from the way that the weights went."""
    memory = ClientState()
    trained(work(memory=memory, **quiet(algorithm="feddyn", alpha=0.5, dp_noise_multiplier=1e-3)))
    assert memory.get("feddyn") is not None
    model = Scaffold(num_clients=2).build().requirements.extend(start())
    memory = ClientState()
    options = quiet(algorithm="scaffold", dp_noise_multiplier=1e-3)
    training, before = work(memory=memory, **options), start()
    train(Trainee(LEARNER), model, training)
    note = memory.get("scaffold")
    assert note is not None
    way = (before["weight"] - model["weight"]) / (9 * 0.05)
    np.testing.assert_allclose(note["weight"], way, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp": "flat"}, 'dp_noise_multiplier = 0: .* with dp = "flat"; dp_max_grad_norm and dp_delta too'),
        (QUIET | {"dp_delta": 0.0}, "dp_delta = 0: expected a number above 0"),
        ({"dp_noise_multiplier": 1.0}, 'dp_noise_multiplier = 1: expected it with dp = "flat", "per_layer" or "ghost"'),
        (QUIET | {"max_grad_norm": 1.0}, "max_grad_norm = 1: expected only dp_max_grad_norm"),
        (QUIET | {"precision": "bf16"}, 'precision = "bf16": expected "fp32" with dp = "flat"'),
        (QUIET | {"measure_before": True}, 'measure_before = true: expected false with dp = "flat"'),
        (QUIET | {"dp": "gost"}, "config.dp = 'gost': expected one of none, flat, per_layer, ghost"),
        (QUIET | {"dp_delta": 1.0}, "config.dp_delta = 1"),
    ],
)
def test_options_that_do_not_go_together_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        LocalOptions.from_config(PLAIN | options)


def test_without_opacus_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("fedplat.pytorch.dp", "opacus"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "fedplat.pytorch.training.dp_sgd", raising=False)
    monkeypatch.delattr("fedplat.pytorch.dp")
    monkeypatch.delattr("fedplat.pytorch.training.dp_sgd", raising=False)
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*'opacus>="):
        trained(work(**QUIET))
