"""Trainings of divided models on ranks, and what is measured in them: losses, elements, collectives, live bytes."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from fedplat.client_state import ClientState
from fedplat.errors import ModelError
from fedplat.local_options import LocalOptions
from fedplat.model import Parameters
from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel import Layout, ParallelPlan, ParallelTrainee, make_gradients, make_layout
from fedplat.pytorch.server.data_parallel import DataParallelGradients
from fedplat.pytorch.training import (
    GradientComputation,
    Learner,
    LocalTraining,
    SingleProcessGradients,
    StepSchedule,
    Trainee,
    check_examples,
)
from fedplat.pytorch.training import train as train_locally
from fedplat.pytorch.training.learner import make_loss
from fedplat.pytorch.training.stepper import StepAlgorithm, Stepper
from support.model_parallel import llama
from support.model_parallel.llama import PLAN, Llama
from support.model_parallel.scenarios import local_size

SEED, RATE = 7, 0.5


class Case(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A training; without a layout, that of one process."""

    layout: str = ""
    model: str = "llama"
    precision: str = "fp32"
    optimizer: str = "sgd"
    max_norm: float = 0.0
    epochs: int = 10
    num_examples: int = 26
    measure: bool = False
    """Count collectives and live bytes, which changes bits: it takes other paths through PyTorch's operations."""


class Found(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a rank has measured."""

    losses: list[float] = []
    digest: str = ""
    weights: int = 0
    gradients: int = 0
    moments: int = 0
    num_bytes: int = 0
    devices: list[str] = []
    collectives: dict[str, int] = {}
    forward_collectives: dict[str, int] = {}
    """Those of `collectives` before the backward pass."""
    saved_bytes: int = 0


class Tied(Llama):
    """A model whose output has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        assert self.embedding is not None
        assert self.output is not None
        self.output.weight = self.embedding.weight
        nn.init.normal_(self.output.weight, std=llama.WIDTH**-0.5)  # scores of about 1, as for any output


def make_frozen() -> nn.Module:
    """Create a model whose normalisations and first layer are not trained."""
    model = Llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name and not name.startswith("layers.0."))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": Llama,
    "dropout": lambda: Llama(0.1),
    "tied": Tied,
    "frozen": make_frozen,
}
TIED_PLAN = ParallelPlan(
    tensor={**PLAN.tensor, "embedding": "embedding_rowwise", "output": "colwise_rep"}, blocks=("layers.*",)
)


def run(ranks: Ranks, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Do all the trainings on the ranks of a group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="FSDP2-wrapped module")
        return [msgspec.to_builtins(run_one(ranks, msgspec.convert(case, Case))) for case in cases]


def run_one(ranks: Ranks, case: Case, logical_ranks: int = 0) -> Found:
    """Do a training: in its layout, with logical ranks on one process, or by one process alone."""
    learner = Learner(model=MODELS[case.model])
    gradients: GradientComputation
    if case.layout:
        parallel = Parallel.from_text(case.layout)
        layout = make_layout(ranks, parallel) if ranks.size == parallel.num_ranks else Layout(parallel, ranks, None)
        plan = TIED_PLAN if case.model == "tied" else PLAN
        trainee: Trainee = ParallelTrainee(learner, layout, plan, case.precision)  # type: ignore[arg-type]
        gradients = make_gradients(layout, SEED)
    else:
        trainee = Trainee(learner, ranks.device)
        gradients = DataParallelGradients(ranks, logical_ranks, SEED) if logical_ranks else SingleProcessGradients()
    return train(trainee, gradients, case)


def train(trainee: Trainee, gradients: GradientComputation, case: Case) -> Found:
    """Train, and measure the first step."""
    options = LocalOptions(
        learning_rate=RATE,
        batch_size=13,
        epochs=case.epochs,
        max_grad_norm=case.max_norm,
        precision=case.precision,  # type: ignore[arg-type]
    )
    model = trainee.learner.initial(3)
    trainee.load(model, ClientState())
    plan = StepSchedule(num_examples=case.num_examples, options=options, seed=SEED)
    examples = check_examples(TensorDataset(*llama.examples(case.num_examples)), trainee.device)
    trained, made = trainee.parameters(), list[torch.optim.Optimizer]()

    def make_optimizer(values: Any) -> torch.optim.Optimizer:
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[case.optimizer]
        made.append(kind(values, RATE if case.optimizer == "sgd" else 0.01))
        return made[0]

    stepper = Stepper(
        trained,
        trainee.step_options(options),
        RATE,
        StepAlgorithm(loss=make_loss(trainee.learner)),
        make_optimizer,
        gradients.clip_gradients,
    )
    found = Found()
    steps = gradients.compute_steps(trainee, stepper, plan, examples)
    for scores in _measure_second(steps, stepper, found) if case.measure else steps:
        if not found.losses:
            found.weights = sum(map(local_size, trained.values()))
            slopes = [each.grad for each in trained.values() if each.grad is not None]
            found.gradients = sum(map(local_size, slopes))
            found.devices = sorted({each.device.type for each in (*trained.values(), *slopes)})
        stepper.step()
        found.losses.append(gradients.sum_scores(scores).means()["loss"])
    state = [each for table in made[0].state.values() for each in table.values() if isinstance(each, torch.Tensor)]
    state = [each for each in state if each.ndim]
    found.moments = sum(map(local_size, state))
    found.devices = sorted({*found.devices, *(each.device.type for each in state)})
    found.num_bytes = 4 * (found.weights + found.gradients + found.moments)
    trainee.save(model, ClientState())
    found.digest = hashlib.sha256(model.to_bytes()).hexdigest()
    return found


def _measure_second(steps: Iterator[Any], stepper: Stepper, found: Found) -> Iterator[Any]:
    """Yield the steps; count the collectives of the second one, and the bytes that its backward pass needs."""
    yield next(steps)
    sizes: dict[int, int] = {}
    backward = stepper.backward

    def count(communication: CommDebugMode) -> dict[str, int]:
        counts = communication.get_comm_counts()
        return {str(operation).rpartition(".")[2]: number for operation, number in counts.items()}

    def note_and_go_backward(*arguments: Any) -> None:
        found.forward_collectives = count(communication)
        backward(*arguments)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is torch.Tensor:  # others, such as parameters, are not what a block computes
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        CommDebugMode() as communication,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        mock.patch.object(stepper, "backward", note_and_go_backward),
    ):
        scores = next(steps)
    found.collectives = count(communication)
    found.saved_bytes = sum(sizes.values())
    yield scores
    yield from steps


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that has values."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else [result]:
            if type(each) in (torch.Tensor, nn.Parameter) and not each.is_meta:
                self.elements = max(self.elements, each.numel())
        return result


def load_and_save(ranks: Ranks, path: str, layout: str) -> dict[str, Any]:
    """Load a file of the model and save it; then load a model with a missing tensor. Return what happened."""
    place = make_layout(ranks, Parallel.from_text(layout))
    model = Parameters.open(path)
    with LargestTensor() as largest:
        trainee = ParallelTrainee(Learner(model=Llama), place, PLAN)
        trainee.load(model, ClientState())
        result = model.copy() if ranks.is_first else model
        trainee.save(result, ClientState())
    same = all(np.array_equal(result[name], model[name]) for name in model)
    error = ""
    try:
        trainee.load(Parameters.from_arrays({name: model[name] for name in model if "wq" not in name}), ClientState())
    except ModelError as exc:
        error = str(exc)
    return {"largest": largest.elements, "same": same, "error": error}


def make_mixed() -> nn.Module:
    """Create two layers; the second one has a tensor of each of several dtypes."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = nn.Parameter(second.weight.detach().bfloat16())
    second.bias = nn.Parameter(second.bias.detach().double())
    second.register_buffer("counter", torch.tensor([7]))
    return nn.Sequential(first, second)


def save_mixed(ranks: Ranks) -> list[bool]:
    """Load and save a model with a layer on each rank: from a file with its dtypes, and from one with others.

    Return whether the values on rank 0 are the same.
    """
    learner = Learner(model=make_mixed)
    place, own = make_layout(ranks, Parallel(pipeline=2)), learner.initial(3)
    narrow = {name: own[name].astype(np.float16 if name.startswith("0.") else np.float32) for name in own}
    same: list[bool] = []
    for model in (own, Parameters.from_arrays(narrow | {"1.counter": own["1.counter"]})):
        trainee = ParallelTrainee(learner, place, ParallelPlan(stages=("*",)))
        trainee.load(model, ClientState())
        result = Parameters.from_arrays({name: np.zeros_like(values) for name, values in model.items()})
        trainee.save(result, ClientState())
        same.append(result == model)
    return same


def train_all(ranks: Ranks, layouts: list[str]) -> list[dict[str, Any]]:
    """Train as clients do, by FedProx, in each layout."""
    return [train_with_algorithm(ranks, layout, {"algorithm": "fedprox", "mu": 0.1}) for layout in layouts]


def train_with_algorithm(ranks: Ranks, layout: str, algorithm: dict[str, Any]) -> dict[str, Any]:
    """Train as clients do, in a layout or by this process alone; return the metrics and the change of the weights."""
    learner = Learner(model=Llama)
    options = LocalOptions.from_config(
        {"learning_rate": RATE, "batch_size": 13, "epochs": 3, "max_grad_norm": 0.3, "measure_before": True} | algorithm
    )
    examples = check_examples(TensorDataset(*llama.examples()), ranks.device)
    if layout:
        place = make_layout(ranks, Parallel.from_text(layout))
        trainee: Trainee = ParallelTrainee(learner, place, PLAN)
        work = LocalTraining(examples=examples, options=options, seed=SEED, gradients=make_gradients(place, SEED))
    else:
        trainee, work = Trainee(learner), LocalTraining(examples=examples, options=options, seed=SEED)
    model = learner.initial(3)
    metrics = dict(train_locally(trainee, model, work))
    total = sum(float(abs(model[name]).sum()) for name in model) if ranks.is_first else 0.0
    return {"metrics": metrics, "total": total}
