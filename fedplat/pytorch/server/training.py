"""Training on the server's own data: a warm start, steps at the end of rounds, and distillation (FedDF).

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
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedplat.client_state import ClientState
from fedplat.config.decoding import prepare_type
from fedplat.job.tables import ServerStep, WarmStart
from fedplat.local_options import NO_PINS, LocalOptions, Pins
from fedplat.model import Parameters
from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel import Layout, make_gradients
from fedplat.pytorch.parallel.profiling import StepProfile, TracedExamples
from fedplat.pytorch.server import data_parallel, profiling
from fedplat.pytorch.server.checkpoints import Checkpoints, TrainingState
from fedplat.pytorch.server.trainer import ServerTrainer, divide_module, find_layout, load_examples, make_on_all_ranks
from fedplat.pytorch.training import (
    Examples,
    GradientComputation,
    Indices,
    Loss,
    Scores,
    StepSchedule,
    Sums,
    Trainee,
    check_base,
    use_seed,
)
from fedplat.pytorch.training.examples import Batch
from fedplat.pytorch.training.learner import make_loss
from fedplat.pytorch.training.stepper import StepAlgorithm, Stepper
from fedplat.pytorch.training.tokenizers import check_tokenizer

Losses: TypeAlias = npt.NDArray[np.float64]

_MAX_OPEN_STEPS = 256
"""Maximum number of steps with losses still on the devices, so that no step waits for them."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One training on the server's data, as configured in a job's table.

    The options, `num_ranks` and `round_number` determine the result; the number of processes does not, except with
    `method = "hogwild"`. With `checkpoints`, a folder of this training alone, a `WarmStart` is saved there every
    `options.checkpoint_every` steps and at its end, and continues from a checkpoint in it. With `options.profile`, each
    process writes one trace into `traces`. `note(done, total)` is called on each process after each step; an exception
    from it ends the training there.
    """

    options: WarmStart | ServerStep
    num_ranks: int
    """The number of logical ranks, `pool.ranks` of the job."""
    parallel: Parallel | None = None
    """How `num_ranks` ranks divide the model; None: each has the whole model."""
    pins: Pins = NO_PINS
    """The digests that the job states in its `[config]`: of the base and of the tokenizer of the trainer."""
    round_number: int = 0
    """0 for a warm start; each round draws its examples anew."""
    checkpoints: Path | None = None
    traces: Path | None = None
    note: Callable[[int, int], object] = lambda done, total: None

    @property
    def num_parts(self) -> int:
        """The number of parts of every batch."""
        return self.num_ranks if self.parallel is None else self.parallel.num_parts

    def find_group(self, ranks: Ranks) -> Ranks | None:
        """Return the ranks that train; None in a process that does not. All processes call it."""
        if self.parallel is None:
            return ranks.subgroup(self.num_ranks)
        layout = find_layout(ranks, self.parallel)
        return None if layout is None else layout.ranks

    @property
    def seed(self) -> int:
        """The seed of all randomness."""
        return int(np.random.SeedSequence([self.options.seed, self.round_number]).generate_state(1, np.uint64)[0])

    def plan(self, num_examples: int, smallest: int) -> StepSchedule:
        """Return the examples of each step, for a dataset of `num_examples`; a batch has at least `smallest`."""
        table = self.options
        options = LocalOptions(
            epochs=table.epochs if isinstance(table, WarmStart) else 1,
            batch_size=self.num_parts * table.batch_size,
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
    profile: StepProfile | None = None
    """What the traced steps spent their time on; on rank 0, if `options.profile` is set and the traces were written."""


def train(ranks: Ranks, trainer: ServerTrainer, parameters: Parameters, work: TrainingRun) -> TrainingCurve | None:
    """Train the model in place on the trainer's data, by SGD or the trainer's optimizer.

    Every worker calls it with the same arguments and `parameters` of the same values. The first `work.num_ranks` of
    them train and end with the same model; the others do nothing and return None. With `work.parallel`, a rank reads
    only its parts of `parameters`, and only those of rank 0 are written: others may be a file that is mapped read-only.

    An epoch is a permutation of the data, cut into steps of `work.num_parts * batch_size * accumulate` examples. Its
    last step has the remaining examples, divided among the ranks as evenly as possible, and is a mean over its examples
    like any other; with BatchNorm, a last batch of fewer than two examples per rank is dropped. If the trainer is
    unusable (its functions raise, the model does not fit), all ranks raise `TrainingError`. An error within a step is
    raised only on its rank, and that process should end, since the others wait for it.
    """
    group = work.find_group(ranks)
    if group is None:
        return None
    layout = None if work.parallel is None else find_layout(ranks, work.parallel)
    return TrainingLoop(group, trainer, work, layout).run(parameters)


class TrainingLoop:
    """One training on this process, which is one of `ranks`; with a layout, they divide the model."""

    def __init__(self, ranks: Ranks, trainer: ServerTrainer, work: TrainingRun, layout: Layout | None = None) -> None:
        """Raise `TrainingError` on all ranks alike."""
        self.ranks, self._trainer, self._work, self._layout = ranks, trainer, work, layout
        self.trainee, self.examples = make_on_all_ranks(ranks, self._build_trainee)
        self.plan = work.plan(len(self.examples), self._gradients(0).smallest_batch(self.trainee))

    def parts(self) -> Iterator[list[data_parallel.RankBatch]]:
        """Yield the parts of each step that this process computes."""
        return self._data_parallel(0).parts(self.plan)

    def run(self, parameters: Parameters) -> TrainingCurve:
        """Train the model in place. Raises `TrainingError` if it does not fit."""
        optimizer = make_on_all_ranks(self.ranks, lambda: self._reset(parameters))
        if data_parallel.is_hogwild_chosen(self._work.options):
            data_parallel.share_parameters(self.ranks, self.trainee.parameters().values())
        progress = TrainingState(self.trainee, optimizer, self.plan.num_steps)
        checkpoints = self._checkpoints()
        if checkpoints is not None:
            newest = checkpoints.newest()
            make_on_all_ranks(self.ranks, lambda: checkpoints.restore(newest, progress))
        rates, curve = LearningRates(optimizer), _Curve(self.ranks, progress)
        algorithm = StepAlgorithm(loss=make_loss(self.trainee.learner))
        trained, options = self.trainee.parameters(), self.trainee.step_options(self.plan.options)
        gradients = self._gradients(progress.done)
        clip = gradients.clip_gradients
        stepper = Stepper(trained, options, 1.0, algorithm, make_optimizer=lambda _: optimizer, clip=clip)
        traces = self._work.traces if self._work.options.profile else None
        examples = self.examples if traces is None else TracedExamples(self.examples)
        steps = gradients.compute_steps(self.trainee, stepper, self.plan, examples)
        # Also after a cancellation: this thread's files must not be in the way of the next training's.
        writing = nullcontext() if checkpoints is None else closing(checkpoints)
        with writing, profiling.trace_steps(traces, self.ranks, self.plan.num_steps - progress.done) as trace:
            self._set(rates, progress)
            profile: StepProfile | None = None
            for scores in steps:
                stepper.step()
                curve.add(scores)
                if checkpoints is not None and checkpoints.is_due(progress):
                    curve.close()
                    checkpoints.save(progress)
                self._set(rates, progress)
                profile = trace() or profile
                self._work.note(progress.done, self.plan.num_steps)
        curve.close()
        self.trainee.save(parameters, ClientState())
        return TrainingCurve(losses=progress.losses, num_examples=len(self.examples), profile=profile)

    def _build_trainee(self) -> tuple[Trainee, Examples]:
        seed, pins = self._work.seed, self._work.pins
        check_tokenizer(self._trainer.tokenizer, pins.tokenizer_sha256)
        if self._layout is not None:
            trainee = divide_module(self._trainer, self._layout, self._work.options.precision, seed)
            return trainee, load_examples(self._trainer.data, self.ranks.device)
        trainee = Trainee(self._trainer.learner, self.ranks.device, seed)
        check_base(trainee.base, pins.base_sha256, is_required=True)
        examples = load_examples(self._trainer.data, self.ranks.device)
        self._data_parallel(0).check(trainee, len(examples))
        if data_parallel.is_hogwild_chosen(self._work.options):
            data_parallel.check_hogwild_trainer(self._trainer, trainee)
        return trainee, examples

    def _reset(self, parameters: Parameters) -> torch.optim.Optimizer:
        """Load the model into the module; return a new optimizer."""
        self.trainee.load(parameters, ClientState())
        table, trained = self._work.options, self.trainee.parameters().values()
        if self._trainer.optimizer is not None:
            return self._trainer.optimizer(trained, table)
        if data_parallel.is_hogwild_chosen(table):
            return data_parallel.make_hogwild_optimizer(trained, table)
        return torch.optim.SGD(
            trained, lr=table.learning_rate, momentum=table.momentum, weight_decay=table.weight_decay
        )

    def _gradients(self, begin: int) -> GradientComputation:
        table, work = self._work.options, self._work
        every = table.checkpoint_every if isinstance(table, WarmStart) else 0
        if data_parallel.is_hogwild_chosen(table):
            return data_parallel.HogwildGradients(self.ranks, work.num_ranks, work.seed, begin, every)
        if self._layout is None:
            return self._data_parallel(begin)
        return make_gradients(self._layout, work.seed, begin, drain_every=every)

    def _data_parallel(self, begin: int) -> data_parallel.DataParallelGradients:
        return data_parallel.DataParallelGradients(self.ranks, self._work.num_parts, self._work.seed, begin)

    def _checkpoints(self) -> Checkpoints | None:
        table, folder = self._work.options, self._work.checkpoints
        if folder is None or not isinstance(table, WarmStart):
            return None
        return Checkpoints(folder, table.checkpoint_every, self.ranks)

    def _set(self, rates: LearningRates, progress: TrainingState) -> None:
        table = self._work.options
        rates.multiply(learning_rate_factor(table.scaling, self._work.num_parts, table.warmup_steps, progress.done))


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
            self._progress.losses[step] = Sums.total(parts).means().get("loss", math.nan)
        self._open = []


Scaling = Literal["none", "linear", "sqrt"]
_GROWTH: Final[Mapping[Scaling, float]] = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def learning_rate_factor(scaling: Scaling, num_ranks: int, warmup_steps: int, step: int) -> float:
    """Return the factor of the learning rate in a step; steps count from 0.

    "linear": the number of ranks k, because a step of k batches replaces k steps (Goyal et al. 2017, arXiv 1706.02677,
    Section 2.1); "sqrt": its root, which keeps the variance of a step (Krizhevsky 2014, arXiv 1404.5997, Section 5).
    Over `warmup_steps` it grows from 1, by the same amount at each step (Goyal et al., Section 2.2).
    """
    full = math.pow(num_ranks, _GROWTH[scaling])
    return full if step >= warmup_steps else 1.0 + (full - 1.0) * step / warmup_steps


class LearningRates:
    """The learning rates of an optimizer, which were configured for one rank."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._base = [float(group["lr"]) for group in self._groups]

    def multiply(self, by: float) -> None:
        """Set the rates of the next step to the configured ones times a factor."""
        for group, base in zip(self._groups, self._base, strict=True):
            group["lr"] = base * by


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
