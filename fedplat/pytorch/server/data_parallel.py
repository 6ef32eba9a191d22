"""The gradients of several ranks: data parallelism, and Hogwild, without locks on weights in shared memory.

Each batch of a step is cut into as many parts as there are logical ranks, as equal as possible. A process computes the
parts of its logical ranks one after the other. DistributedDataParallel adds up the gradients of all processes, bucket
by bucket, during the last backward pass of the step (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training", arXiv 2006.15704, Section 3.2). Each part is weighted by its number of examples, so the sum is
the gradient of the mean over the step, also with short batches.

Source: Niu, Recht, Ré, Wright 2011, "HOGWILD!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent",
arXiv 1106.5730. A worker reads the weights, computes the gradient of a batch of its own, and subtracts it from those
entries that the gradient does not leave as they are. It does not wait for other workers, and sees their updates as soon
as they are written, perhaps some entries of one and not yet the others. The paper assumes that adding to one entry is
atomic. That is not so here: if two workers change an entry at the same moment, one of the two changes can be lost.
Batches whose gradients have no common entries do not disturb each other, and their order has no effect.

Each part of a step's batch is an update, that of one logical rank, at the rate for one rank. With one process the
result is that of these updates one after the other. With several it depends on timing: the same job gives other bits.

Workers do meet now and then: at a checkpoint, while rank 0 copies the weights, and where all ranks exchange losses or
report progress.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from fedplat.errors import TrainingError
from fedplat.job.tables import ServerLearning, WarmStart
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.distributed.shared_memory import share_vector
from fedplat.pytorch.parallel.parts import RankBatch, divide, sum_scores
from fedplat.pytorch.server.trainer import ServerTrainer
from fedplat.pytorch.training import Examples, GradientComputation, Scores, StepSchedule, Sums, Trainee, use_seed
from fedplat.pytorch.training.stepper import Stepper

_SYNC_BUFFERS = "forward_sync_buffers"  # the name since PyTorch 2.13
_NO_BUFFERS: Any = {
    _SYNC_BUFFERS
    if _SYNC_BUFFERS in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


class DataParallelGradients(GradientComputation):
    """The gradient computation of `num_ranks` logical ranks on the processes of a group.

    Gradients are added up in the order of logical ranks within a process, then over processes. So two logical ranks
    give the same bits on one process and on two; more of them may differ by rounding. Randomness in a module or a
    dataset is seeded by `seed`, the step, the logical rank and the batch, never by the process.

    The module's values that are not trained, such as the running statistics of BatchNorm, are those of logical rank 0
    at the end of every step, and all ranks start the next one with them (the meaning of DDP's `broadcast_buffers`).
    """

    def __init__(self, ranks: Ranks, num_ranks: int, seed: int, begin: int = 0) -> None:
        """`ranks` are at most `num_ranks`; the first `begin` steps of a plan are skipped."""
        assert ranks.size <= num_ranks
        self._ranks, self._num_ranks, self._seed, self._begin = ranks, num_ranks, seed, begin
        self._own = np.array_split(np.arange(num_ranks), ranks.size)[ranks.rank].tolist()

    @override
    def smallest_batch(self, trainee: Trainee) -> int:
        smallest = trainee.smallest_batch
        return smallest * self._num_ranks if smallest > 1 else 1

    def check(self, trainee: Trainee, num_examples: int) -> None:
        """Raise `ValueError` if BatchNorm would be trained on a single example."""
        if num_examples < (least := self.smallest_batch(trainee)):
            raise ValueError(
                f"{num_examples} examples for {self._num_ranks} ranks: BatchNorm cannot be trained on a single "
                f"example; expected at least {least}"
            )

    def parts(self, plan: StepSchedule) -> Iterator[list[RankBatch]]:
        """Yield the parts of each step that this process computes."""
        return divide(plan, self._num_ranks, self._own, self._seed, self._begin)

    @override
    def compute_steps(
        self, trainee: Trainee, stepper: Stepper, plan: StepSchedule, examples: Examples
    ) -> Iterator[Scores]:
        module = DistributedDataParallel(
            trainee.module.train(),
            process_group=self._ranks.group,
            init_sync=trainee.base is None,  # a base is equal on all ranks by its digest, and must not be written to
            gradient_as_bucket_view=True,
            **_NO_BUFFERS,
        )
        reduction = _Reduction(self._ranks.group)
        # DDP rejects annotations that are strings; a lambda has no annotations.
        hook = lambda state, bucket: _sum_gradients(state, bucket)  # noqa: E731  # pyright: ignore[reportUnknownLambdaType]
        module.register_comm_hook(reduction, hook)
        buffers = _Buffers(trainee.module, self._ranks, in_turn=len(self._own) > 1)
        steps, ahead = itertools.tee(self.parts(plan))
        batches = examples.batches(part.indices for step in ahead for part in step)
        for step in steps:
            scores = trainee.learner.make_scores()
            buffers.begin()
            for part, following in itertools.zip_longest(step, step[1:]):
                wait = module.no_sync() if following is not None else nullcontext()
                with use_seed(trainee.device, part.seed), wait:
                    inputs, targets = next(batches)
                    loss, outputs = stepper.forward(module, inputs, targets)
                    stepper.backward(loss, part.share)
                if part.share:
                    scores.add(loss, outputs, targets)
                if following is not None and following.rank != part.rank:
                    reduction.set_aside(trainee.parameters().values())
                    buffers.next_rank(part.rank)
            buffers.end()
            yield scores

    @override
    def sum_scores(self, scores: Scores) -> Sums:
        return sum_scores(self._ranks, scores)


@dataclass
class _Reduction:
    """The gradients of logical ranks that this process has already computed in this step."""

    group: distributed.ProcessGroup | None
    earlier: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict[torch.Tensor, torch.Tensor])

    def set_aside(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move the gradients of a logical rank out of the module, until the end of the step."""
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                earlier = self.earlier.get(parameter)
                self.earlier[parameter] = gradient if earlier is None else earlier.add_(gradient)
                parameter.grad = None


def _sum_gradients(reduction: _Reduction, bucket: Any) -> Any:
    """Return the future sum of a `GradBucket` over all logical ranks, without a division; DDP's communication hook."""
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        earlier = reduction.earlier.pop(parameter, None)
        if earlier is not None:
            gradient.add_(earlier)
    work = distributed.all_reduce(bucket.buffer(), group=reduction.group, async_op=True)
    assert work is not None
    return work.get_future().then(_take_reduced)


def _take_reduced(done: Any) -> torch.Tensor:
    return done.value()[0]


class _Buffers:
    """The module's values that are not trained, from step to step."""

    def __init__(self, module: nn.Module, ranks: Ranks, *, in_turn: bool) -> None:
        """`in_turn`: whether this process has several logical ranks."""
        self._buffers = list(module.buffers())
        self._ranks, self._in_turn = ranks, in_turn
        self._before: list[torch.Tensor] = []
        self._first: list[torch.Tensor] = []

    def begin(self) -> None:
        """Keep the values that every logical rank starts with."""
        self._before = [buffer.clone() for buffer in self._buffers] if self._in_turn else []
        self._first = []

    def next_rank(self, done: int) -> None:
        """Reset the module to the initial values of the step, after logical rank `done`."""
        if not done:
            self._first = [buffer.clone() for buffer in self._buffers]
        self._set(self._before)

    def end(self) -> None:
        """Set the values of logical rank 0 on all ranks."""
        if self._first:
            self._set(self._first)
        if self._ranks.size == 1:
            return
        for dtype in sorted({buffer.dtype for buffer in self._buffers}, key=str):
            same = [buffer for buffer in self._buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.flatten() for buffer in same])
            distributed.broadcast(flat, group_src=0, group=self._ranks.group)
            parts = flat.split([buffer.numel() for buffer in same])
            for buffer, part in zip(same, parts, strict=True):
                buffer.copy_(part.view_as(buffer))

    def _set(self, values: list[torch.Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)


_ALIGNMENT = 16
"""Entries: PyTorch's own tensors start at multiples of 64 bytes, and products may have other bits elsewhere."""


class HogwildGradients(GradientComputation):
    """The batches of a worker, with an update of the weights for each logical rank and step.

    The caller's `stepper.step()` is the last update of a step; the others are made here.
    """

    def __init__(self, ranks: Ranks, num_ranks: int, seed: int, begin: int = 0, meet_every: int = 1) -> None:
        """Skip the first `begin` steps; the workers wait for each other after every `meet_every` steps."""
        assert ranks.size <= num_ranks
        self._ranks, self._num_ranks, self._seed, self._begin = ranks, num_ranks, seed, begin
        self._meet_every = meet_every
        self._own = np.array_split(np.arange(num_ranks), ranks.size)[ranks.rank].tolist()

    @override
    def smallest_batch(self, trainee: Trainee) -> int:
        return 1

    def parts(self, plan: StepSchedule) -> Iterator[list[RankBatch]]:
        """Yield the parts of each step that this worker computes; a short step may have none for it."""
        for step in divide(plan, self._num_ranks, self._own, self._seed, self._begin):
            yield [part for part in step if part.share]

    @override
    def compute_steps(
        self, trainee: Trainee, stepper: Stepper, plan: StepSchedule, examples: Examples
    ) -> Iterator[Scores]:
        module = trainee.module.train()
        steps, ahead = itertools.tee(self.parts(plan))
        batches = examples.batches(part.indices for step in ahead for part in step)
        for done, step in enumerate(steps, self._begin + 1):
            scores = trainee.learner.make_scores()
            updates = [list(parts) for _, parts in itertools.groupby(step, key=lambda part: part.rank)]
            for number, parts in enumerate(updates, 1):
                for part, share in zip(parts, _shares(parts), strict=True):
                    with use_seed(trainee.device, part.seed):
                        inputs, targets = next(batches)
                        loss, outputs = stepper.forward(module, inputs, targets)
                        stepper.backward(loss, share)
                    scores.add(loss, outputs, targets)
                if number < len(updates):
                    stepper.step()
            yield scores
            if done % self._meet_every == 0:
                self._ranks.barrier()  # until then rank 0 copies the weights for a checkpoint

    @override
    def sum_scores(self, scores: Scores) -> Sums:
        return sum_scores(self._ranks, scores)


class LockFreeSgd(torch.optim.Optimizer):
    """SGD that writes only those entries of the weights that a gradient changes.

    With `torch.optim.SGD`, adding zero to an entry could undo what another process has written there meanwhile. The
    product of rate and gradient is rounded before the addition, as in NumPy; `torch.optim.SGD` rounds their sum only.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    _update(weight, weight.grad, group["lr"], group["weight_decay"])


def check_hogwild_trainer(trainer: ServerTrainer, trainee: Trainee) -> None:
    """Raise `ValueError` if workers without locks cannot train the module."""
    kind = type(trainee.module).__name__
    if trainee.device.type != "cpu":
        raise ValueError(
            'method = "hogwild" is for CPUs, and these ranks compute on GPUs; set pool.backend = "gloo", or method = '
            '"sgd"'
        )
    if trainer.optimizer is not None:
        raise ValueError(
            'method = "hogwild" has no state for each weight; expected a trainer without an optimizer of its own, or '
            'method = "sgd"'
        )
    if trainee.has_batch_norm:
        raise ValueError(
            f"{kind} has BatchNorm, whose running statistics each worker would have for itself; expected another "
            'normalisation, such as GroupNorm or LayerNorm, or method = "sgd"'
        )
    for name, parameter in trainee.parameters().items():
        if parameter.dtype != torch.float32:
            raise ValueError(f'{name!r} has {parameter.dtype}; method = "hogwild" trains float32 weights')


def make_hogwild_optimizer(parameters: Iterable[nn.Parameter], table: ServerLearning) -> torch.optim.Optimizer:
    """Return the optimizer of a worker."""
    return LockFreeSgd(parameters, lr=table.learning_rate, weight_decay=table.weight_decay)


def share_parameters(ranks: Ranks, parameters: Iterable[nn.Parameter]) -> None:
    """Move parameters into memory that all processes share, with the values of rank 0; all of them call it.

    Raises `TrainingError`, on all ranks alike, if they cannot share memory.
    """
    parameters = list(parameters)
    sizes = [-(-each.numel() // _ALIGNMENT) * _ALIGNMENT for each in parameters]
    vector = share_vector(ranks, sum(sizes))
    if vector is None:
        raise TrainingError(
            'method = "hogwild" needs ranks that share memory, and these are not on one host, or in containers of '
            'their own; start the pool on one host, or set method = "sgd"'
        )
    for parameter, room in zip(parameters, vector.split(sizes), strict=True):
        view = room[: parameter.numel()].view(parameter.shape)
        if ranks.is_first:
            view.copy_(parameter.detach())
        parameter.data = view
    ranks.barrier()


def is_hogwild_chosen(table: object) -> bool:
    """Return whether a training has `method = "hogwild"`."""
    return isinstance(table, WarmStart) and table.method == "hogwild"


def _shares(parts: Sequence[RankBatch]) -> list[float]:
    total = sum(len(part.indices) for part in parts)
    return [len(part.indices) / total for part in parts]


def _update(weight: torch.Tensor, gradient: torch.Tensor, rate: float, weight_decay: float) -> None:
    """Add to each entry in one operation, so that little time passes between reading and writing it."""
    if gradient.is_sparse:  # of an embedding
        gradient = gradient.coalesce()
        weight.index_add_(0, gradient.indices()[0], gradient.values().mul(-rate))
        return
    if weight_decay:
        gradient = gradient.add(weight, alpha=weight_decay)
    step = gradient.mul(-rate).flatten()
    changed = step.nonzero().flatten()
    if len(changed) == len(step):
        weight.add_(step.view(weight.shape))
    else:
        weight.view(-1).index_add_(0, changed, step[changed])
