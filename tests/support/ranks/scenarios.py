"""What the tests of data-parallel training do, on one process and on two."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat.errors import TrainingError
from fedplat.job.tables import ServerLearning, ServerStep, WarmStart
from fedplat.metrics import F1
from fedplat.model import Parameters
from fedplat.pytorch import server
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.server import ServerTrainer, TrainingRun

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
NUM_EXAMPLES = 45  # no multiple of anything
KILLED_AT = 7
TABLE: dict[str, Any] = {"trainer": "t", "batch_size": 4, "learning_rate": 0.1}
RICH: dict[str, Any] = {"accumulate": 2, "momentum": 0.9, "weight_decay": 0.01, "max_grad_norm": 1.0, "seed": 3}
SCALED: dict[str, Any] = {"scaling": "linear", "warmup_steps": 5}


def examples(num_examples: int = NUM_EXAMPLES, seed: int = 0) -> TensorDataset:
    """Points of three classes, by where they are."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_examples, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def adam(parameters: Iterable[nn.Parameter], options: ServerLearning) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=options.learning_rate)


def warm(**changes: Any) -> WarmStart:
    return WarmStart(epochs=changes.pop("epochs", 2), **(TABLE | changes))


def step(**changes: Any) -> ServerStep:
    return ServerStep(steps=changes.pop("steps", 7), **(TABLE | changes))


def learned(ranks: Ranks, trainer: ServerTrainer, work: TrainingRun, parameters: Parameters | None = None) -> Arrays:
    """The model after a training, as one vector, and the loss of each step."""
    model = trainer.learner.initial(1) if parameters is None else parameters.copy()
    trained = server.train(ranks, trainer, model, work)
    assert trained is not None
    assert trained.num_examples == NUM_EXAMPLES
    return {**{name: np.array(model[name]) for name in model}, "losses": trained.losses}


def rich(ranks: Ranks, folder: Path) -> Arrays:
    trainer = ServerTrainer(model=dropout_net, data=examples())
    return learned(ranks, trainer, TrainingRun(options=warm(**RICH, **SCALED), num_ranks=2))


def norm(ranks: Ranks, folder: Path) -> Arrays:
    trainer = ServerTrainer(model=norm_net, data=examples)
    return learned(ranks, trainer, TrainingRun(options=warm(accumulate=2), num_ranks=2))


def bf16(ranks: Ranks, folder: Path) -> Arrays:
    trainer = ServerTrainer(model=mlp, data=examples())
    return learned(ranks, trainer, TrainingRun(options=step(precision="bf16"), num_ranks=2, round_number=3))


def halves(ranks: Ranks, folder: Path) -> Arrays:
    trainer = ServerTrainer(model=mlp, data=examples())
    return learned(ranks, trainer, TrainingRun(options=warm(batch_size=8, epochs=5, momentum=0.9), num_ranks=2))


def scored(ranks: Ranks, folder: Path) -> Arrays:
    trainer = ServerTrainer(model=mlp, data=examples, evaluation=examples(1001, 7), metrics=(F1(),))
    found = server.evaluate(ranks, trainer, trainer.learner.initial(1), batch_size=32)
    return {name: np.array(value) for name, value in found.items()}


def distilled(ranks: Ranks, folder: Path) -> Arrays:
    trainer = ServerTrainer(model=dropout_net, data=examples())
    model = trainer.learner.initial(1)
    work = TrainingRun(options=step(method="distill", temperature=2.0), num_ranks=2)
    trained = server.distill(ranks, trainer, model, [trainer.learner.initial(seed) for seed in (2, 3, 4)], work)
    assert trained is not None
    return {**{name: np.array(model[name]) for name in model}, "losses": trained.losses}


def refused(ranks: Ranks, folder: Path) -> Arrays:
    """Data that one rank alone cannot read."""

    def data() -> TensorDataset:
        if ranks.rank == ranks.size - 1:
            raise OSError("no such disk")
        return examples()

    try:
        learned(ranks, ServerTrainer(model=mlp, data=data), TrainingRun(options=warm(), num_ranks=2))
    except TrainingError as exc:
        said = ranks.all_gather(str(exc).encode())
        assert len(set(said)) == 1
        return {"text": np.frombuffer(said[0], np.uint8)}
    raise AssertionError


def fewer(ranks: Ranks, folder: Path) -> Arrays:
    """Fewer logical ranks than there are processes."""
    trainer = ServerTrainer(model=mlp, data=examples())
    model = trainer.learner.initial(1)
    trained = server.train(ranks, trainer, model, TrainingRun(options=step(), num_ranks=1))
    assert (trained is None) == (ranks.rank > 0)
    return {} if trained is None else {"losses": trained.losses}


def traced(ranks: Ranks, folder: Path) -> Arrays:
    trainer = ServerTrainer(model=mlp, data=examples())
    work = TrainingRun(options=step(profile=True), num_ranks=2, traces=folder / "traces")
    return learned(ranks, trainer, work)


def checkpointed(folder: Path, **changes: Any) -> tuple[ServerTrainer, TrainingRun]:
    trainer = ServerTrainer(model=norm_net, data=examples(), optimizer=adam)
    work = TrainingRun(options=warm(checkpoint_every=3), num_ranks=2, checkpoints=folder / "saved", **changes)
    return trainer, work


SCENARIOS: tuple[Callable[[Ranks, Path], Arrays], ...] = (
    rich,
    norm,
    bf16,
    halves,
    scored,
    distilled,
    refused,
    fewer,
    traced,
)


def do(ranks: Ranks, folder: str) -> None:
    """All scenarios; what rank 0 has found is left in the folder."""
    for scenario in SCENARIOS:
        if scenario is traced and ranks.device.type == "cuda":
            continue  # PyTorch's profiler ends a process that was forked, as these are, with a segmentation fault
        with warnings.catch_warnings(action="error"):
            found = scenario(ranks, Path(folder))
        if ranks.is_first:
            np.savez(Path(folder, f"{scenario.__name__}.npz"), allow_pickle=False, **found)


def do_half(ranks: Ranks, folder: str) -> None:
    """Ends without a word in the middle of a training that is saved now and then."""

    def end(done: int, total: int) -> None:
        if done == KILLED_AT:
            while not (Path(folder) / "saved" / "step-000000000006").exists():  # it is written meanwhile
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGKILL)

    learned(ranks, *checkpointed(Path(folder), note=end))
