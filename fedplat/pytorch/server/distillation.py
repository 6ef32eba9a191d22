"""FedDF: the aggregate learns what the clients' models say together.

Source: Lin et al. 2020, "Ensemble Distillation for Robust Model Fusion in Federated Learning", arXiv 2006.07242,
Algorithm 1: the student begins at the average of the clients' models, and each step moves it along the gradient of
KL(softmax(mean of the teachers' logits) || softmax(the student's logits)) on a batch of unlabelled examples. With a
temperature T both sides are divided by T, and the loss is not multiplied by T² (as Hinton et al. 2015 would have it):
so does the authors' own program. Teachers are evaluated, the student is trained (dropout, BatchNorm).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from fedplat.client_state import ClientState
from fedplat.job.pool import ServerStep
from fedplat.model import Parameters
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.server.trainer import ServerTrainer
from fedplat.pytorch.server.training import TrainingCurve, TrainingLoop, TrainingRun
from fedplat.pytorch.training import Examples, Indices, Loss, use_seed
from fedplat.pytorch.training.examples import Batch


def distill(
    ranks: Ranks, trainer: ServerTrainer, parameters: Parameters, teachers: Iterable[Parameters], work: TrainingRun
) -> TrainingCurve | None:
    """Trains the aggregate in place on what the teachers, the clients' models, say of the trainer's inputs.

    Called as `train` is; the table is a `ServerStep`, the data's targets are ignored. `teachers` are gone through once
    and one by one, in the same order on every rank: what a rank keeps are the teachers' mean logits of the inputs that
    it will use, in float32. The losses are divergences. Raises `TrainingError` and, without a teacher, `ValueError`.
    """
    assert isinstance(work.options, ServerStep)
    group = ranks.subgroup(work.num_ranks)
    if group is None:
        return None
    taught = dataclasses.replace(trainer, loss=divergence(work.options.temperature))
    session = TrainingLoop(group, taught, work)
    session.examples = _Taught(session.examples, _mean_logits(session, teachers))
    return session.run(parameters)


def divergence(temperature: float) -> Loss:
    """KL(softmax(teacher / T) || softmax(student / T)), with classes along dimension 1 as in `cross_entropy`.

    It is the mean over examples, and over positions where there are some.
    """

    def loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        given = nn.functional.log_softmax(teacher / temperature, dim=1)
        found = nn.functional.log_softmax(student / temperature, dim=1)
        return nn.functional.kl_div(found, given, reduction="none", log_target=True).sum(1).mean()

    return loss


class _Taught:
    """Examples whose targets are the teachers' mean logits, in the order in which they will be used."""

    def __init__(self, examples: Examples, logits: list[torch.Tensor]) -> None:
        self._examples, self._logits = examples, logits

    def __len__(self) -> int:
        return len(self._examples)

    def batches(self, order: Iterable[Indices]) -> Iterator[Batch]:
        """Inputs and logits of each batch."""
        for (inputs, _), logits in zip(self._examples.batches(order), self._logits, strict=True):
            yield inputs, logits


def _mean_logits(session: TrainingLoop, teachers: Iterable[Parameters]) -> list[torch.Tensor]:
    """The mean of the teachers' logits for each batch that this process will compute."""
    parts = list(itertools.chain.from_iterable(session.parts()))
    sums: list[torch.Tensor] = []
    count = 0
    for count, teacher in enumerate(teachers, 1):
        session.trainee.load(teacher, ClientState())
        module = session.trainee.module.eval()
        batches = session.examples.batches(part.indices for part in parts)
        for number, part in enumerate(parts):
            with torch.no_grad(), use_seed(session.trainee.device, part.seed):  # a dataset may be random
                logits = module(next(batches)[0]).float()
            if count == 1:
                sums.append(logits)
            else:
                sums[number] = sums[number] + logits
    if not count:
        raise ValueError("there is no client's model to distill; expected at least one")
    return [each / count for each in sums]
