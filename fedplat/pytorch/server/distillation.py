"""FedDF: the aggregate learns the mean prediction of the clients' models.

Source: Lin et al. 2020, "Ensemble Distillation for Robust Model Fusion in Federated Learning", arXiv 2006.07242,
Algorithm 1: the student starts at the average of the clients' models, and each step follows the gradient of
KL(softmax(mean of the teachers' logits) || softmax(the student's logits)) on a batch of unlabelled examples. With a
temperature T both sides are divided by T. The loss is not multiplied by T² as in Hinton et al. 2015, because the
authors' own program does not do so either. Teachers are in evaluation mode, the student in training mode (dropout,
BatchNorm).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from fedplat.client_state import ClientState
from fedplat.job.tables import ServerStep
from fedplat.model import Parameters
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.server.trainer import ServerTrainer
from fedplat.pytorch.server.training import TrainingCurve, TrainingLoop, TrainingRun
from fedplat.pytorch.training import Examples, Indices, Loss, use_seed
from fedplat.pytorch.training.examples import Batch


def distill(
    ranks: Ranks, trainer: ServerTrainer, parameters: Parameters, teachers: Iterable[Parameters], work: TrainingRun
) -> TrainingCurve | None:
    """Train the aggregate in place on the predictions of the teachers, the clients' models, for the trainer's inputs.

    Called like `train`; the options are a `ServerStep`, the data's targets are ignored. `teachers` are iterated once,
    in the same order on every rank. A rank stores the teachers' mean logits of the inputs that it will use, in float32.
    The losses are divergences. Raises `TrainingError` and, without a teacher, `ValueError`.
    """
    assert isinstance(work.options, ServerStep)
    group = ranks.subgroup(work.num_ranks)
    if group is None:
        return None
    student = dataclasses.replace(trainer, loss=divergence(work.options.temperature), accuracy="none")
    loop = TrainingLoop(group, student, work)
    loop.examples = _DistillationExamples(loop.examples, _mean_logits(loop, teachers))
    return loop.run(parameters)


def divergence(temperature: float) -> Loss:
    """Return the loss KL(softmax(teacher / T) || softmax(student / T)), with classes in dimension 1.

    It is the mean over examples, and over positions if there are any. The dimensions are those of `cross_entropy`.
    """

    def loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        target = nn.functional.log_softmax(teacher / temperature, dim=1)
        prediction = nn.functional.log_softmax(student / temperature, dim=1)
        return nn.functional.kl_div(prediction, target, reduction="none", log_target=True).sum(1).mean()

    return loss


class _DistillationExamples:
    """Examples with the teachers' mean logits as targets, in the order in which the training uses them."""

    def __init__(self, examples: Examples, logits: list[torch.Tensor]) -> None:
        self._examples, self._logits = examples, logits

    def __len__(self) -> int:
        return len(self._examples)

    def batches(self, order: Iterable[Indices]) -> Iterator[Batch]:
        for (inputs, _), logits in zip(self._examples.batches(order), self._logits, strict=True):
            yield inputs, logits


def _mean_logits(loop: TrainingLoop, teachers: Iterable[Parameters]) -> list[torch.Tensor]:
    """Return the mean of the teachers' logits for each batch that this process will compute."""
    parts = list(itertools.chain.from_iterable(loop.parts()))
    sums: list[torch.Tensor] = []
    count = 0
    for count, teacher in enumerate(teachers, 1):
        loop.trainee.load(teacher, ClientState())
        module = loop.trainee.module.eval()
        batches = loop.examples.batches(part.indices for part in parts)
        for number, part in enumerate(parts):
            with torch.no_grad(), use_seed(loop.trainee.device, part.seed):  # a dataset may be random
                logits = module(next(batches)[0]).float()
            if count == 1:
                sums.append(logits)
            else:
                sums[number] = sums[number] + logits
    if not count:
        raise ValueError("no client's model to distill; expected at least one")
    return [each / count for each in sums]
