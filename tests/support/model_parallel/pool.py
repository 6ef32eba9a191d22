"""Training for a server by the ranks of a layout: the small model, with checkpoints and deaths."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat.job.tables import ServerLearning, WarmStart
from fedplat.metrics import F1
from fedplat.parallel import Parallel
from fedplat.pytorch import server
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.server import ServerTrainer, TrainingRun
from support.model_parallel.llama import PLAN, Llama, examples

TABLE: dict[str, Any] = {"trainer": "t", "batch_size": 8, "learning_rate": 0.5, "epochs": 3}


def adam(parameters: Iterable[nn.Parameter], options: ServerLearning) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=options.learning_rate / 100)


def dropped() -> nn.Module:
    return Llama(dropout=0.2)


def make_trainer(*, with_adam: bool = False, dropout: bool = False, metrics: tuple[Any, ...] = ()) -> ServerTrainer:
    return ServerTrainer(
        model=dropped if dropout else Llama,
        data=TensorDataset(*examples()),
        evaluation=TensorDataset(*examples(21)),
        optimizer=adam if with_adam else None,
        plan=PLAN,
        metrics=metrics,
    )


class Stopped(Exception):
    """The end of a training in the middle, on all ranks at once."""


def train(
    ranks: Ranks,
    layout: str,
    options: dict[str, Any] | None = None,
    folder: str = "",
    kill: int = -1,
    stop_at: int = 0,
    **trainer: Any,
) -> dict[str, Any]:
    """Train as a pool does, with an end after step `stop_at`, once a checkpoint is complete.

    The rank `kill` is killed; without one, all ranks stop together.
    """
    parallel = Parallel.from_text(layout)
    done: list[int] = []

    def note(step: int, total: int) -> None:
        done.append(step)
        if step == stop_at and ranks.rank == max(kill, 0):
            while not any(not path.suffix for path in Path(folder).glob("step-*")):
                os.sched_yield()
            if kill >= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        if step == stop_at and kill < 0:
            raise Stopped

    table: dict[str, Any] = TABLE | {"batch_size": 16 // parallel.num_parts} | (options or {})
    work = TrainingRun(
        options=WarmStart(**table),
        num_ranks=parallel.num_ranks,
        parallel=parallel,
        checkpoints=Path(folder) if folder else None,
        note=note,
    )
    made = make_trainer(**trainer)
    model = made.learner.initial(3)
    try:
        trained = server.train(ranks, made, model, work)
    except Stopped:
        return {"done": done}
    except RuntimeError:
        if kill < 0:
            raise
        os._exit(1)  # as a rank of a pool, so that those notice who wait for this one
    if trained is None:
        return {"idle": True}
    digest = hashlib.sha256(model.to_bytes()).hexdigest() if ranks.is_first else ""
    values = model.to_vector()[::97].tolist() if ranks.is_first else []
    return {"losses": trained.losses.tolist(), "digest": digest, "values": values, "done": done}


def train_all(ranks: Ranks, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train several times, one after the other."""
    return [train(ranks, **run) for run in runs]


def evaluate_all(ranks: Ranks, layouts: list[str]) -> list[dict[str, float]]:
    """Evaluate the first model in several layouts."""
    made = make_trainer(metrics=(F1(),))
    model = made.learner.initial(3)
    return [server.evaluate(ranks, made, model, 4, Parallel.from_text(layout)) for layout in layouts]
