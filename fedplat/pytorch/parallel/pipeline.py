"""The gradients of a step in a layout with a pipeline, by the schedules of `torch.distributed.pipelining`.

GPipe (Huang et al. 2019, arXiv 1811.06965), 1F1B (Narayanan et al. 2021, arXiv 2006.09503), interleaved 1F1B (arXiv
2104.04473) and the V-shaped zero-bubble schedule (Qi et al. 2023, arXiv 2401.10241, Section 6) compute the same sums in
other orders. The first two add up the gradients of micro-batches exactly as one process does.

The first micro-batch passes through all stages before the training, to find the shapes that they exchange. PyTorch
would find them too, but sends them as pickles. A model that cannot be a pipeline is refused there, on all ranks alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, TypeAlias, cast

import msgspec
import torch
from torch import distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from typing_extensions import override

from fedplat.config.decoding import prepare_type
from fedplat.errors import TrainingError
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel import parts
from fedplat.pytorch.parallel.apply import PIPELINE, Layout, sharded_modules
from fedplat.pytorch.parallel.divided_module import DividedModule
from fedplat.pytorch.parallel.parts import LayoutGradients
from fedplat.pytorch.training import Examples, Scores, StepSchedule, use_seed
from fedplat.pytorch.training.stepper import Stepper

Operation: TypeAlias = Literal["forward", "backward", "backward_input", "backward_weight"]
_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleZBVZeroBubble,
}


class PipelineObserver(Protocol):
    """Receives the operations of this rank's stages as they end."""

    def operation(self, kind: Operation, stage: int, micro_batch: int, begin_s: float, end_s: float) -> None:
        """Record one operation; the times are those of `time.monotonic`, which the processes of a host share."""
        ...


class PipelineGradients(LayoutGradients):
    """The gradient computation of a layout with a pipeline, and with any `data`, `shard` and `tensor`.

    With GPipe and 1F1B, and up to two parts, `GradientsInTurn` gives the same bits.
    """

    def __init__(self, layout: Layout, seed: int, begin: int = 0, observer: PipelineObserver | None = None) -> None:
        super().__init__(layout, seed, begin, [layout.part])
        self._observer = observer
        last = layout.parallel.num_stages - 1
        self._reads = not {0, last}.isdisjoint(layout.stages)  # other stages need neither inputs nor targets

    @override
    def compute_gradients(
        self, trainee: DividedModule, stepper: Stepper, plan: StepSchedule, examples: Examples
    ) -> Iterator[Scores]:
        trainee.module.train()
        size = parts.choose_micro_batch_size(plan, self._layout.parallel)
        num_rows = size * self._layout.parallel.num_micro_batches
        batches = examples.batches(part.indices for step in self.parts(plan) for part in step)
        pipeline: _Pipeline | None = None
        for step in self.parts(plan):
            scores = Scores()
            for part in step:
                inputs = targets = None
                if self._reads:
                    with use_seed(trainee.device, part.seed):
                        inputs, targets = (parts.pad_micro_batch(rows, num_rows) for rows in next(batches))
                if pipeline is None:
                    shapes = find_shapes(trainee, None if inputs is None else inputs[:size], stepper.autocast)
                    pipeline = _Pipeline(trainee, stepper, shapes, self._observer)
                loss = parts.PartLoss(trainee.learner.batch_loss, stepper, part, size, trainee.learner.make_scores())
                pipeline.run(part, loss, inputs, targets, reduce=part is step[-1])
                if self._counts:
                    scores.extend(loss.scores)
            yield scores


class Shape(msgspec.Struct, frozen=True):
    """The shape and the data type of what a stage returns; or why it cannot compute.

    Its strides are those of a message, but for the last stage, whose outputs may be views: PyTorch 2.11 refuses outputs
    with other strides than it was told.
    """

    sizes: list[int] = []
    strides: list[int] = []
    dtype: str = ""
    error: str = ""

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """Return a tensor whose values are not set."""
        return torch.empty_strided(self.sizes, self.strides, dtype=getattr(torch, self.dtype), device=device)

    @classmethod
    def of(cls, values: torch.Tensor) -> Shape:
        """Return the shape of a tensor."""
        return cls(list(values.shape), list(values.stride()), str(values.dtype).removeprefix("torch."))


def find_shapes(trainee: DividedModule, inputs: torch.Tensor | None, autocast: Callable[[], Any]) -> list[Shape]:
    """Return the shapes of a micro-batch before the first stage and after each one; all ranks of a pipeline call it.

    `inputs` are a micro-batch, on the rank with the first stage. Raises `TrainingError` on all of them if a stage
    cannot compute by itself.
    """
    layout = trainee.layout
    own = layout.stages
    shapes: list[Shape] = []
    for stage in range(-1, layout.parallel.num_stages):
        found: Shape | None = None
        if stage == -1 and inputs is not None and 0 in own:
            found = Shape.of(inputs)
        elif stage in own:
            values = inputs if stage == 0 else torch.zeros_like(shapes[-1].empty(trainee.device))
            assert values is not None
            found = _try_stage(trainee, stage, values, autocast)
        shapes.append(_tell(layout, found))
        if shapes[-1].error:
            raise TrainingError(
                f"stage {stage} of {layout.parallel.num_stages} cannot compute by itself: {shapes[-1].error}. In a "
                "pipeline, forward has to skip attributes that are None, because their parts are in other stages, to "
                "call the parts in the order of the plan, and to pass one tensor from each part to the next"
            )
    free_stages(trainee)
    return shapes


def _try_stage(trainee: DividedModule, number: int, values: torch.Tensor, autocast: Callable[[], Any]) -> Shape:
    stage = trainee.stages[trainee.layout.stages.index(number)]
    try:
        with torch.no_grad():
            outputs = parts.compute_stage(stage, values, 0, trainee.device, autocast())
    except Exception as exc:  # of any kind, in the code of the model: all ranks raise it in a sentence
        return Shape(error=f"{type(stage).__name__.removeprefix('FSDP')} raises {type(exc).__name__}: {exc}")
    return Shape.of(outputs if number == trainee.layout.parallel.num_stages - 1 else outputs.contiguous())


def _tell(layout: Layout, found: Shape | None) -> Shape:
    """Return what one rank of the pipeline has found, on all of them."""
    ranks = Ranks(layout.ranks.device, pipeline_group(layout))
    contents = ranks.all_gather(b"" if found is None else msgspec.json.encode(found))
    return msgspec.json.decode(next(content for content in contents if content), type=prepare_type(Shape))


def pipeline_group(layout: Layout) -> distributed.ProcessGroup:
    """Return the group of the ranks with the stages of this rank's pipeline."""
    assert layout.mesh is not None
    return layout.mesh.get_group(PIPELINE)


def free_stages(trainee: DividedModule) -> None:
    """Free the parameters of other ranks, which a pipeline keeps between passes."""
    for unit in sharded_modules(trainee.module):
        unit.reshard()


class _Pipeline:
    """The stages of this rank, and PyTorch's schedule of their operations."""

    def __init__(
        self, trainee: DividedModule, stepper: Stepper, shapes: list[Shape], observer: PipelineObserver | None
    ) -> None:
        layout, parallel = trainee.layout, trainee.layout.parallel
        self._stages = [
            _Stage(layout, number, module, shapes, stepper, observer)
            for number, module in zip(layout.stages, trainee.stages, strict=True)
        ]
        self._loss: parts.PartLoss | None = None
        single = len(self._stages) == 1
        self._schedule = _SCHEDULES[parallel.schedule](
            self._stages[0] if single else self._stages,
            n_microbatches=parallel.num_micro_batches,
            loss_fn=self._compute_loss,
            scale_grads=False,
        )
        self._expected = shapes[0].sizes

    def run(
        self,
        part: parts.RankBatch,
        loss: parts.PartLoss,
        inputs: torch.Tensor | None,
        targets: torch.Tensor | None,
        *,
        reduce: bool,
    ) -> None:
        """Add the gradients of a part of a batch; with `reduce`, also add those of other ranks."""
        self._loss = loss
        for stage in self._stages:
            stage.part, stage.reduces = part, reduce
        arguments: tuple[torch.Tensor, ...] = ()
        options: dict[str, Any] = {}
        if self._stages[0].is_first:
            assert inputs is not None
            if list(inputs.shape[1:]) != self._expected[1:]:
                raise ValueError(
                    f"the shape of an example is {list(inputs.shape[1:])}, that of the first one "
                    f"{self._expected[1:]}; a pipeline expects examples of the same shape"
                )
            arguments = (inputs,)
        if self._stages[-1].is_last:
            options["target"] = targets
        self._schedule.step(*arguments, return_outputs=False, **options)
        self._loss = None

    def _compute_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(outputs, targets)


class _Stage(PipelineStage):
    """A stage whose random numbers are seeded for each micro-batch, and whose operations are observed."""

    def __init__(
        self,
        layout: Layout,
        number: int,
        module: nn.Module,
        shapes: list[Shape],
        stepper: Stepper,
        observer: PipelineObserver | None,
    ) -> None:
        last = layout.parallel.num_stages - 1
        before, after = shapes[number].empty("meta"), shapes[number + 1].empty("meta")
        super().__init__(
            module,
            number,
            last + 1,
            layout.ranks.device,
            input_args=before.requires_grad_(number > 0),
            output_args=after.requires_grad_(),
            group=pipeline_group(layout),
        )
        self._stepper, self._observer = stepper, observer
        self.part: parts.RankBatch | None = None
        self.reduces = True
        self._micro_batch = 0

    @override
    def _get_init_p2p_neighbors_ops(self) -> list[distributed.P2POp]:
        # With "zero-bubble", those of PyTorch 2.11 include messages of a rank to itself, which Gloo refuses.
        return [each for each in super()._get_init_p2p_neighbors_ops() if each.group_peer != self.group_rank]

    @override
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._micro_batch = fwd_chunk_id
        forward = super().forward_one_chunk
        return self._observe("forward", fwd_chunk_id, lambda: forward(fwd_chunk_id, *args, **kwargs))

    @override
    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert self.part is not None
        seed = parts.stage_seed(self.part, self._micro_batch, self.stage_index)
        values = cast(torch.Tensor, args[0])
        if not self.is_first:
            values = parts.cross_boundary(values)
        outputs = parts.compute_stage(self.submod, values, seed, self.device, self._stepper.autocast())
        return outputs if self.is_last else outputs.contiguous()

    @override
    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        backward, kind = super().backward_one_chunk, "backward" if full_backward else "backward_input"
        self._observe(kind, bwd_chunk_id, lambda: backward(bwd_chunk_id, *args, full_backward=full_backward, **kwargs))

    @override
    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        backward = super().backward_weight_one_chunk
        self._observe("backward_weight", bwd_chunk_id, lambda: backward(bwd_chunk_id, last_backward))

    @override
    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.reduces:  # otherwise the gradients of the next batch of the step are added first
            super().perform_reduce_grad(grad_scale_factor)

    def _observe(self, kind: Operation, micro_batch: int, operation: Callable[[], Any]) -> Any:
        if self._observer is None:
            return operation()
        self._synchronize()
        begin = time.monotonic()
        result = operation()
        self._synchronize()
        self._observer.operation(kind, self.stage_index, micro_batch, begin, time.monotonic())
        return result

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
