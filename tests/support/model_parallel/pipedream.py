"""What the tests of PipeDream run: linear stages on several ranks or on one, and the small Llama."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat.client_state import ClientState
from fedplat.job.tables import WarmStart
from fedplat.model import Parameters
from fedplat.parallel import Parallel
from fedplat.pytorch import server
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel import Layout, ParallelPlan, ParallelTrainee, make_layout
from fedplat.pytorch.parallel.pipedream import PipeDreamGradients
from fedplat.pytorch.server import ServerTrainer, TrainingRun
from fedplat.pytorch.training import LocalOptions, MakeOptimizer, StepSchedule, check_examples
from fedplat.pytorch.training.learner import Learner, make_loss
from fedplat.pytorch.training.stepper import StepAlgorithm, Stepper
from support.model_parallel.llama import PLAN, Llama, examples

RATE, SEED = 0.05, 7
OPTIONS = LocalOptions(learning_rate=RATE, batch_size=4, epochs=3)


def linear_stages() -> nn.Module:
    """Three linear layers: two stages have one and two of them, three stages one each."""
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(3, 2))


def dropout_stages() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.3)), nn.Linear(3, 2))


def points() -> TensorDataset:
    """Examples, of which the last batch of an epoch has two."""
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(18, 6, generator=generator), torch.randn(18, 2, generator=generator))


LINEAR = Learner(model=linear_stages, loss=nn.functional.mse_loss)
DROPOUT = dataclasses.replace(LINEAR, model=dropout_stages)
PLAN_OF_LAYERS = ParallelPlan(stages=("*",))
LEARNERS = {"linear": LINEAR, "dropout": DROPOUT}


def make_place(ranks: Ranks, num_stages: int) -> Layout:
    """The layout of all ranks, or that of one process that has all stages."""
    parallel = Parallel(pipeline=num_stages, schedule="pipedream")
    return make_layout(ranks, parallel) if ranks.size == num_stages else Layout(parallel, ranks, None)


@dataclasses.dataclass
class Run:
    """A training with PipeDream, and what it has found."""

    trainee: ParallelTrainee
    gradients: PipeDreamGradients
    stepper: Stepper
    plan: StepSchedule
    data: TensorDataset
    losses: list[float] = dataclasses.field(default_factory=list[float])
    versions: dict[int, int] = dataclasses.field(default_factory=dict[int, int])

    def steps(self) -> Iterator[int]:
        """Train; yield after each step."""
        found = self.gradients.compute_steps(
            self.trainee, self.stepper, self.plan, check_examples(self.data, self.trainee.device)
        )
        for scores in found:
            self.stepper.step()
            self.losses.append(self.gradients.sum_scores(scores).means()["loss"])
            for stage, held in self.gradients.versions.items():
                self.versions[stage] = max(len(held), self.versions.get(stage, 0))
            yield len(self.losses)

    def digest(self, model: Parameters) -> str:
        """The digest of the whole model, on rank 0."""
        self.trainee.save(model, ClientState())
        return hashlib.sha256(model.to_bytes()).hexdigest() if self.trainee.layout.ranks.is_first else ""


def prepare(
    place: Layout, learner: Learner, plan: ParallelPlan, data: TensorDataset, model: Parameters, **changes: Any
) -> Run:
    begin, drain_every = changes.pop("begin", 0), changes.pop("drain_every", 0)
    options = msgspec.structs.replace(OPTIONS, **changes)
    trainee = ParallelTrainee(learner, place, plan)
    trainee.load(model, ClientState())
    sgd: MakeOptimizer = lambda values: torch.optim.SGD(values, options.learning_rate, options.momentum)  # noqa: E731
    algorithm = StepAlgorithm(loss=make_loss(learner))
    stepper = Stepper(trainee.parameters(), options, options.learning_rate, algorithm, make_optimizer=sgd)
    schedule = StepSchedule(num_examples=len(data), options=options, seed=SEED)
    return Run(trainee, PipeDreamGradients(place, SEED, begin, drain_every), stepper, schedule, data)


def train_layers(ranks: Ranks, num_stages: int, learner: str = "linear", **changes: Any) -> dict[str, Any]:
    """Train linear stages; return the weights, the losses and the number of versions of each stage."""
    made = LEARNERS[learner]
    model = made.initial(1)
    run = prepare(make_place(ranks, num_stages), made, PLAN_OF_LAYERS, points(), model, **changes)
    for _ in run.steps():
        pass
    digest = run.digest(model)
    weights = {name: model[name].tolist() for name in model}
    return {"weights": weights, "losses": run.losses, "versions": run.versions, "digest": digest}


def resume(ranks: Ranks, num_stages: int) -> list[str]:
    """The digest of a training, and of one that ends at a drained pipeline and continues from its weights."""
    place = make_place(ranks, num_stages)
    model = DROPOUT.initial(1)
    saved = DROPOUT.initial(1)
    whole = prepare(place, DROPOUT, PLAN_OF_LAYERS, points(), model, drain_every=4)
    for done in whole.steps():
        if done == 8:
            whole.trainee.save(saved, ClientState())
            saved = Parameters.from_bytes(ranks.broadcast(saved.to_bytes()))
    again = prepare(place, DROPOUT, PLAN_OF_LAYERS, points(), saved, drain_every=4, begin=8)
    for _ in again.steps():
        pass
    assert again.losses == whole.losses[8:]
    return [whole.digest(model), again.digest(model)]


def train_llama(ranks: Ranks, num_stages: int) -> dict[str, Any]:
    """Train the small Llama."""
    learner = Learner(model=lambda: Llama(0.1))
    model = learner.initial(3)
    place = make_place(ranks, num_stages)
    options = {"batch_size": 13, "epochs": 8, "learning_rate": 0.3, "momentum": 0.5}
    run = prepare(place, learner, PLAN, TensorDataset(*examples()), model, **options)
    for _ in run.steps():
        pass
    return {"losses": run.losses, "digest": run.digest(model)}


def refuse(ranks: Ranks, num_stages: int) -> list[str]:
    """What is said about options that a pipeline without a common step cannot have; then nothing waits."""
    said: list[str] = []
    for changes in ({"max_grad_norm": 1.0}, {"accumulate": 2}, {"precision": "bf16"}):
        run = prepare(make_place(ranks, num_stages), LINEAR, PLAN_OF_LAYERS, points(), LINEAR.initial(1), **changes)
        try:
            next(run.steps())
        except ValueError as exc:
            said.append(str(exc))
    ranks.barrier()
    return said


def fail(ranks: Ranks, num_stages: int) -> str:
    """The last stage fails in its sixth batch, and its process ends; what the others see."""
    calls: list[int] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) == 6:
            raise ArithmeticError
        return nn.functional.mse_loss(outputs, targets)

    learner = dataclasses.replace(LINEAR, loss=loss)
    run = prepare(make_place(ranks, num_stages), learner, PLAN_OF_LAYERS, points(), learner.initial(1))
    try:
        for _ in run.steps():
            pass
    except ArithmeticError:
        os._exit(1)
    except RuntimeError:  # or a class of it
        return "RuntimeError"
    raise AssertionError


def train_in_pool(ranks: Ranks, folder: str = "", kill_at: int = 0) -> dict[str, Any]:
    """Train the small Llama as a pool does; the last stage is killed after a step, once a checkpoint is complete."""
    done: list[int] = []

    def note(step: int, total: int) -> None:
        done.append(step)
        if step == kill_at and ranks.rank == 1:
            while not any(not path.suffix for path in Path(folder).glob("step-*")):  # threads write it
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGKILL)

    options = WarmStart(
        trainer="t", batch_size=8, learning_rate=0.3, momentum=0.5, epochs=3, checkpoint_every=4, seed=SEED
    )
    work = TrainingRun(
        options=options,
        num_ranks=2,
        parallel=Parallel(pipeline=2, schedule="pipedream"),
        checkpoints=Path(folder) if folder else None,
        note=note,
    )
    trainer = ServerTrainer(model=lambda: Llama(0.1), data=TensorDataset(*examples()), plan=PLAN)
    model = trainer.learner.initial(3)
    try:
        trained = server.train(ranks, trainer, model, work)
    except RuntimeError:
        os._exit(1)  # as a rank of a pool
    assert trained is not None
    digest = hashlib.sha256(model.to_bytes()).hexdigest() if ranks.is_first else ""
    return {"losses": trained.losses.tolist(), "digest": digest, "done": done}
