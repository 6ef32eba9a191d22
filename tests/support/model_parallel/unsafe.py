"""Models and plans whose replicas would differ silently, and the reasons for which ranks refuse them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import TensorDataset
from typing_extensions import override

from fedplat.client_state import ClientState
from fedplat.errors import TrainingError
from fedplat.local_options import LocalOptions
from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel import Layout, ParallelPlan, ParallelTrainee, make_gradients, make_layout
from fedplat.pytorch.parallel.plan import Style
from fedplat.pytorch.training import Learner, StepSchedule, check_examples
from fedplat.pytorch.training.learner import make_loss
from fedplat.pytorch.training.stepper import StepAlgorithm, Stepper
from support.model_parallel import llama
from support.model_parallel.llama import PLAN, Llama

SEED, RATE = 7, 0.5


class RunningMean(nn.Module):
    """A layer with a running mean of its inputs, from a certain training step on."""

    def __init__(self, begin: int = 0, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()), persistent=persistent)
        self._begin, self._calls = begin, 0

    @override
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training and (calls := self._calls) >= self._begin:
            self.get_buffer("mean").lerp_(values.detach().mean(), 1 / (2 + calls))
        self._calls += torch.is_grad_enabled()
        return values


class NormalizedGate(nn.Module):
    """A feed-forward part with a normalisation of each group of its columns, which several ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(llama.WIDTH, 64, bias=False), nn.Linear(64, llama.WIDTH, bias=False)
        self.norm = nn.RMSNorm(8)

    @override
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(values).unflatten(-1, (-1, 8))).flatten(-2))


def with_mean(begin: int = 0, *, persistent: bool = True) -> Llama:
    """Create a model whose layers have running means."""
    model = Llama()
    for layer in model.layers:
        layer.register_module("dropout", RunningMean(begin, persistent=persistent))
    return model


def with_gate() -> Llama:
    """Create a model with a trained parameter between columns and rows of each layer."""
    model = Llama()
    for layer in model.layers:
        layer.register_module("ffn", NormalizedGate())
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mean": with_mean,
    "late mean": lambda: with_mean(5),
    "own mean": lambda: with_mean(persistent=False),
    "gate": with_gate,
}


def make_plan(style: Style | None) -> ParallelPlan:
    """Return the plan of a model with gates whose normalisation has a style."""
    tensor: dict[str, Style] = {name: each for name, each in PLAN.tensor.items() if ".ffn." not in name}
    tensor |= {"layers.*.ffn.up": "colwise", "layers.*.ffn.down": "rowwise"}
    if style:
        tensor["layers.*.ffn.norm"] = style
    return ParallelPlan(tensor=tensor, stages=PLAN.stages)


def train(ranks: Ranks, layout: str, model: str, style: Style | None = None) -> str:
    """Train in a layout, in turn if this rank is alone; return the reason for which it was refused, if so."""
    learner, parallel = Learner(model=MODELS[model]), Parallel.from_text(layout)
    place = make_layout(ranks, parallel) if ranks.size > 1 else Layout(parallel, ranks, None)
    trainee = ParallelTrainee(learner, place, make_plan(style) if model == "gate" else PLAN)
    trainee.load(learner.initial(3), ClientState())
    options = LocalOptions(learning_rate=RATE, batch_size=13, epochs=4)
    plan = StepSchedule(num_examples=26, options=options, seed=SEED)
    examples = check_examples(TensorDataset(*llama.examples()), trainee.device)
    gradients = make_gradients(place, SEED)
    algorithm = StepAlgorithm(loss=make_loss(learner))
    stepper = Stepper(trainee.parameters(), options, RATE, algorithm, lambda values: torch.optim.SGD(values, RATE))
    done = 0
    try:
        for _ in gradients.compute_steps(trainee, stepper, plan, examples):
            stepper.step()
            done += 1
    except TrainingError as exc:
        return f"after {done} steps: {exc}"
    return ""


def train_all(ranks: Ranks, cases: list[tuple[str, str, Style | None]]) -> list[str]:
    """Do several trainings, one after the other."""
    return [train(ranks, *case) for case in cases]
