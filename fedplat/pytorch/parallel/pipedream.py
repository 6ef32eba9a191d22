"""PipeDream: an asynchronous pipeline, in which every batch is a step and no stage waits for the pipeline to empty.

Source: Harlap, Narayanan et al. 2018, "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", arXiv 1806.03377
(SOSP 2019 as Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training"). With weight stashing,
stage i of n computes both passes of a batch with the weights that were its newest ones at the forward pass, so

    w(t+1) = w(t) - rate * gradient of f(w_1(t-n+1), w_2(t-n+2), ..., w_n(t))

where versions below the first one are the first one. Stage i keeps n-i+1 versions: one for each batch that is on its
way from its forward to its backward pass. Vertical sync, which would use version t-n+1 in all stages, is not here.

The stages move in lockstep. In tick t, stage i computes the forward pass of batch t+n-i and then the backward pass of
batch t; meanwhile its neighbours compute those of other batches. Neighbours exchange an activation and a gradient at
once, and at the end of a tick nothing is in transit; so other work of the same ranks may run between two steps.

The pipeline drains where a training may resume: before a checkpoint and at the end, no batch is on its way. The next
n-1 steps then use newer weights than the formula has, because a batch's forward pass cannot use weights from before the
checkpoint. Therefore the result depends on the steps at which the pipeline drains.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.func import functional_call
from typing_extensions import override

from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel import apply, divided_module
from fedplat.pytorch.parallel.parts import RankBatch, divide, sum_scores
from fedplat.pytorch.training import Examples, GradientComputation, Scores, StepSchedule, Sums, Trainee, use_seed
from fedplat.pytorch.training.stepper import Stepper

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MAX_DIMENSIONS = 8
_HEADER_TAG = 1


class PipeDreamGradients(GradientComputation):
    """The gradient computation of the schedule "pipedream": asynchronous, with weight stashing.

    Each rank has one stage; or a process has all of them and computes them in turn, with the same bits. The parameters
    of a stage change after each of its backward passes, by the caller's `stepper.step()`.
    """

    def __init__(self, layout: apply.Layout, seed: int, begin: int = 0, drain_every: int = 0) -> None:
        """Skip the first `begin` steps of a plan; drain the pipeline after every `drain_every` steps (0: at the end).

        A training can resume from a step at which the pipeline drains, with the same bits.
        """
        self._layout, self._seed, self._begin, self._drain_every = layout, seed, begin, drain_every
        self.versions: dict[int, WeightVersions] = {}
        """The versions of the weights of each stage that this process has, while steps are computed."""

    @override
    def smallest_batch(self, trainee: Trainee) -> int:
        return 1

    def parts(self, plan: StepSchedule) -> Iterator[list[RankBatch]]:
        """Yield the only part of each step."""
        return divide(plan, 1, [0], self._seed, self._begin)

    @override
    def compute_steps(
        self, trainee: Trainee, stepper: Stepper, plan: StepSchedule, examples: Examples
    ) -> Iterator[Scores]:
        assert isinstance(trainee, divided_module.DividedModule)
        options = plan.options
        self._layout.parallel.check_steps(
            max_grad_norm=options.max_grad_norm, accumulate=options.accumulate, precision=options.precision
        )
        if stepper.perturbs:
            raise ValueError(
                'schedule = "pipedream": the algorithm needs two passes through the pipeline in each step; expected '
                'schedule = "1f1b", or another algorithm'
            )
        trainee.module.train()
        order = itertools.islice(plan.steps(), self._begin, None)
        has_all = len(trainee.stages) == self._layout.parallel.num_stages
        batches = _Batches(examples, order, trainee.device, self._seed, keeps_targets=has_all)
        stages = [
            _Stage(number, trainee, module, stepper, batches)
            for number, module in zip(self._layout.stages, trainee.stages, strict=True)
        ]
        self.versions = {stage.number: stage.versions for stage in stages}
        if not has_all:
            self._layout.ranks.connect()
        for first, end in self._segments(plan.num_steps):
            if has_all:
                yield from _compute_in_turn(stages, first, end, counts=self._layout.ranks.is_first)
            else:
                yield from _compute_with_neighbours(stages[0], self._layout.ranks, first, end)

    @override
    def sum_scores(self, scores: Scores) -> Sums:
        return sum_scores(self._layout.ranks, scores)

    def _segments(self, num_steps: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of steps between which the pipeline drains."""
        first, every = self._begin, self._drain_every or num_steps
        while first < num_steps:
            end = min(num_steps, (first // every + 1) * every)
            yield first, end
            first = end


class WeightVersions:
    """The versions of a stage's weights that batches between their passes use.

    A version shares memory with the parameters until they change, so n versions need the memory of n.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = {name: value for name, value in parameters.items() if value.requires_grad}
        self._used: dict[int, dict[str, torch.Tensor]] = {}
        self._newest: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        """Return the number of versions in memory, with the parameters themselves."""
        tensors = [each for version in self._used.values() for each in version.values()]
        memory = {each.data_ptr() for each in (*tensors, *self._parameters.values())}
        return len(memory) // max(1, len(self._parameters))

    def use(self, number: int) -> dict[str, torch.Tensor]:
        """Return the newest version, and keep it until the backward pass of the batch with this number."""
        if not self._newest:
            # `data` has a version counter of its own: autograd would refuse weights that the optimizer changes later.
            self._newest = {name: value.data.requires_grad_() for name, value in self._parameters.items()}
        self._used[number] = self._newest
        return self._newest

    def release(self, number: int) -> None:
        """Move a batch's gradients to the parameters, which may change afterwards."""
        version = self._used.pop(number)
        is_used = any(other is self._newest for other in self._used.values())
        for name, parameter in self._parameters.items():
            parameter.grad, version[name].grad = version[name].grad, None
            if is_used:  # the memory stays with the older version
                parameter.data = parameter.data.clone()
        self._newest = {}


class _Batches:
    """The batches of a plan, in order; a process with the first and the last stage reads each once."""

    def __init__(
        self, examples: Examples, order: Iterator[Any], device: torch.device, seed: int, *, keeps_targets: bool
    ) -> None:
        self.device, self._seed, self._keeps_targets = device, seed, keeps_targets
        self._read = examples.batches(order)
        self._targets: dict[int, torch.Tensor] = {}

    def seed(self, number: int, place: int) -> int:
        """Return the seed of a batch's randomness: that of stage `place`, or of the data with -1."""
        return int(np.random.SeedSequence([self._seed, number, place + 1]).generate_state(1)[0])

    def take_inputs(self, number: int) -> torch.Tensor:
        """Return the inputs of the next batch."""
        inputs, targets = self._take(number)
        if self._keeps_targets:
            self._targets[number] = targets
        return inputs

    def take_targets(self, number: int) -> torch.Tensor:
        """Return the targets of a batch: one whose inputs this process has taken, or the next one."""
        return self._targets.pop(number) if number in self._targets else self._take(number)[1]

    def _take(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        with use_seed(self.device, self.seed(number, -1)):  # a dataset may be random
            return next(self._read)


class _Stage:
    """One stage, and its batches between their forward and backward passes."""

    def __init__(
        self, number: int, trainee: divided_module.DividedModule, module: nn.Module, stepper: Stepper, batches: _Batches
    ) -> None:
        self.number, self.delay = number, trainee.layout.parallel.num_stages - 1 - number
        self._learner = trainee.learner
        self.versions = WeightVersions(dict(module.named_parameters()))
        self.scores = Scores()
        self._module, self._stepper, self._batches = _Versioned(module), stepper, batches
        self._open: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, number: int, inputs: torch.Tensor | None) -> torch.Tensor | None:
        """Compute the forward pass of a batch with the newest weights; return what the next stage needs."""
        self._module.weights = self.versions.use(number)
        inputs = self._batches.take_inputs(number) if inputs is None else inputs.detach().requires_grad_()
        if self.delay:
            with use_seed(self._batches.device, self._batches.seed(number, self.number)):
                outputs = self._module(inputs)
            self._open[number] = inputs, outputs
            return outputs.detach()
        targets = self._batches.take_targets(number)
        with use_seed(self._batches.device, self._batches.seed(number, self.number)):
            loss, outputs = self._stepper.forward(self._module, inputs, targets)
        self.scores = self._learner.make_scores()
        self.scores.add(loss, outputs, targets)
        self._open[number] = inputs, loss
        return None

    def backward(self, number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Compute the backward pass of a batch with the weights of its forward pass; return the previous one's part."""
        inputs, outputs = self._open.pop(number)
        if gradient is None:
            self._stepper.backward(outputs, 1.0)
        elif outputs.requires_grad:  # there may be nothing to train in the first stages
            torch.autograd.backward(outputs, gradient)
        self.versions.release(number)
        if not self.number:
            return None
        return torch.zeros_like(inputs) if inputs.grad is None else inputs.grad


class _Versioned(nn.Module):
    """A stage with other weights than its parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._stage = [module]  # not a part, which would have parameters
        self.weights: dict[str, torch.Tensor] = {}

    @override
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional_call(self._stage[0], self.weights, (inputs,))


def _compute_in_turn(stages: Sequence[_Stage], first: int, end: int, *, counts: bool) -> Iterator[Scores]:
    """Compute steps in one process that has all stages; every process of the group does the same."""
    arrived: dict[int, torch.Tensor | None] = {}
    for tick in range(first - stages[0].delay, end):
        sent: dict[int, torch.Tensor | None] = {}
        for stage in stages:
            if first <= (number := tick + stage.delay) < end:
                sent[stage.number + 1] = stage.forward(number, arrived.get(stage.number))
        arrived = sent
        if tick >= first:
            gradient: torch.Tensor | None = None
            for stage in reversed(stages):
                gradient = stage.backward(tick, gradient)
            yield stages[-1].scores if counts else Scores()


def _compute_with_neighbours(stage: _Stage, ranks: Ranks, first: int, end: int) -> Iterator[Scores]:
    """Compute steps on one rank, which has one of the stages."""
    before = _Neighbour(ranks, ranks.rank - 1) if stage.number else None
    after = _Neighbour(ranks, ranks.rank + 1) if stage.delay else None
    inputs: torch.Tensor | None = None
    for tick in range(first - stage.delay - 1, end):  # in the first one, the first activation arrives
        number = tick + stage.delay
        outputs = stage.forward(number, inputs) if first <= number < end else None
        gradient = after.exchange(outputs, expects=tick >= first) if after else None
        if tick >= first:
            gradient = stage.backward(tick, gradient)
        inputs = before.exchange(gradient, expects=first <= number + 1 < end) if before else None
        if tick >= first:
            yield stage.scores


class _Neighbour:
    """The rank of the stage before or after this one."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._rank, self._device = rank, ranks.device
        self._group: Any = ranks.group

    def exchange(self, values: torch.Tensor | None, *, expects: bool) -> torch.Tensor | None:
        """Send values, if any, and return those of the neighbour, if it sends some; it calls this at the same time."""
        works: list[Any] = []
        operations: list[distributed.P2POp] = []
        received: torch.Tensor | None = None
        if values is not None:
            header, values = _describe(values), values.contiguous()
            works.append(distributed.isend(header, group=self._group, group_dst=self._rank, tag=_HEADER_TAG))
            operations.append(self._operation(distributed.isend, values))
        if expects:
            header = torch.empty(2 + _MAX_DIMENSIONS, dtype=torch.int64)
            distributed.recv(header, group=self._group, group_src=self._rank, tag=_HEADER_TAG)
            dtype, dimensions, *shape = header.tolist()
            received = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=self._device)
            operations.append(self._operation(distributed.irecv, received))
        if operations:  # both at once: with NCCL, each of two neighbours could wait for the other to receive first
            works += distributed.batch_isend_irecv(operations)
        for work in works:
            work.wait()
        return received

    def _operation(self, operation: Any, values: torch.Tensor) -> distributed.P2POp:
        return distributed.P2POp(operation, values, group=self._group, group_peer=self._rank)


def _describe(values: torch.Tensor) -> torch.Tensor:
    """Return the dtype and the shape of a tensor: the header of a message, always in the memory of the host."""
    if values.dtype not in _DTYPES or values.ndim > _MAX_DIMENSIONS:
        raise ValueError(
            f"a stage returns values of {values.dtype} in {values.ndim} dimensions; expected floating-point ones in "
            f"at most {_MAX_DIMENSIONS}"
        )
    padding = [0] * (_MAX_DIMENSIONS - values.ndim)
    return torch.tensor([_DTYPES.index(values.dtype), values.ndim, *values.shape, *padding])
