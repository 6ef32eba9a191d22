"""Example-level privacy: gradients of single examples, noise and accounting, beside a few lines of NumPy."""

from __future__ import annotations

import sys
from typing import Any

import dp_accounting
import numpy as np
import numpy.typing as npt
import pytest
import torch
from dp_accounting import rdp
from opacus.accountants import RDPAccountant
from torch import nn
from torch.utils.data import Dataset

from fedplat.aggregate import Scaffold
from fedplat.backends import private
from fedplat.backends.local import (
    DatasetExamples,
    Examples,
    Learner,
    LocalOptions,
    Loss,
    TensorExamples,
    Trainee,
    Training,
    evaluate,
    train,
)
from fedplat.errors import JobFileError, MissingExtraError, ModelError
from fedplat.memory import Memory
from fedplat.model import Parameters
from fedplat.privacy import steps
from fedplat.privacy.steps import StepCharge

Wide = npt.NDArray[np.float64]
KINDS = ("flat", "per_layer", "ghost")
RNG = np.random.default_rng(5)
INPUTS, TARGETS = RNG.normal(size=(11, 3)), RNG.normal(size=(11, 1))
START: dict[str, Wide] = {"weight": RNG.normal(size=(1, 3)), "bias": RNG.normal(size=1)}
PLAIN: dict[str, Any] = {"epochs": 3, "batch_size": 4, "learning_rate": 0.05}
QUIET: dict[str, Any] = {"dp": "flat", "dp_noise_multiplier": 1e-9, "dp_max_grad_norm": 1e3, "dp_delta": 1e-5}
"""Next to no noise, and nothing is clipped."""


def quiet(**more: Any) -> dict[str, Any]:
    return QUIET | more


LEARNER = Learner(model=lambda: nn.Linear(3, 1), loss=nn.functional.mse_loss)
TENSORS = (torch.tensor(INPUTS, dtype=torch.float32), torch.tensor(TARGETS, dtype=torch.float32))
EXAMPLES = TensorExamples(*TENSORS)


def start() -> Parameters:
    return Parameters.from_arrays({name: value.astype("f4") for name, value in START.items()})


def work(examples: Examples = EXAMPLES, memory: Memory | None = None, noise_seed: int = 7, **options: Any) -> Training:
    given = LocalOptions.from_config(PLAIN | options)
    return Training(
        examples=examples, options=given, seed=1, noise_seed=noise_seed, memory=Memory() if memory is None else memory
    )


def trained(training: Training, learner: Learner = LEARNER) -> tuple[dict[str, Wide], dict[str, float]]:
    parameters = start()
    metrics = train(Trainee(learner), parameters, training)
    return {name: value.astype(np.float64) for name, value in parameters.items()}, dict(metrics)


def reference(training: Training, drawn: list[npt.NDArray[np.int64]]) -> dict[str, Wide]:
    """w ← w - η v with v ← m v + Σ clipped gᵢ / E|batch| + decay w + pull (w - w₀); a step's examples are given."""
    options = training.options
    w, v = dict(START), {name: np.zeros_like(value) for name, value in START.items()}
    expected = min(len(INPUTS), options.batch_size * options.accumulate)
    for examples in drawn:
        total = {name: np.zeros_like(value) for name, value in START.items()}
        for x, y in zip(INPUTS[examples], TARGETS[examples], strict=True):
            slope = 2 * (x @ w["weight"].T + w["bias"] - y)
            g: dict[str, Wide] = {"weight": slope[:, None] * x[None], "bias": slope}
            norms = {name: float(np.linalg.norm(value)) for name, value in g.items()}
            whole = np.hypot(norms["weight"], norms["bias"])
            for name, value in g.items():
                norm, bound = (norms[name], 2**-0.5) if options.dp == "per_layer" else (whole, 1.0)
                total[name] = total[name] + value * min(1.0, bound * options.dp_max_grad_norm / norm)
        for name, now in w.items():
            slope = total[name] / expected + options.weight_decay * now + options.mu * (now - START[name])
            v[name] = options.momentum * v[name] + slope
            w[name] = now - options.learning_rate * v[name]
    return w


def draws(training: Training) -> list[npt.NDArray[np.int64]]:
    """The examples of each step, by the same randomness."""
    options, noise = training.options, private.noise_of(training.noise_seed)
    size = options.batch_size * options.accumulate
    num_steps = options.epochs * -(-len(INPUTS) // size)
    return [noise.drawn(len(INPUTS), min(1.0, size / len(INPUTS))) for _ in range(num_steps)]


def close(found: dict[str, Wide], expected: dict[str, Wide], atol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_and_clipping_it_is_the_plain_training(kind: str) -> None:
    plain = trained(work(batch_size=0, momentum=0.5))[0]
    close(trained(work(batch_size=0, momentum=0.5, **quiet(dp=kind)))[0], plain)


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
    train(Trainee(learner), parameters, Training(examples=examples, options=options, seed=0, noise_seed=0))
    noise = parameters.to_vector()
    assert np.std(noise) == pytest.approx(1.5 * 0.2 / 40, rel=0.03)
    assert abs(np.mean(noise)) < 4 * 1.5 * 0.2 / 40 / 100
    assert np.mean(np.abs(noise) > 2 * np.std(noise)) == pytest.approx(0.0455, abs=0.008)


def test_draws_are_independent_trials() -> None:
    noise = private.noise_of(3)
    counts = np.zeros(500)
    sizes = list[int]()
    for _ in range(400):
        drawn = noise.drawn(500, 0.1)
        counts[drawn] += 1
        sizes.append(len(drawn))
    assert np.mean(sizes) == pytest.approx(50, abs=1.5)
    assert np.var(sizes) == pytest.approx(45, rel=0.25)
    assert np.var(counts) == pytest.approx(36, rel=0.25)


def test_the_operating_systems_randomness_is_never_the_same() -> None:
    options = LocalOptions.from_config(PLAIN | QUIET | {"dp_noise_multiplier": 1.0, "dp_max_grad_norm": 1.0})
    seeded, free = work(**quiet(dp_noise_multiplier=1.0)), Training(examples=EXAMPLES, options=options, seed=1)
    assert trained(free)[0]["bias"] != trained(free)[0]["bias"]
    assert trained(seeded)[0]["bias"] == trained(work(**quiet(dp_noise_multiplier=1.0)))[0]["bias"]


def test_epsilon_is_that_of_all_rounds() -> None:
    """By Opacus' accountant, step by step, and near to that of dp-accounting."""
    memory, options = Memory(), quiet(dp_noise_multiplier=1.1, dp_max_grad_norm=1.0, epochs=4)
    ours, theirs, event = list[float](), RDPAccountant(), rdp.RdpAccountant()
    for number in range(1, 4):
        metrics = trained(work(memory=Memory(memory.contents) if number > 1 else memory, **options))[1]
        if number > 1:
            memory = Memory(_noted(number * 12).contents)
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


def _noted(num_steps: int) -> Memory:
    memory = Memory()
    private.NotedLedger(memory).charge(StepCharge(1.1, 4 / 11, num_steps))
    return memory


def test_steps_that_were_not_made_are_taken_back() -> None:
    memory = Memory()
    options = LocalOptions.from_config(PLAIN | QUIET | {"dp_noise_multiplier": 1.0})
    metrics = train(
        Trainee(LEARNER),
        start(),
        Training(
            examples=EXAMPLES,
            options=options,
            seed=0,
            memory=memory,
            after_step=lambda done, total: done < 2 < total,
        ),
    )
    assert (metrics["local_steps"], metrics["private_steps"]) == (2, 2)
    assert metrics["epsilon"] == pytest.approx(private.epsilon([StepCharge(1.0, 4 / 11, 2)], 1e-5))


def test_charges_add_up_and_cannot_be_taken_back_twice() -> None:
    one, other = StepCharge(1.0, 0.1, 3), StepCharge(2.0, 0.1, 3)
    assert steps.added([one, other], one) == [StepCharge(1.0, 0.1, 6), other]
    assert steps.taken_back([one, other], one) == [other]
    with pytest.raises(ValueError, match="4 steps cannot be taken back"):
        steps.taken_back([one], StepCharge(1.0, 0.1, 4))
    assert private.epsilon([], 1e-5) == 0.0


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return TENSORS[0][index], TENSORS[1][index]


def test_any_dataset_may_have_steps_without_examples() -> None:
    read = work(DatasetExamples(Rows(), torch.device("cpu")), **quiet(batch_size=1))
    close(trained(read)[0], trained(work(**quiet(batch_size=1)))[0], atol=0)


def looking(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that no `vmap` can do, and that is a sum rather than a mean."""
    assert outputs.sum().item() != 0
    return (outputs - targets).square().sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", [nn.functional.mse_loss, looking])
def test_an_example_whose_gradient_is_not_finite_counts_as_zero(kind: str, loss: Loss) -> None:
    inputs, targets = TENSORS[0].clone(), TENSORS[1]
    inputs[3] = float("nan")
    inputs[5] = float("inf")
    options = quiet(epochs=1, dp=kind, dp_max_grad_norm=0.5)
    learner = Learner(model=LEARNER.model, loss=loss)
    training = work(TensorExamples(inputs, targets), batch_size=0, **options)
    rest = np.delete(np.arange(11), [3, 5])
    close(trained(training, learner)[0], reference(work(batch_size=11, **options), [rest]))


def normed(affine: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 12), nn.BatchNorm1d(12, affine=affine), nn.Linear(12, 1))


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_refused_with_opacus_reason_and_the_fix(affine: bool) -> None:
    learner, memory = Learner(model=lambda: normed(affine), loss=nn.functional.mse_loss), Memory()
    with pytest.raises(ModelError) as caught:
        train(Trainee(learner), learner.initial(), work(memory=memory, **QUIET))
    said = str(caught.value)
    assert said.startswith(
        "the model cannot be trained with example-level privacy: its layer '1' is BatchNorm1d; put GroupNorm(4, 12, "
    )
    assert "there, as opacus.validators.ModuleValidator.fix(module) does. Opacus says: BatchNorm cannot support" in said
    assert said.endswith("depending on who else is on its batch.")
    assert len(said) < 500 - len("ModelError: ")  # a server is told no more
    assert not memory.changed


def test_a_layer_with_values_of_its_own_is_refused() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.register_buffer("seen", torch.zeros(()))

    learner = Learner(model=Counting, loss=nn.functional.mse_loss)
    with pytest.raises(ModelError, match=r"Opacus says: Model contains a trainable layer with buffers.*Counting"):
        train(Trainee(learner), learner.initial(), work(**QUIET))


class Watching(nn.Module):
    """Keeps what it has seen, and has a parameter that may be of no use."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(3, 1), nn.Linear(1, 1) if unused else nn.Identity()
        self.watch = nn.Module()
        self.watch.register_buffer("last", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.watch.last.copy_(inputs.detach().mean(0))  # type: ignore[operator]
        return self.linear(inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_trained_stays_as_it_was_given(kind: str) -> None:
    learner = Learner(model=Watching, loss=nn.functional.mse_loss)
    parameters = learner.initial()
    train(Trainee(learner), parameters, work(**quiet(dp=kind)))
    assert not parameters["watch.last"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_a_gradient_is_named_and_costs_nothing(kind: str) -> None:
    learner, memory = Learner(model=lambda: Watching(unused=True), loss=nn.functional.mse_loss), Memory()
    with pytest.raises(ModelError, match="has no gradient of single examples"):
        train(Trainee(learner), learner.initial(), work(memory=memory, **quiet(dp=kind)))
    assert private.NotedLedger(memory).settle(StepCharge(1.0, 1.0, 0), 0) == []


class Scaled(nn.Module):
    """A layer that Opacus does not know, with a parameter of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 1), nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * self.linear(inputs).tanh()


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_ones_own_are_trained_as_without_privacy(kind: str) -> None:
    learner = Learner(model=Scaled, loss=nn.functional.mse_loss)
    plain, found = learner.initial(), learner.initial()
    train(Trainee(learner), plain, work(batch_size=0))
    train(Trainee(learner), found, work(batch_size=0, **quiet(dp=kind)))
    close(dict(found), dict(plain))
    assert found["scale"] != 2.0


class Folded(nn.Module):
    """Two examples' worth of rows for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cat([inputs, inputs])).view(2, -1, 1).mean(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_moves_examples_out_of_the_first_dimension_is_refused(kind: str) -> None:
    learner = Learner(model=Folded, loss=nn.functional.mse_loss)
    with pytest.raises(ModelError, match="has 22 gradients for a batch of 11 examples; expected layers that keep"):
        train(Trainee(learner), learner.initial(), work(batch_size=0, **quiet(dp=kind)))


def one_each(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that is not reduced."""
    return (outputs - targets).square()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_without_a_mean_is_clipped_as_well(kind: str) -> None:
    training = work(**quiet(dp=kind, dp_max_grad_norm=0.5))
    learner = Learner(model=LEARNER.model, loss=one_each)
    close(trained(training, learner)[0], reference(training, draws(training)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_module_is_as_it_was_afterwards(kind: str) -> None:
    trainee, before = Trainee(LEARNER), trained(work())[0]

    def stop(done: int, total: int) -> bool:
        raise KeyboardInterrupt

    options = LocalOptions.from_config(PLAIN | QUIET | {"dp": kind})
    with pytest.raises(KeyboardInterrupt):
        train(trainee, start(), Training(examples=EXAMPLES, options=options, seed=1, after_step=stop))
    parameters = start()
    assert evaluate(trainee, parameters, EXAMPLES)["loss"] > 0
    train(trainee, parameters, work())
    close(dict(parameters), before, atol=0)
    assert {"grad_sample", "summed_grad", "activations"}.isdisjoint(vars(trainee.module) | vars(trainee.module.weight))


def test_scaffold_and_feddyn_remember_noised_gradients_alone() -> None:
    """Their notes follow from the way that the weights went."""
    memory = Memory()
    trained(work(memory=memory, **quiet(algorithm="feddyn", alpha=0.5, dp_noise_multiplier=1e-3)))
    assert memory.get("feddyn") is not None
    model = Scaffold(num_clients=2).build().counterpart.extend(start())
    memory = Memory()
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
        ({"dp": "flat"}, 'dp_noise_multiplier = 0: expected a number above 0 with dp = "flat"'),
        (QUIET | {"dp_delta": 0.0}, "dp_delta = 0: expected a number above 0"),
        ({"dp_noise_multiplier": 1.0}, 'dp_noise_multiplier = 1: expected it with dp = "flat", "per_layer" or "ghost"'),
        (QUIET | {"max_grad_norm": 1.0}, "max_grad_norm = 1: expected dp_max_grad_norm alone"),
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
    for name in [name for name in sys.modules if name.startswith(("fedplat.backends.private", "opacus"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "fedplat.backends.local.private", raising=False)
    monkeypatch.delattr("fedplat.backends.private")
    monkeypatch.delattr("fedplat.backends.local.private", raising=False)
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fedplat\[opacus\]', on a client: pip install"):
        trained(work(**QUIET))
