"""Local algorithms as plugins: what their loss and their offsets change, and how mistakes are named."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fedplat.aggregate import (
    Correction,
    LocalAlgorithm,
    LocalAlgorithmOptions,
    LocalEnding,
    LocalFedDyn,
    LocalFedProx,
    LocalScaffold,
    LocalSgd,
    LocalStart,
    LossContext,
)
from fedplat.client_state import ClientState
from fedplat.config.plugins import Plugins, name_of
from fedplat.errors import EngineError, JobFileError, PluginError, UserCodeError
from fedplat.model import Parameters
from fedplat.pytorch.training import (
    Learner,
    LocalOptions,
    LocalTraining,
    StepSchedule,
    TensorExamples,
    Trainee,
    forward_features,
    train,
)
from fedplat.simulation.api import simulate
from fedplat.simulation.engines.auto import AutoEngine
from fedplat.simulation.engines.client_trainer import VmapEngine
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.processes import LoopEngine, ProcessEngine
from support.simulation.layers import normed
from support.simulation.tasks import federation, rounds, two_layers
from support.simulation.tasks import task as make_task

Wide = npt.NDArray[np.float64]
RNG = np.random.default_rng(3)
INPUTS, TARGETS, START = RNG.normal(size=(11, 3)), RNG.normal(size=(11, 1)), RNG.normal(size=(1, 3))
LEARNER = Learner(model=lambda: nn.Linear(3, 1, bias=False), loss=nn.functional.mse_loss)
OPTIONS: dict[str, Any] = {"epochs": 2, "batch_size": 4, "learning_rate": 0.05}
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "plugins"


class Near(msgspec.Struct, frozen=True):
    """The loss also has half the squared distance to the received weights, by the module of the context."""

    strength: Annotated[float, msgspec.Meta(ge=0)] = 0.5

    def build(self) -> LocalAlgorithm:
        def make_loss(context: LossContext) -> Any:
            received = context.copy_module()
            assert not received.training
            assert context.read_targets().shape == (11, 1)

            def compute(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
                outputs = module(inputs)
                pairs = zip(module.parameters(), received.parameters(), strict=True)
                distance = sum((one - other).square().sum() for one, other in pairs)
                return context.loss(outputs, targets) + self.strength / 2 * distance, outputs

            return compute

        return LocalAlgorithm(make_loss=make_loss)


class Ascent(msgspec.Struct, frozen=True):
    """The gradient at w + rho g / ‖g‖."""

    rho: float = 0.3

    def build(self) -> LocalAlgorithm:
        def perturb(gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            return {name: self.rho * each / each.norm() for name, each in gradients.items()}

        return LocalAlgorithm(perturb=perturb)


PLUGINS = Plugins({("algorithms", "near"): Near, ("algorithms", "ascent"): Ascent})


def work(plugins: Plugins = PLUGINS, **options: Any) -> LocalTraining:
    examples = TensorExamples(*(torch.tensor(each, dtype=torch.float32) for each in (INPUTS, TARGETS)))
    return LocalTraining(examples=examples, options=LocalOptions.from_config(OPTIONS | options, plugins), seed=7)


def trained(training: LocalTraining) -> Wide:
    parameters = Parameters.from_arrays({"weight": START.astype(np.float32)})
    train(Trainee(LEARNER), parameters, training)
    return parameters["weight"].astype(np.float64)


def reference(training: LocalTraining, gradient: Callable[[Wide, Callable[[Wide], Wide]], Wide]) -> Wide:
    """w ← w - η gradient(w, g), where g(w) is the gradient of a step's mean squared error."""
    plan, w = StepSchedule(num_examples=11, options=training.options, seed=training.seed), START.copy()
    for step in plan.steps():
        x, y = INPUTS[step], TARGETS[step]

        def squared_error(at: Wide, x: Wide = x, y: Wide = y) -> Wide:
            return 2 * (x @ at.T - y).T @ x / len(x)

        w = w - training.learning_rate * gradient(w, squared_error)
    return w


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"batch_size": 0}])
def test_weights_equal_the_formula(changes: dict[str, Any]) -> None:
    near = work(algorithm="near", strength=0.7, **changes)
    expected = reference(near, lambda w, g: g(w) + 0.7 * (w - START))
    np.testing.assert_allclose(trained(near), expected, atol=2e-6)
    ascent = work(algorithm="ascent", rho=0.3, **changes)
    expected = reference(ascent, lambda w, g: g(w + 0.3 * g(w) / np.linalg.norm(g(w))))
    np.testing.assert_allclose(trained(ascent), expected, atol=2e-6)


def test_an_own_loss_of_the_same_terms_is_fedprox() -> None:
    assert (
        np.abs(trained(work(algorithm="near", strength=0.7)) - trained(work(algorithm="fedprox", mu=0.7))).max() < 1e-6
    )


def test_a_loss_may_use_the_weights_of_the_round_before() -> None:
    """As in MOON: end() remembers the trained weights, and the next training has them."""
    seen: list[dict[str, Any]] = []

    class Remembers(msgspec.Struct, frozen=True):
        def build(self) -> LocalAlgorithm:
            def make_loss(context: LossContext) -> Any:
                seen.append(dict(context.remembered))
                return loss(lambda value, outputs: (value, outputs))(context)

            return LocalAlgorithm(
                make_loss=make_loss, end=lambda correction, remembered, direction: LocalEnding(direction.weights)
            )

    training = work(Plugins({("algorithms", "personal"): Remembers}), algorithm="personal")
    weight = trained(training)
    assert training.client_state.contents.keys() == {"algorithm.Remembers"}
    trained(training)
    assert [list(each) for each in seen] == [[], ["weight"]]
    np.testing.assert_array_equal(seen[1]["weight"], weight)


def test_offsets_leave_buffers_as_one_pass_does() -> None:
    given = make_task(normed, sizes=(20, 12))
    models: list[Parameters] = []
    for algorithm in (LocalSgd(), Ascent(rho=0.0)):
        options = msgspec.structs.replace(given.options, algorithm=algorithm)
        inputs, targets = map(torch.from_numpy, given.federation.examples(0))
        model = given.learner.initial()
        training = LocalTraining(examples=TensorExamples(inputs, targets), options=options, seed=1)
        train(Trainee(given.learner), model, training)
        models.append(model)
    assert models[0] == models[1]


def test_features_are_the_inputs_of_a_layer() -> None:
    module, inputs = two_layers(), torch.randn(5, 1, 12, 12)
    outputs, features = forward_features(module, inputs)
    assert torch.equal(outputs, module(inputs))
    assert features.shape == (5, 20)
    assert torch.equal(forward_features(module, inputs, "1")[1], inputs.flatten(1))
    with pytest.raises(ValueError, match="Flatten has no linear layer; expected the name"):
        forward_features(nn.Flatten(), inputs)


class Epochs(msgspec.Struct, frozen=True):
    epochs: int = 1

    def build(self) -> LocalAlgorithm:
        return LocalAlgorithm()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"algorithm": "neer"},
            "config.algorithm = 'neer': expected one of sgd, fedprox, scaffold, feddyn, easgd, near, ascent",
        ),
        ({"algorithm": "neer"}, "did you mean near"),
        ({"algorithm": 3}, "config.algorithm = 3: expected one of sgd"),
        ({"algorithm": "near", "strength": -1.0}, "config.strength = -1.0: expected a number"),
        ({"algorithm": "near", "strength": "a", "momentum": 2.0}, "config.momentum = 2.0.*\nconfig.strength = 'a'"),
        ({"algorithm": "near", "mu": 0.5}, 'config.mu = 0.5: only the algorithm "fedprox" has it, and this is "near"'),
        ({"algorithm": "feddyn"}, "config.alpha: this key is required and missing"),
        ({"algorithm": "feddyn", "alpha": 0.0}, "config.alpha = 0.0: expected"),
        ({"algorithm": "epochs"}, "Epochs has a field epochs, which is an option of each local training"),
        ({"algorithm": "ascent", "precision": "fp16"}, 'config.precision = "fp16": expected "fp32" or "bf16" with'),
    ],
)
def test_mistakes_are_named_by_key(config: dict[str, Any], message: str) -> None:
    plugins = Plugins({**PLUGINS.given, ("algorithms", "epochs"): Epochs})
    with pytest.raises(JobFileError, match=message):
        LocalOptions.from_config(OPTIONS | config | {"another": "key"}, plugins)


@pytest.mark.parametrize(("name", "what"), [("near", "its own loss"), ("ascent", "gradients at other weights")])
def test_private_training_refuses_what_the_guarantee_does_not_cover(name: str, what: str) -> None:
    private = {"dp": "flat", "dp_noise_multiplier": 1.0, "dp_max_grad_norm": 1.0, "dp_delta": 1e-5}
    with pytest.raises(JobFileError, match=f'config.algorithm = "{name}": it has {what}, and the guarantee of dp'):
        LocalOptions.from_config({**OPTIONS, **private, "algorithm": name}, PLUGINS)


@pytest.mark.parametrize(
    ("algorithm", "name", "state"),
    [
        (LocalSgd(), "sgd", "sgd"),
        (LocalFedProx(mu=0.1), "fedprox", "fedprox"),
        (LocalScaffold(), "scaffold", "scaffold"),
        (LocalFedDyn(alpha=0.1), "feddyn", "feddyn"),
        (Ascent(), "Ascent", "algorithm.Ascent"),
    ],
)
def test_client_state_has_a_name_of_its_own(algorithm: LocalAlgorithmOptions, name: str, state: str) -> None:
    options = LocalOptions(epochs=1, batch_size=1, learning_rate=0.1, algorithm=algorithm)
    assert (options.algorithm_name, options.state_name) == (name, state)


def _raise(*arguments: object) -> Any:
    raise KeyError("weight")


def gives(value: object) -> Any:
    """Returns a function of anything that returns the value."""

    def give(*arguments: object) -> object:
        return value

    return give


def loss(value: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[LossContext], Any]:
    def make_loss(context: LossContext) -> Any:
        def compute(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
            outputs = module(inputs)
            return value(context.loss(outputs, targets), outputs)

        return compute

    return make_loss


NAN = float("nan")


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (LocalAlgorithm(_raise), r"begin\(\) raised KeyError: 'weight' \(.*, line \d+\)"),
        (LocalAlgorithm(gives(None)), r"begin\(\) returned a NoneType; expected a Correction"),
        (LocalAlgorithm(gives(Correction(pull=NAN))), "the pull is nan; expected a finite number"),
        (
            LocalAlgorithm(gives(Correction(drift={"weight": torch.ones(3)}))),
            r"'weight' has the shape \[3\]; expected",
        ),
        (
            LocalAlgorithm(gives(Correction(drift={"bias": torch.ones(3)}))),
            "there is no parameter 'bias'; expected one",
        ),
        (LocalAlgorithm(gives(Correction(drift={"weight": 1.0}))), "'weight' is of type float; expected a tensor"),
        (LocalAlgorithm(end=_raise), r"end\(\) raised KeyError"),
        (LocalAlgorithm(end=gives(LocalEnding({"a": torch.tensor(NAN)}))), "'a' has entries that are NaN"),
        (LocalAlgorithm(end=gives(LocalEnding(update={"a": torch.ones(1)}))), "there is no parameter 'a'"),
        (LocalAlgorithm(make_loss=_raise), r"make_loss\(\) raised KeyError"),
        (LocalAlgorithm(make_loss=gives(5)), r"make_loss\(\) returned a int; expected a function"),
        (LocalAlgorithm(make_loss=gives(_raise)), "the loss raised KeyError"),
        (
            LocalAlgorithm(make_loss=loss(lambda value, outputs: value)),
            r"returned a Tensor; expected \(loss, outputs\)",
        ),
        (
            LocalAlgorithm(make_loss=loss(lambda value, outputs: (outputs, outputs))),
            r"shape \[4, 1\]; expected a scalar",
        ),
        (LocalAlgorithm(make_loss=loss(lambda value, outputs: (value.detach(), outputs))), "without a gradient"),
        (
            LocalAlgorithm(make_loss=loss(lambda value, outputs: (value, outputs[:2]))),
            "expected those of the module, for 4",
        ),
        (LocalAlgorithm(make_loss=loss(lambda value, outputs: (value * NAN, outputs))), "the loss of a batch is nan"),
        (LocalAlgorithm(start=_raise), r"start\(\) raised KeyError"),
        (LocalAlgorithm(start=gives(None)), r"start\(\) returned a NoneType; expected a LocalStart"),
        (LocalAlgorithm(start=gives(LocalStart({}, {}))), "the weights lack 'weight'; expected all received tensors"),
        (
            LocalAlgorithm(start=gives(LocalStart({"weight": torch.ones(1, 3)}, {"weight": torch.ones(3)}))),
            r"the exchange: 'weight' has the shape \[3\]",
        ),
        (LocalAlgorithm(perturb=_raise), r"perturb\(\) raised KeyError"),
        (LocalAlgorithm(perturb=gives([1.0])), "found a list; expected tensors by name"),
        (LocalAlgorithm(perturb=lambda gradients: {"weight": torch.ones(3)}), r"'weight' has the shape \[3\]"),
        (LocalAlgorithm(perturb=lambda gradients: {"weight": gradients["weight"] * NAN}), "entries that are NaN"),
    ],
)
def test_an_unusable_result_is_one_sentence(algorithm: LocalAlgorithm, message: str) -> None:
    class Bad(msgspec.Struct, frozen=True):
        def build(self) -> LocalAlgorithm:
            return algorithm

    training = work(Plugins({("algorithms", "bad"): Bad}), algorithm="bad")
    with pytest.raises((PluginError, UserCodeError), match=message) as caught:
        trained(training)
    assert str(caught.value).startswith('config.algorithm = "bad": ')
    assert "\n" not in str(caught.value)


def test_options_that_build_something_else_are_refused() -> None:
    class Other(msgspec.Struct, frozen=True):
        def build(self) -> int:
            return 5

    with pytest.raises(PluginError, match=r'config.algorithm = "other": build\(\) returned a int; expected a LocalAlg'):
        LocalOptions.from_config(OPTIONS | {"algorithm": "other"}, Plugins({("algorithms", "other"): Other}))


@pytest.mark.parametrize(
    ("name", "key"),
    [("fedlc.py:FedLC", "tau"), ("fedntd.py:FedNTD", "tau"), ("fedsam.py:FedSAM", "rho"), ("easgd", "rho")],
)
def test_engines_agree_or_refuse(name: str, key: str) -> None:
    options = LocalOptions.from_config(
        {"epochs": 1, "batch_size": 10, "learning_rate": 0.1, "algorithm": name, key: 0.5}, Plugins(folder=EXAMPLES)
    )
    given = make_task()._replace(options=options)
    works = [[ClientTask(client, version, client) for client in range(6)] for version in range(3)]
    expected = rounds(LoopEngine(given), given.learner.initial(), works)
    for make in (lambda: ProcessEngine(given, 2), lambda: AutoEngine(given, 1)):
        engine = make()
        found = rounds(engine, given.learner.initial(), works)
        engine.close()
        assert [[each.update for each in one] for one in found] == [[each.update for each in one] for one in expected]
    with pytest.raises(
        EngineError, match=f'engine = "vmap": algorithm = "{name}" .*, which needs one client at a time'
    ):
        VmapEngine(given)


def test_a_mistake_in_a_worker_is_a_sentence_too() -> None:
    class Bad(msgspec.Struct, frozen=True):
        def build(self) -> LocalAlgorithm:
            return LocalAlgorithm(perturb=_raise)

    given = make_task()._replace(options=LocalOptions(epochs=1, batch_size=5, learning_rate=0.1, algorithm=Bad()))
    engine = ProcessEngine(given, 1)
    with pytest.raises(
        UserCodeError, match=r'^the training of client 2 failed: config.algorithm = "Bad": perturb\(\) raised'
    ):
        rounds(engine, given.learner.initial(), [[ClientTask(2, 0, 1)]])
    engine.close()


def test_records_of_files_are_pickled_by_their_name_and_folder() -> None:
    plugins = Plugins(folder=EXAMPLES)
    options = LocalOptions.from_config(OPTIONS | {"algorithm": "fedlc.py:FedLC", "tau": 0.2}, plugins)
    content = pickle.dumps(options)
    module = type(options.algorithm).__module__
    loaded = sys.modules.pop(module)
    try:  # as in a new process
        read = pickle.loads(content)
        assert name_of(read.algorithm) == "fedlc.py:FedLC"
        assert read.algorithm.tau == 0.2
        assert read.build_algorithm().loss_is_mean
    finally:
        sys.modules[module] = loaded


def test_the_clients_data_is_that_of_the_partition() -> None:
    """FedLC on a client that has no example of a class: the class is left out of the softmax."""
    data = federation()
    plugins = Plugins(folder=EXAMPLES)
    config = {"epochs": 1, "batch_size": 0, "learning_rate": 0.1, "algorithm": "fedlc.py:FedLC", "tau": 0.5}
    part = np.flatnonzero(data.targets != 3)[:40]
    inputs, targets = torch.from_numpy(data.inputs[part]), torch.from_numpy(data.targets[part])
    learner = Learner(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 4)))
    start = learner.initial(seed=1)
    model = start.copy()
    options = LocalOptions.from_config(config, plugins)
    state = ClientState()
    examples = TensorExamples(inputs, targets)
    train(Trainee(learner), model, LocalTraining(examples=examples, options=options, seed=1, client_state=state))
    counts = np.bincount(targets.numpy(), minlength=4).astype(float)
    margins = 0.5 * np.maximum(counts, 1e-8) ** -0.25
    x = data.inputs[part].reshape(len(part), -1).astype(float)
    logits = x @ start["1.weight"].T.astype(float) + start["1.bias"] - margins
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    slope = (p - np.eye(4)[targets.numpy()]) / len(part)
    np.testing.assert_allclose(model["1.bias"], start["1.bias"] - 0.1 * slope.sum(0), atol=1e-6)
    np.testing.assert_allclose(model["1.weight"], start["1.weight"] - 0.1 * slope.T @ x, atol=1e-6)
    assert abs(slope[:, 3]).max() < 1e-15
    assert not state.changed


def test_not_true_distillation_matches_the_paper() -> None:
    """FedNTD in two steps: its second gradient has the distance from the received model, over the other classes."""
    data, beta, tau, rate = federation(), 0.7, 2.0, 0.5
    config = {"epochs": 2, "batch_size": 0, "learning_rate": rate, "algorithm": "fedntd.py:FedNTD"}
    options = LocalOptions.from_config(config | {"beta": beta, "tau": tau}, Plugins(folder=EXAMPLES))
    examples = TensorExamples(torch.from_numpy(data.inputs[:40]), torch.from_numpy(data.targets[:40]))
    learner = Learner(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 4)))
    start = learner.initial(seed=1)
    model = start.copy()
    train(Trainee(learner), model, LocalTraining(examples=examples, options=options, seed=1))
    x, true = data.inputs[:40].reshape(40, -1).astype(float), np.eye(4)[data.targets[:40]]
    received = weight, bias = start["1.weight"].astype(float), start["1.bias"].astype(float)
    for _ in range(2):
        p = softmax(x @ weight.T + bias)
        kept, ours = (softmax(np.where(true, -np.inf, (x @ w.T + b) / tau)) for w, b in (received, (weight, bias)))
        slope = (p - true + beta * tau * (ours - kept)) / len(x)
        weight, bias = weight - rate * slope.T @ x, bias - rate * slope.sum(0)
    np.testing.assert_allclose(model["1.weight"], weight, atol=1e-6)
    np.testing.assert_allclose(model["1.bias"], bias, atol=1e-6)


def softmax(logits: Wide) -> Wide:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


@pytest.mark.parametrize("name", ["fedlc", "fedntd", "fedsam"])
def test_the_examples_run(name: str) -> None:
    changes = {"rounds": 2, "selection.goal": 2, "config.epochs": 1, "simulation.engine": "loop"}
    run = simulate(EXAMPLES / f"{name}.toml", changes)
    assert run.result.status == "COMPLETED"
    assert len((EXAMPLES / f"{name}.py").read_text("utf-8").splitlines()) <= 60
