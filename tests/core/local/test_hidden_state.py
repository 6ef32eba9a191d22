"""What a module remembers outside its state_dict, and the generators of a process: as on a real client."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from itertools import permutations
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedplat.client_state import ClientState
from fedplat.errors import EngineError, ModelError
from fedplat.job import Selection
from fedplat.learner import Config, Data
from fedplat.model import Parameters
from fedplat.pytorch.training import Learner, LocalOptions, LocalTraining, TensorExamples, Trainee, train
from fedplat.pytorch.vectorized.trainer import FlatTrainer
from fedplat.randomness import read_states, use_seeds
from fedplat.simulation import SimulationOptions, make_job, simulate
from fedplat.simulation.data import Federation
from fedplat_client import Task
from fedplat_client.trainers.learner import LearnerTrainer
from fedplat_client.trainers.torch import TorchTrainer

INPUTS = torch.from_numpy(np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32))
LABELS = torch.arange(80) % 3
CONFIG = {"epochs": 1, "batch_size": 2, "learning_rate": 0.1}  # 40 steps: more than there are before a recording
OPTIONS = LocalOptions.from_config(CONFIG)


class Scaled(nn.Module):
    """Its outputs depend on the number of the batch; after 20 batches, no more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def number(self) -> Any:
        raise NotImplementedError

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scale = self.number() if self.training else 1.0
        return self.layer(inputs) * torch.as_tensor(scale / 20).clamp(max=1.0)


class Buffer(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def number(self) -> Any:
        self.count += 1
        return self.count


class Counter(Scaled):
    count = 0

    def number(self) -> Any:
        self.count += 1
        return self.count


class History(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {"batches": []}

    def number(self) -> Any:
        self.seen["batches"].append(1)
        return len(self.seen["batches"])


class Tensor(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(1)

    def number(self) -> Any:
        self.mean = self.mean + 1.0
        return self.mean


class Drawing(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.numpy, self.python, self.torch = np.random.default_rng(1), random.Random(1), torch.Generator()

    def number(self) -> Any:
        return self.numpy.random() + self.python.random() + torch.rand((), generator=self.torch)


MODULES = [Buffer, Counter, History, Tensor, Drawing]


def work(part: slice, seed: int = 1) -> LocalTraining:
    examples = TensorExamples(INPUTS[part], LABELS[part])
    return LocalTraining(examples=examples, options=OPTIONS, seed=seed, client_state=ClientState())


def update(trainee: Trainee, part: slice, engine: str, flat: FlatTrainer | None) -> Parameters:
    base = Learner(model=trainee.learner.model, loss=trainee.learner.loss).initial(seed=7)
    if flat is not None:
        return flat.train(flat.base(base), work(part))[0]
    model = base.copy()
    train(trainee, model, work(part))
    return model.minus(base)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("engine", ["autograd", "flat"])
def test_a_client_starts_without_what_the_one_before_left(module: type[Scaled], engine: str) -> None:
    learner = Learner(model=module)
    whole = slice(0, 80)

    def make() -> tuple[Trainee, FlatTrainer | None]:
        trainee = Trainee(learner)
        return trainee, FlatTrainer(trainee, OPTIONS) if engine == "flat" else None

    trainee, flat = make()
    alone = update(trainee, whole, engine, flat)
    trainee, flat = make()
    update(trainee, whole, engine, flat)
    update(trainee, slice(0, 30), engine, flat)
    assert update(trainee, whole, engine, flat) == alone
    trainer = TorchTrainer(model=module, data=TensorDataset(INPUTS, LABELS), device="cpu")
    tasks = [Task(name="t", parameters=learner.initial(seed=7), config=CONFIG) for _ in range(2)]
    assert trainer(tasks[0]).parameters == trainer(tasks[1]).parameters


def test_a_loss_that_is_an_object_forgets_too() -> None:
    class Rising:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return functional.cross_entropy(outputs, targets) * min(1.0, self.calls / 20)

    learner = Learner(model=lambda: nn.Linear(4, 3), loss=Rising())
    trainee = Trainee(learner)
    one, two = (update(trainee, slice(0, 80), "autograd", None) for _ in range(2))
    assert one == two


class Rising(nn.Module):
    """A loss with a running mean, which is in no model."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.ones(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean += 1.0
        return functional.cross_entropy(outputs, targets) * min(1.0, self.calls / 20) / self.mean


@pytest.mark.parametrize("engine", ["autograd", "flat"])
def test_a_loss_is_as_before_once_a_training_has_ended(engine: str) -> None:
    loss = Rising()
    learner = Learner(model=lambda: nn.Linear(4, 3), loss=loss)
    models: list[Any] = []
    for _ in range(2):  # two runs in one process
        model = learner.initial()
        work = LocalTraining(examples=TensorExamples(INPUTS, LABELS), options=OPTIONS, seed=1)
        if engine == "flat":
            flat = FlatTrainer(Trainee(learner), OPTIONS)
            models.append(flat.train(flat.base(model), work)[0])
        else:
            train(Trainee(learner), model, work)
            models.append(model)
        assert (loss.calls, float(loss.mean)) == (0, 1.0)
    assert models[0] == models[1]


def mix(draw: Callable[[], float]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda outputs, targets: functional.cross_entropy(outputs, targets) * draw()


GENERATOR = torch.Generator()


class Shared(Scaled):
    """Its generators belong to the class."""

    generators: ClassVar[list[Any]] = [np.random.default_rng(1), random.Random(1)]

    def number(self) -> Any:
        return sum(each.random() for each in self.generators)


def in_closure() -> Callable[..., torch.Tensor]:
    generator = np.random.default_rng(1)

    def draw() -> float:
        return generator.random()

    return mix(draw)


def by_argument(outputs: torch.Tensor, targets: torch.Tensor, generator: Any) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets) * generator.random()


def by_global(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets) * torch.rand((), generator=GENERATOR)


@pytest.mark.parametrize(
    ("module", "loss"),
    [
        (Shared, functional.cross_entropy),
        (lambda: nn.Linear(4, 3), in_closure()),
        (lambda: nn.Linear(4, 3), functools.partial(by_argument, generator=np.random.RandomState(1))),
        (lambda: nn.Linear(4, 3), by_global),
    ],
)
@pytest.mark.parametrize("engine", ["autograd", "flat"])
def test_generators_outside_attributes_start_anew(module: Callable[[], nn.Module], loss: Any, engine: str) -> None:
    learner = Learner(model=module, loss=loss)
    trainee = Trainee(learner)
    flat = FlatTrainer(trainee, OPTIONS) if engine == "flat" else None
    first = update(trainee, slice(0, 80), engine, flat)
    assert update(trainee, slice(0, 80), engine, flat) == first
    assert update(Trainee(learner), slice(0, 80), "autograd", None) == first


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.beta(0.4, 0.4),
        random.random,
        lambda: float(np.random.randint(2)),  # two draws are often equal, and a recording would keep one
        lambda: float(random.choice([0.5, 1.0])),
    ],
)
def test_equal_seeds_draw_equal_numbers_in_all_engines(draw: Callable[[], float]) -> None:
    learner = Learner(model=lambda: nn.Linear(4, 3), loss=mix(draw))
    expected = update(Trainee(learner), slice(0, 80), "autograd", None)
    np.random.seed(3)
    random.seed(3)
    trainee = Trainee(learner)
    flat = FlatTrainer(trainee, OPTIONS)
    for _ in range(2):
        assert update(trainee, slice(0, 80), "flat", flat) == expected
    after = np.random.random(), random.random()
    np.random.seed(3)
    random.seed(3)
    assert (np.random.random(), random.random()) == after  # the process's own numbers are as if there was no training


def run(learner: Any, engine: Any) -> Parameters:
    parts = [np.arange(0, 80, 2), np.arange(1, 80, 2)]
    inputs, labels = INPUTS.numpy(), LABELS.numpy()
    job = make_job(None, rounds=2, selection=Selection(goal=2, over_selection=1.0), config=CONFIG)
    data = Federation(inputs, labels, parts, inputs[:0], labels[:0])
    found = simulate(job, SimulationOptions(engine=engine), data=data, learner=learner, progress=False)
    assert found.model is not None
    return found.model


def test_engines_agree_or_refuse() -> None:
    assert run(Learner(model=Counter), "loop") == run(Learner(model=Counter), "processes")
    with pytest.raises(EngineError, match="remembers something of each client outside its state_dict"):
        run(Learner(model=Counter), "vmap")
    with pytest.raises(EngineError, match="draws random numbers of Python or NumPy"):
        run(Learner(model=lambda: nn.Linear(4, 3), loss=mix(random.random)), "vmap")


def test_a_module_that_was_trained_is_no_new_one() -> None:
    network = nn.Linear(4, 3)
    learner = Learner(model=lambda: network)
    run(learner, "loop")
    with pytest.raises(ModelError, match="returned the same Linear again, which was trained since"):
        run(learner, "loop")


@pytest.mark.parametrize(
    ("part", "name"),
    [(nn.Linear(4, 4), "0.bias"), (nn.BatchNorm1d(4, affine=False), "0.num_batches_tracked")],
)
def test_a_part_that_was_trained_is_no_new_one(part: nn.Module, name: str) -> None:
    learner = Learner(model=lambda: nn.Sequential(part, nn.Linear(4, 3)))
    update(Trainee(learner), slice(0, 8), "autograd", None)
    with pytest.raises(ModelError, match=f"returned a Sequential with the same tensor '{name}' again, which was train"):
        learner.initial()


def test_a_part_that_is_never_trained_may_be_shared() -> None:
    part = nn.Linear(4, 4).requires_grad_(False)
    learner = Learner(model=lambda: nn.Sequential(part, nn.ReLU(), nn.Linear(4, 3)))
    first = learner.initial()
    update(Trainee(learner), slice(0, 8), "autograd", None)
    assert learner.initial() == first


class Noisy:
    """A learner that draws from the generators of the process."""

    def initial(self, seed: int) -> Parameters:
        return Parameters.from_arrays({"w": np.random.random(2).astype(np.float32)})

    def train(self, parameters: Parameters, data: Data, config: Config, seed: int) -> dict[str, float]:
        parameters["w"] += np.float32(np.random.random() + random.random())
        return {"loss": np.random.random()}

    def evaluate(self, parameters: Parameters, data: Data) -> dict[str, float]:
        return {"loss": np.random.random()}


def test_learners_of_any_library() -> None:
    assert run(Noisy(), "loop") == run(Noisy(), "processes")
    trainer = LearnerTrainer(learner=Noisy(), data=(INPUTS.numpy(), LABELS.numpy()))
    tasks = [Task(name="t", parameters=Parameters.from_arrays({"w": np.zeros(2, np.float32)})) for _ in range(2)]
    one, two = (trainer(task) for task in tasks)
    assert (one.metrics, one.parameters) == (two.metrics, two.parameters)
    assert trainer.evaluate(tasks[0]) == trainer.evaluate(tasks[1])


def test_blocks_may_be_nested() -> None:
    def draw() -> tuple[float, float, float]:
        return np.random.random(), random.random(), torch.rand(()).item()

    with use_seeds(1):
        first, second = draw(), draw()
    with use_seeds(1):
        assert draw() == first
        with use_seeds(2):
            assert draw() != second
        assert draw() == second


def test_blocks_of_threads_that_overlap_leave_the_states_from_before() -> None:
    def draw() -> tuple[float, float, float]:
        return np.random.random(), random.random(), torch.rand(()).item()

    def states() -> object:
        return read_states(), torch.get_rng_state().tolist()

    before = states()
    for order in permutations(range(3)):  # blocks that begin as 0, 1, 2 end in each order
        blocks = [use_seeds(seed) for seed in range(3)]
        for block in blocks:
            block.__enter__()
        draw()
        for place in order[:-1]:
            blocks[place].__exit__(None, None, None)
            draw()
        blocks[order[-1]].__exit__(None, None, None)
        with use_seeds(5):  # it must not be given a generator that is in use
            draw()
        assert states() == before
