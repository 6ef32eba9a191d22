"""The parts of a step that ranks compute, and what all gradient computations of a layout have in common.

A part is cut into micro-batches of equal size, because the stages of a pipeline exchange tensors of fixed sizes; the
last ones are padded with copies of the last example, which have no weight. The size is that of the largest batch of a
plan, so that short batches have it too. Random numbers are seeded by the step, the part, the batch, the micro-batch and
the stage. All of this is the same in a pipeline and in a process that computes the stages in turn; so both have the
same bits.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from fedplat.config.decoding import prepare_type
from fedplat.errors import TrainingError
from fedplat.parallel import Parallel
from fedplat.pytorch import training
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel.apply import TENSOR, Layout
from fedplat.pytorch.parallel.divided_module import DividedModule
from fedplat.pytorch.training.stepper import Stepper


class RankBatch(NamedTuple):
    """One logical rank's part of one batch of a step."""

    rank: int
    seed: int
    indices: training.Indices
    share: float
    """Share of the step's examples; 0 if there are fewer examples than ranks, and `indices` repeats another rank's."""


def divide(
    plan: training.StepSchedule, num_ranks: int, wanted: Sequence[int], seed: int, begin: int = 0
) -> Iterator[list[RankBatch]]:
    """Yield, for each step from `begin` on, the parts of the logical ranks `wanted` out of `num_ranks`.

    Each batch of a step is cut into as many parts as there are logical ranks, as equal as possible.
    """
    for number, step in enumerate(itertools.islice(plan.steps(), begin, None), begin):
        batches = [np.array_split(batch, num_ranks) for batch in plan.batches_of(step)]
        yield [
            _part(seed, number, rank, place, batch[rank], step)
            for rank in wanted
            for place, batch in enumerate(batches)
        ]


def _part(
    seed: int, number: int, rank: int, place: int, indices: training.Indices, step: training.Indices
) -> RankBatch:
    own = int(np.random.SeedSequence([seed, number, rank, place]).generate_state(1)[0])
    return RankBatch(rank, own, indices if len(indices) else step[:1], len(indices) / len(step))


def choose_micro_batch_size(plan: training.StepSchedule, parallel: Parallel) -> int:
    """Return the number of examples in each micro-batch of a plan."""
    largest = min(plan.batch_size, plan.num_examples)
    return math.ceil(math.ceil(largest / parallel.num_parts) / parallel.num_micro_batches)


def pad_micro_batch(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return `num_rows` rows: the given ones, and copies of the last."""
    missing = num_rows - len(rows)
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows


def stage_seed(part: RankBatch, micro_batch: int, stage: int) -> int:
    """Return the seed of the random numbers of a micro-batch in a stage."""
    return int(np.random.SeedSequence([part.seed, micro_batch, stage]).generate_state(1)[0])


@dataclass
class PartLoss:
    """The losses of the micro-batches of one part, which are called in their order; adds up their scores."""

    loss: training.Loss
    stepper: Stepper
    part: RankBatch
    size: int
    scores: training.Scores
    num_called: int = field(default=0, init=False)

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the examples of a micro-batch, weighted by their share of the step's examples."""
        part, first = self.part, self.num_called * self.size
        self.num_called += 1
        num_rows = min(self.size, max(0, len(part.indices) - first)) if part.share else 0
        shown = max(1, num_rows)  # an empty micro-batch needs a loss too: all stages compute its backward pass
        with self.stepper.autocast():
            loss = self.loss(outputs[:shown], targets[:shown])
        if num_rows:
            self.scores.add(loss, outputs[:shown], targets[:shown])
        step_size = round(len(part.indices) / part.share) if part.share else 1
        return self.stepper.weigh(loss, num_rows / step_size)


def compute_stage(
    stage: nn.Module, values: torch.Tensor, seed: int, device: torch.device, autocast: AbstractContextManager[object]
) -> torch.Tensor:
    """Return the outputs of a stage for a micro-batch. Raises `TypeError` unless they are one tensor."""
    with training.use_seed(device, seed), autocast:
        outputs = stage(values)
    if not isinstance(outputs, torch.Tensor):
        raise TypeError(f"a stage returned a {type(outputs).__name__}; expected one tensor")
    return outputs


class _Boundary(torch.autograd.Function):
    """The identity, with contiguous values and gradients, as messages have."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        return args[0].contiguous()

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> torch.Tensor:
        return grad_outputs[0].contiguous()


def cross_boundary(values: torch.Tensor) -> torch.Tensor:
    """Return what the next stage gets of the outputs of a stage; their gradients cross the boundary alike."""
    return _Boundary.apply(values) if values.is_floating_point() else values.contiguous()  # type: ignore[no-any-return]


def sum_scores(ranks: Ranks, scores: training.Scores) -> training.Sums:
    """Return the sum of the scores over all ranks, on all of them."""
    parts = ranks.all_gather(msgspec.msgpack.encode(scores.sums()))
    return training.Sums.total(msgspec.msgpack.decode(each, type=prepare_type(training.Sums)) for each in parts)


class LayoutGradients(training.GradientComputation):
    """Base of gradient computations whose ranks compute parts of every batch, and clip their gradients together."""

    def __init__(self, layout: Layout, seed: int, begin: int, parts: Sequence[int]) -> None:
        """`parts` are the numbers of those of this process; the first `begin` steps of a plan are skipped."""
        self._layout, self._seed, self._begin, self._own = layout, seed, begin, parts

    @override
    def smallest_batch(self, trainee: training.Trainee) -> int:
        return 1

    @override
    def compute_steps(
        self, trainee: training.Trainee, stepper: Stepper, plan: training.StepSchedule, examples: training.Examples
    ) -> Iterator[training.Scores]:
        """Compute the gradients of each step.

        Raises `TrainingError` on all ranks if they do not keep the same values, see `ReplicaCheck`: after the first
        step, and after the last one for what begins later.
        """
        assert isinstance(trainee, DividedModule)
        check = ReplicaCheck(trainee)
        steps = self.compute_gradients(trainee, stepper, plan, examples)
        for number, scores in enumerate(steps, self._begin):
            if number in (self._begin, plan.num_steps - 1):
                check.run()
            yield scores

    @abstractmethod
    def compute_gradients(
        self, trainee: DividedModule, stepper: Stepper, plan: training.StepSchedule, examples: training.Examples
    ) -> Iterator[training.Scores]:
        """Compute the gradients of each step; yield the step's scores of this process before the weights change."""
        ...

    def parts(self, plan: training.StepSchedule) -> Iterator[list[RankBatch]]:
        """Yield the parts of each step that this process computes, ordered by their numbers."""
        return divide(plan, self._layout.parallel.num_parts, self._own, self._seed, self._begin)

    @override
    def sum_scores(self, scores: training.Scores) -> training.Sums:
        return sum_scores(self._layout.ranks, scores)

    @override
    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> object:
        return clip_gradients(parameters, max_norm, self._layout)

    @property
    def _counts(self) -> bool:
        """True if this rank's scores count: those of tensor ranks with the same part are the same."""
        mesh = self._layout.mesh
        return mesh is None or mesh.get_local_rank(TENSOR) == 0


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, layout: Layout) -> float:
    """Scale the gradients so that their total L2 norm is at most `max_norm`; return the norm. All ranks call it.

    The squares of each rank's values are divided by the number of ranks that have the same values, and added up over
    all ranks; so no rank needs a whole tensor.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    squares = 0.0
    for gradient in gradients:
        squares += float(_local(gradient).double().square().sum().item()) / _copies(gradient, layout)
    total = torch.tensor([squares], dtype=torch.float64)
    distributed.all_reduce(total, group=layout.ranks.group)
    norm = math.sqrt(total.item())
    if (scale := max_norm / (norm + 1e-6)) < 1:  # as `nn.utils.clip_grad_norm_` does
        for gradient in gradients:
            _local(gradient).mul_(scale)
    return norm


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(tensor: torch.Tensor, layout: Layout) -> int:
    """Return the number of ranks that have the same values as this one."""
    ranks = layout.ranks.size if layout.mesh is None else layout.ranks.size // layout.parallel.pipeline
    if not isinstance(tensor, DTensor):
        return ranks
    sizes = tensor.device_mesh.shape
    # Not `is_shard()`: it is False where tensor ranks and sharded ranks cut the same dimension (`_StridedShard`).
    return ranks // math.prod(
        size for size, place in zip(sizes, tensor.placements, strict=True) if not place.is_replicate()
    )


_DIFFERENCE = 0.1
"""Part of a gradient's norm by which ranks may differ: far above rounding, and below what a partial sum differs by."""
_NOISE = 1e-6
"""Part of the norm of all gradients below which one is rounding only."""
_WINDOW = 1 << 20


class ReplicaCheck:
    """Compares the buffers of a module with those before a training, and gradients between tensor ranks."""

    def __init__(self, trainee: DividedModule) -> None:
        self._trainee, self._before = trainee, _digest_buffers(trainee)

    def run(self) -> None:
        """Check the ranks after the backward passes of a step; all of them call it.

        Raises `TrainingError`, on all ranks alike, if a forward pass has changed a buffer of the model, or if a
        gradient that all tensor ranks should have is a part of it on each of them.
        """
        reason = self._find_changed_buffer() or ""
        partial = self._find_partial_gradient()  # in any case, since the other ranks take part
        reasons = self._trainee.layout.ranks.all_gather((reason or partial).encode())
        if found := next((each.decode() for each in reasons if each), ""):
            raise TrainingError(found)

    def _find_changed_buffer(self) -> str:
        now = _digest_buffers(self._trainee)
        for name in sorted(now.keys() | self._before.keys()):
            if now.get(name) != self._before.get(name):
                return (
                    f"the buffer {name!r} changes in the forward pass. Each rank of a layout computes a part of every "
                    "batch, so the values of its replicas would differ. Expected a module without such values, a "
                    "buffer with persistent=False, which is not a part of the model, or a training without a layout"
                )
        return ""

    def _find_partial_gradient(self) -> str:
        layout = self._trainee.layout
        if layout.mesh is None or layout.parallel.tensor == 1:
            return ""
        parameters = self._trainee.parameters()
        gradients = {name: _local_gradient(each) for name, each in parameters.items() if _is_replicated(each)}
        ranks = Ranks(layout.ranks.device, layout.mesh.get_group(TENSOR))
        mine = msgspec.msgpack.encode([_checksum(each) for each in gradients.values()])
        sums = [msgspec.msgpack.decode(each, type=prepare_type(list[int])) for each in ranks.all_gather(mine)]
        total = 0.0
        for name, *found in zip(gradients, *sums, strict=True):
            if len(set(found)) == 1:  # equal bits, as almost always
                continue
            total = total or math.sqrt(sum(_square(_local_gradient(each)) for each in parameters.values()))
            if _is_partial(gradients[name], ranks, _NOISE * total):
                return (
                    f"the gradient of {name!r} differs between tensor ranks, each of which computes a part of it: "
                    f"{name.rpartition('.')[0]!r} is between columns and rows. Expected the style "
                    '"replicated_with_grad_allreduce" for it in the plan, not "sequence_parallel" and not none'
                )
        return ""


def _digest_buffers(trainee: DividedModule) -> dict[str, bytes]:
    """Return a digest of each buffer that is a part of the model."""
    found: dict[str, bytes] = {}
    for stage in trainee.stages:
        in_model = stage.state_dict().keys()
        for name, buffer in stage.named_buffers():
            if name in in_model:
                values = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                found[name] = hashlib.blake2b(values.numpy().data, digest_size=16).digest()
    return found


def _is_replicated(parameter: torch.Tensor) -> bool:
    """Return whether all tensor ranks have the same values of a parameter."""
    if not isinstance(parameter, DTensor):
        return True
    names = parameter.device_mesh.mesh_dim_names or ()
    return all(place.is_replicate() for name, place in zip(names, parameter.placements, strict=True) if name == TENSOR)


def _local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's values of a gradient; zeros without one."""
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    return (gradient.to_local() if isinstance(gradient, DTensor) else gradient).detach().reshape(-1)


def _checksum(values: torch.Tensor) -> int:
    """Return the sum of the bits of values, as integers."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for window in values.split(_WINDOW):
        total += window.float().view(torch.int32).sum(dtype=torch.int64)
    return int(total.item())


def _square(values: torch.Tensor) -> float:
    return float(values.double().square().sum().item())


def _is_partial(gradient: torch.Tensor, ranks: Ranks, noise: float) -> bool:
    """Return whether that of any rank differs from the mean of all by more than rounding; all ranks call it."""
    values = gradient.to(ranks.device, torch.float32)
    mean = values / ranks.size
    distributed.all_reduce(mean, group=ranks.group)
    difference = math.sqrt(_square(values - mean))
    is_partial = difference > max(noise, _DIFFERENCE * math.sqrt(_square(mean)))
    return b"1" in ranks.all_gather(b"1" if is_partial else b"0")
