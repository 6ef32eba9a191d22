"""Training on the server's own data: a warm start, and steps at the end of rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from fedplat.client_state import ClientState
from fedplat.decoding import prepare_type
from fedplat.job.pool import ServerStep, WarmStart
from fedplat.model import Parameters
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.server import profiling
from fedplat.pytorch.server.checkpoints import Checkpoints, TrainingState
from fedplat.pytorch.server.data_parallel import DataParallelGradients, RankBatch
from fedplat.pytorch.server.lr_schedule import LearningRates, factor
from fedplat.pytorch.server.trainer import ServerTrainer, load_examples, make_on_all_ranks
from fedplat.pytorch.training import Examples, LocalOptions, Scores, StepSchedule, Sums, Trainee
from fedplat.pytorch.training.losses import make_loss
from fedplat.pytorch.training.stepper import StepAlgorithm, Stepper

Losses: TypeAlias = npt.NDArray[np.float64]

_MAX_OPEN_STEPS = 256
"""Maximum number of steps with losses still on the devices, so that no step waits for them."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One training on the server's data, as configured in a job's table.

    The options, `num_ranks` and `round_number` determine the result; the number of processes does not. With
    `checkpoints`, a folder of this training alone, a `WarmStart` is saved there every `options.checkpoint_every` steps
    and at its end, and continues from a checkpoint in it. With `options.profile`, each process writes one trace into
    `traces`. `note(done, total)` is called on each process after each step; an exception from it ends the training
    there.
    """

    options: WarmStart | ServerStep
    num_ranks: int
    """The number of logical ranks, `pool.ranks` of the job."""
    round_number: int = 0
    """0 for a warm start; each round draws its examples anew."""
    checkpoints: Path | None = None
    traces: Path | None = None
    note: Callable[[int, int], object] = lambda done, total: None

    @property
    def seed(self) -> int:
        """The seed of all randomness."""
        return int(np.random.SeedSequence([self.options.seed, self.round_number]).generate_state(1, np.uint64)[0])

    def plan(self, num_examples: int, smallest: int) -> StepSchedule:
        """Return the examples of each step, for a dataset of `num_examples`; a batch has at least `smallest`."""
        table = self.options
        options = LocalOptions(
            epochs=table.epochs if isinstance(table, WarmStart) else 1,
            batch_size=self.num_ranks * table.batch_size,
            accumulate=table.accumulate,
            learning_rate=table.learning_rate,
            max_grad_norm=table.max_grad_norm,
            precision=table.precision,
        )
        plan = StepSchedule(num_examples=num_examples, options=options, seed=self.seed, smallest=smallest)
        if isinstance(table, WarmStart):
            return plan
        epochs = math.ceil(table.steps / plan.steps_per_epoch)
        longer = msgspec.structs.replace(options, epochs=epochs)
        return replace(plan, options=longer, fraction=table.steps / (epochs * plan.steps_per_epoch))


@dataclass(frozen=True, kw_only=True)
class TrainingCurve:
    """The result of a training: the mean loss of each step over its examples, before the weights changed."""

    losses: Losses
    num_examples: int
    """Number of examples in the dataset."""


def train(ranks: Ranks, trainer: ServerTrainer, parameters: Parameters, work: TrainingRun) -> TrainingCurve | None:
    """Train the model in place on the trainer's data, by SGD or the trainer's optimizer.

    Every worker calls it with the same arguments and `parameters` of the same values. The first
    `work.num_ranks` of them train and end with the same model; the others do nothing and return None. An epoch is a
    permutation of the data, cut into steps of `num_ranks * batch_size * accumulate` examples. Its last step has the
    remaining examples, divided among the ranks as evenly as possible, and is a mean over its examples like any other;
    with BatchNorm, a last batch of fewer than two examples per rank is dropped. If the trainer is unusable (its
    functions raise, the model does not fit), all ranks raise `TrainingError`. An error within a step is raised only on
    its rank, and that process should end, since the others wait for it.
    """
    group = ranks.subgroup(work.num_ranks)
    return None if group is None else TrainingLoop(group, trainer, work).run(parameters)


class TrainingLoop:
    """One training on this process, which is one of `ranks`."""

    def __init__(self, ranks: Ranks, trainer: ServerTrainer, work: TrainingRun) -> None:
        """Raise `TrainingError` on all ranks alike."""
        self.ranks, self._trainer, self._work = ranks, trainer, work
        self.trainee, self.examples = make_on_all_ranks(ranks, self._build_trainee)
        self.plan = work.plan(len(self.examples), self._gradients(0).smallest_batch(self.trainee))

    def parts(self) -> Iterator[list[RankBatch]]:
        """Yield the parts of each step that this process computes."""
        return self._gradients(0).parts(self.plan)

    def run(self, parameters: Parameters) -> TrainingCurve:
        """Train the model in place. Raises `TrainingError` if it does not fit."""
        optimizer = make_on_all_ranks(self.ranks, lambda: self._reset(parameters))
        progress = TrainingState(self.trainee.module, optimizer, self.plan.num_steps)
        checkpoints = self._checkpoints()
        if checkpoints is not None:
            newest = checkpoints.newest()
            make_on_all_ranks(self.ranks, lambda: checkpoints.restore(newest, progress))
        rates, curve = LearningRates(optimizer), _Curve(self.ranks, progress)
        algorithm = StepAlgorithm(loss=make_loss(self.trainee.learner))
        trained = self.trainee.parameters()
        stepper = Stepper(trained, self.plan.options, 1.0, algorithm, make_optimizer=lambda _: optimizer)
        steps = self._gradients(progress.done).compute_steps(self.trainee, stepper, self.plan, self.examples)
        traces = self._work.traces if self._work.options.profile else None
        with profiling.trace_steps(traces, self.ranks, self.plan.num_steps - progress.done) as trace:
            self._set(rates, progress)
            for scores in steps:
                stepper.step()
                curve.add(scores)
                if checkpoints is not None and checkpoints.is_due(progress):
                    curve.close()
                    checkpoints.save(progress)
                self._set(rates, progress)
                trace()
                self._work.note(progress.done, self.plan.num_steps)
        curve.close()
        self.trainee.save(parameters, ClientState())
        return TrainingCurve(losses=progress.losses, num_examples=len(self.examples))

    def _build_trainee(self) -> tuple[Trainee, Examples]:
        trainee = Trainee(self._trainer.learner, self.ranks.device, self._work.seed)
        examples = load_examples(self._trainer.data, self.ranks.device)
        self._gradients(0).check(trainee, len(examples))
        return trainee, examples

    def _reset(self, parameters: Parameters) -> torch.optim.Optimizer:
        """Load the model into the module; return a new optimizer."""
        self.trainee.load(parameters, ClientState())
        table, trained = self._work.options, self.trainee.parameters().values()
        if self._trainer.optimizer is not None:
            return self._trainer.optimizer(trained, table)
        return torch.optim.SGD(
            trained, lr=table.learning_rate, momentum=table.momentum, weight_decay=table.weight_decay
        )

    def _gradients(self, begin: int) -> DataParallelGradients:
        return DataParallelGradients(self.ranks, self._work.num_ranks, self._work.seed, begin)

    def _checkpoints(self) -> Checkpoints | None:
        table, folder = self._work.options, self._work.checkpoints
        if folder is None or not isinstance(table, WarmStart):
            return None
        return Checkpoints(folder, table.checkpoint_every, self.ranks)

    def _set(self, rates: LearningRates, progress: TrainingState) -> None:
        table = self._work.options
        rates.multiply(factor(table.scaling, self._work.num_ranks, table.warmup_steps, progress.done))


class _Curve:
    """The loss of each step; the ranks' scores stay on their devices for a while."""

    def __init__(self, ranks: Ranks, progress: TrainingState) -> None:
        self._ranks, self._progress = ranks, progress
        self._open: list[Scores] = []

    def add(self, scores: Scores) -> None:
        """Append one step."""
        self._open.append(scores)
        self._progress.done += 1
        if len(self._open) == _MAX_OPEN_STEPS:
            self.close()

    def close(self) -> None:
        """Write the losses of all steps so far."""
        mine = msgspec.msgpack.encode([scores.sums() for scores in self._open])
        rank_sums = [
            msgspec.msgpack.decode(each, type=prepare_type(list[Sums])) for each in self._ranks.all_gather(mine)
        ]
        first = self._progress.done - len(self._open)
        for step, parts in enumerate(zip(*rank_sums, strict=True), first):
            self._progress.losses[step] = Sums.total(parts).means()["loss"]
        self._open = []
