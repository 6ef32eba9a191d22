"""Trainings and evaluations of pipelines, on their ranks, in turn and by hand."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedplat.client_state import ClientState
from fedplat.errors import TrainingError
from fedplat.parallel import Parallel
from fedplat.pytorch.convert import load_into
from fedplat.pytorch.distributed import Backend, Ranks, join_group
from fedplat.pytorch.parallel import Layout, ParallelPlan, ParallelTrainee, evaluate_parts, make_gradients, make_layout
from fedplat.pytorch.parallel.parts import clip_gradients, sum_scores
from fedplat.pytorch.training import Examples, LocalOptions, MakeOptimizer, StepSchedule, check_examples
from fedplat.pytorch.training.learner import Learner, make_loss
from fedplat.pytorch.training.stepper import StepAlgorithm, Stepper
from support.model_parallel import llama
from support.model_parallel.measured import Cases
from support.ranks.backends import bound
from support.ranks.group import Zygote

RATE, SEED = 0.5, 7
Key = TypeVar("Key")
COSTS = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}


class Case(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """One training, and the evaluation of its result."""

    layout: str
    model: str = "llama"
    batch_size: int = 13
    accumulate: int = 1
    epochs: int = 2
    max_norm: float = 0.0
    in_turn: bool = False


class Found(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The results of a case on one rank; the digest of the model is that of rank 0."""

    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, str] = {}
    """Digests of the gradients of the last step."""
    digest: str = ""
    operations: list[tuple[str, int, int]] = []
    """Kind, stage and micro-batch of the operations of the last step."""
    evaluation: dict[str, float] = {}
    error: str = ""


class Measured(Cases[Key, Found]):
    """What each rank of a group finds in each case."""

    def compare(self, key: Key, expected: Found, rel: float = 1e-6, rel_of_norms: float = 1e-6) -> None:
        """Compare what all ranks have found with one process."""
        for found in self[key]:
            assert found.losses == pytest.approx(expected.losses, rel=bound(self.backend, rel))
            assert found.norms == pytest.approx(expected.norms, rel=bound(self.backend, rel_of_norms))
            assert found.evaluation == pytest.approx(expected.evaluation, rel=bound(self.backend, rel))

    def compare_with_turns(self, key: Key, case: Case, rel: float = 1e-6) -> None:
        """Compare with a process that computes all ranks in turn; the bits of CPUs are the same."""
        [expected] = in_turn(case, backend=self.backend)
        self.compare(key, expected, rel)
        if self.backend == "gloo":
            assert self[key][0].digest == expected.digest
            assert self[key][0].losses == expected.losses


class Stubborn(llama.Llama):
    """Calls parts that a pipeline has removed."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.embedding(values)  # type: ignore[misc]
        for layer in self.layers:
            values = layer(values)
        return self.output(self.norm(values)).transpose(1, 2)  # type: ignore[misc]


class Failing(nn.Module):
    """A layer whose third forward pass of a training raises."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += torch.is_grad_enabled()
        if self.calls == 3:
            raise ArithmeticError("a planted error")
        return self.linear(values)


def sequential() -> nn.Module:
    """Eight linear layers, and what they need around them."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), *layers, nn.Linear(8, 3))


def failing() -> nn.Module:
    """The same with a layer that raises in the third quarter."""
    layers = [nn.Linear(8, 8) if number != 5 else Failing() for number in range(8)]
    return nn.Sequential(nn.Linear(12, 8), *layers, nn.Linear(8, 3))


def frozen() -> nn.Module:
    """A model whose first layers are not trained."""
    model = llama.Llama()
    model.get_submodule("embedding").requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama.Llama,
    "dropout": lambda: llama.Llama(0.2),
    "frozen": frozen,
    "stubborn": Stubborn,
    "sequential": sequential,
    "failing": failing,
}


def make(case: Case) -> tuple[Learner, ParallelPlan, TensorDataset]:
    """The learner, the plan and the examples of a case."""
    learner = Learner(model=MODELS[case.model])
    if case.model not in ("sequential", "failing"):
        return learner, llama.PLAN, TensorDataset(*llama.examples())
    inputs, _ = llama.examples()
    return learner, ParallelPlan(stages=("*",)), TensorDataset(inputs / llama.VOCABULARY, inputs[:, 0] % 3)


def schedule_of(case: Case, num_examples: int) -> StepSchedule:
    """The steps of the training."""
    options = LocalOptions(
        learning_rate=RATE, batch_size=case.batch_size, epochs=case.epochs, accumulate=case.accumulate
    )
    return StepSchedule(num_examples=num_examples, options=options, seed=SEED)


@contextmanager
def measure(zygote: Zygote, count: int, backend: str, cases: Mapping[Key, Case]) -> Generator[Measured[Key]]:
    """What the ranks of a new group find in the cases that are asked for."""
    with zygote.group(count, BACKEND=backend) as group:
        yield Measured(group, backend, "support.model_parallel.piped:run", Found, cases)


def run(ranks: Ranks, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Do cases one after the other in one group."""
    return [msgspec.to_builtins(run_one(ranks, msgspec.convert(case, Case))) for case in cases]


def run_one(ranks: Ranks, case: Case) -> Found:
    """Train in a layout and evaluate the result."""
    parallel = Parallel.from_text(case.layout)
    layout = Layout(parallel, ranks, None) if case.in_turn else make_layout(ranks, parallel)
    try:
        return train(layout, case)
    except (ValueError, TrainingError) as exc:
        return Found(error=str(exc))


class Recorder:
    """Keeps the order of operations."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, int, int]] = []

    def operation(self, kind: str, stage: int, micro_batch: int, begin_s: float, end_s: float) -> None:
        """Keep one."""
        assert begin_s <= end_s
        self.operations.append((kind, stage, micro_batch))


def train(layout: Layout, case: Case) -> Found:
    """Train and evaluate in a layout. Raises `ValueError` if it is refused."""
    learner, plan, dataset = make(case)
    trainee = ParallelTrainee(learner, layout, plan)
    model = learner.initial(3)
    trainee.load(model, ClientState())
    recorder, found, steps = Recorder(), Found(), schedule_of(case, len(dataset))
    examples: Examples = check_examples(dataset, layout.ranks.device)
    gradients = make_gradients(layout, SEED, observer=recorder)
    sgd: MakeOptimizer = lambda values: torch.optim.SGD(values, RATE)  # noqa: E731
    algorithm = StepAlgorithm(loss=make_loss(learner))
    stepper = Stepper(trainee.parameters(), steps.options, RATE, algorithm, make_optimizer=sgd)
    for scores in gradients.compute_steps(trainee, stepper, steps, examples):
        parameters = trainee.parameters()
        if case.max_norm:
            found.norms.append(clip_gradients(parameters.values(), case.max_norm, layout))
        found.gradients, found.operations = digests(parameters), recorder.operations.copy()
        recorder.operations.clear()
        stepper.step()
        found.losses.append(gradients.sum_scores(scores).means()["loss"])
    trainee.save(model, ClientState())
    found.digest = hashlib.sha256(model.to_bytes()).hexdigest() if layout.ranks.is_first else ""
    found.evaluation = sum_scores(layout.ranks, evaluate_parts(trainee, examples, 4)).means()
    return found


@functools.cache
def by_hand(case: Case) -> Found:
    """The same training by a loop over micro-batches in one process, without a pipeline."""
    learner, _, dataset = make(case)
    count = Parallel.from_text(case.layout).num_micro_batches
    module, found, inputs, targets = learner.model(), Found(), *dataset.tensors
    load_into(module, learner.initial(3))
    optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], RATE)
    plan = schedule_of(case, len(dataset))
    size = math.ceil(case.batch_size / count)
    for step in plan.steps():
        optimizer.zero_grad()
        total = 0.0
        for batch, first in itertools.product(plan.batches_of(step), range(0, size * count, size)):
            rows = batch[first : first + size]
            padded = [*rows, *[batch[-1]] * (size - len(rows))]
            outputs = module(inputs[padded])
            shown = max(1, len(rows))
            loss = functional.cross_entropy(outputs[:shown], targets[padded][:shown])
            (loss * (len(rows) / len(step))).backward()
            total += loss.item() * len(rows)
        if case.max_norm:
            found.norms.append(nn.utils.clip_grad_norm_(module.parameters(), case.max_norm).item())
        found.gradients = digests(dict(module.named_parameters()))
        optimizer.step()
        found.losses.append(total / len(step))
    module.eval()
    with torch.no_grad():
        outputs = module(inputs)
        found.evaluation["loss"] = functional.cross_entropy(outputs, targets).item()
        found.evaluation["accuracy"] = (outputs.argmax(1) == targets).double().mean().item()
    return found


def digests(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """The digest of each gradient that is whole on this rank."""
    whole = {name: each.grad for name, each in parameters.items() if not isinstance(each, DTensor)}
    return {
        name: hashlib.sha256((gradient + 0.0).cpu().numpy().tobytes()).hexdigest()  # not of the sign of a zero
        for name, gradient in whole.items()
        if gradient is not None
    }


def end_with_a_failure(ranks: Ranks, layout: str, note: str) -> None:
    """Train a model that raises on one rank; a rank that fails leaves the group, as any program does.

    The time of the error in the model, of the clock that all processes have, is written into the file `note`.
    """
    try:
        train(make_layout(ranks, Parallel.from_text(layout)), Case(layout=layout, model="failing"))
    except Exception as exc:
        if isinstance(exc.__cause__, ArithmeticError):  # PyTorch adds the number of the stage
            Path(note).write_text(str(time.monotonic()))
        raise SystemExit(3) from exc


@contextmanager
def alone(backend: str = "gloo") -> Generator[Ranks]:
    """This process, as a group of its own."""
    with join_group(cast(Backend, backend)) as ranks:
        yield ranks


def in_turn(*cases: Case, backend: str = "gloo") -> list[Found]:
    """The cases in this process, which computes all ranks in turn."""
    with alone(backend) as ranks:
        return [run_one(ranks, msgspec.structs.replace(case, in_turn=True)) for case in cases]


def highest_in_flight(operations: Iterable[tuple[str, int, int]]) -> dict[int, int]:
    """The largest number of micro-batches of each stage between their forward and backward passes."""
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for kind, stage, _ in operations:
        now[stage] = now.get(stage, 0) + {"forward": 1, "backward_weight": 0}.get(kind, -1)
        most[stage] = max(most.get(stage, 0), now[stage])
    return most


def measure_bubble(ranks: Sequence[Sequence[tuple[str, int, int]]], num_stages: int) -> float:
    """The idle part of the time of all ranks, if every operation takes its cost and messages take no time."""
    done: dict[tuple[str, int, int], int] = {}
    clocks, places = [0] * len(ranks), [0] * len(ranks)
    while any(place < len(own) for place, own in zip(places, ranks, strict=True)):
        progress = False
        for rank, own in enumerate(ranks):
            while places[rank] < len(own) and (ready := _ready(own[places[rank]], num_stages, done)) is not None:
                kind, stage, number = own[places[rank]]
                clocks[rank] = max(clocks[rank], ready) + COSTS[kind]
                if kind != "backward_weight":  # no other operation needs it
                    done[kind.removesuffix("_input"), stage, number] = clocks[rank]
                places[rank] += 1
                progress = True
        assert progress, "the order of operations has a deadlock"
    busy = sum(COSTS[kind] for own in ranks for kind, _, _ in own)
    return 1 - busy / (max(clocks) * len(ranks))


def _ready(operation: tuple[str, int, int], num_stages: int, done: dict[tuple[str, int, int], int]) -> int | None:
    """The time from which on an operation can begin; None if what it needs has no time yet."""
    kind, stage, number = operation
    if kind == "backward_weight" or (kind == "forward" and stage == 0):
        return 0
    if kind == "forward":
        return done.get(("forward", stage - 1, number))
    return done.get(("forward", stage, number) if stage == num_stages - 1 else ("backward", stage + 1, number))
