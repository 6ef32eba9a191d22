"""The gradients of a step in a layout without a pipeline, by all of its ranks or by fewer processes in turn.

Each process has the whole module, all stages of it. It computes its parts of every batch one after the other: each
micro-batch of a part passes through the stages in their order. Then the processes add up their gradients.

The parts, the micro-batches, their padding, weights and seeds are those of `ParallelGradients` and `PipelineGradients`,
and so is the order of the sums: over the micro-batches and batches of a part, then over parts. Sharded and pipelined
ranks thus give the same bits as one process, with two parts at most; three and more may differ by rounding. Tensor
ranks add up parts of each operation, so losses differ from theirs by about 1e-5.

This is `DataParallelGradients` without DistributedDataParallel, whose overlap of sums with the backward pass is not
worth its limits here: a layout in turn is for the time until the missing ranks are back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import distributed, nn
from typing_extensions import override

from fedplat.pytorch.parallel import apply, divided_module, pipedream, pipeline
from fedplat.pytorch.parallel.apply import Layout
from fedplat.pytorch.parallel.parts import (
    LayoutGradients,
    PartLoss,
    RankBatch,
    choose_micro_batch_size,
    compute_stage,
    cross_boundary,
    pad_micro_batch,
    stage_seed,
)
from fedplat.pytorch.training import Examples, GradientComputation, Scores, StepSchedule, use_seed
from fedplat.pytorch.training.stepper import Stepper


def make_gradients(
    layout: Layout, seed: int, begin: int = 0, observer: pipeline.PipelineObserver | None = None, drain_every: int = 0
) -> GradientComputation:
    """Return the gradient computation of a layout; the first `begin` steps of a plan are skipped.

    The `observer` receives the operations of a pipeline. A training may resume after every `drain_every` steps, where
    the schedule "pipedream" drains the pipeline.
    """
    if layout.parallel.schedule == "pipedream" and layout.parallel.pipeline > 1:
        return pipedream.PipeDreamGradients(layout, seed, begin, drain_every)
    if layout.mesh is None:
        return GradientsInTurn(layout, seed, begin)
    if layout.parallel.pipeline > 1:
        return pipeline.PipelineGradients(layout, seed, begin, observer)
    return ParallelGradients(layout, seed, begin)


class ParallelGradients(LayoutGradients):
    """The gradient computation of a layout with `data`, `shard` and `tensor` ranks.

    The parts of a batch, their seeds and their weights are those of `DataParallelGradients` with as many logical ranks
    as there are replicas and shards; so two parts give the same bits.
    """

    def __init__(self, layout: Layout, seed: int, begin: int = 0) -> None:
        super().__init__(layout, seed, begin, [layout.part])

    @override
    def compute_gradients(
        self, trainee: divided_module.DividedModule, stepper: Stepper, plan: StepSchedule, examples: Examples
    ) -> Iterator[Scores]:
        module = trainee.module.train()
        units = apply.sharded_modules(module)
        steps, ahead = itertools.tee(self.parts(plan))
        batches = examples.batches(part.indices for step in ahead for part in step)
        for step in steps:
            scores = trainee.learner.make_scores()
            for part in step:
                for unit in units:
                    unit.set_requires_gradient_sync(part is step[-1], recurse=False)
                with use_seed(trainee.device, part.seed):
                    inputs, targets = next(batches)
                    loss, outputs = stepper.forward(module, inputs, targets)
                    stepper.backward(loss, part.share)
                if part.share and self._counts:
                    scores.add(loss, outputs, targets)
            yield scores


class GradientsInTurn(LayoutGradients):
    """The gradient computation of a layout on processes that each have the whole module.

    There can be as many processes as the layout has parts, or fewer.
    """

    def __init__(self, layout: Layout, seed: int, begin: int = 0) -> None:
        """Raise `ValueError` for more processes than parts."""
        ranks, parallel = layout.ranks, layout.parallel
        if ranks.size > parallel.num_parts:
            raise ValueError(
                f"{ranks.size} processes for a layout of {parallel.num_ranks} ranks with {parallel.num_parts} parts; "
                "expected one for each rank, or at most one for each part"
            )
        own = np.array_split(np.arange(parallel.num_parts), ranks.size)[ranks.rank].tolist()
        super().__init__(layout, seed, begin, own)

    @override
    def compute_gradients(
        self, trainee: divided_module.DividedModule, stepper: Stepper, plan: StepSchedule, examples: Examples
    ) -> Iterator[Scores]:
        trainee.module.train()
        size = choose_micro_batch_size(plan, self._layout.parallel)
        steps, ahead = itertools.tee(self.parts(plan))
        batches = examples.batches(part.indices for step in ahead for part in step)
        for step in steps:
            scores, sums = Scores(), _Sums(trainee)
            for _, parts in itertools.groupby(step, key=lambda part: part.rank):
                for part in parts:
                    scores.extend(self._compute_part(trainee, stepper, part, size, batches))
                sums.set_aside()
            sums.finish(self._layout)
            yield scores

    def _compute_part(
        self,
        trainee: divided_module.DividedModule,
        stepper: Stepper,
        part: RankBatch,
        size: int,
        batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    ) -> Scores:
        """Add the gradients of a part of a batch; return its scores."""
        count, scores = self._layout.parallel.num_micro_batches, trainee.learner.make_scores()
        if len(trainee.stages) == 1:
            with use_seed(trainee.device, part.seed):
                inputs, targets = next(batches)
                loss, outputs = stepper.forward(trainee.stages[0], inputs, targets)
                stepper.backward(loss, part.share)
            if part.share:
                scores.add(loss, outputs, targets)
            return scores
        with use_seed(trainee.device, part.seed):
            inputs, targets = (pad_micro_batch(rows, size * count).split(size) for rows in next(batches))
        part_loss = PartLoss(trainee.learner.batch_loss, stepper, part, size, scores)
        for number, values in enumerate(inputs):
            for place, stage in enumerate(trainee.stages):
                seed = stage_seed(part, number, place)
                values = cross_boundary(values) if place else values
                values = compute_stage(stage, values, seed, trainee.device, stepper.autocast())
            part_loss(values, targets[number]).backward()
        return scores


class _Sums:
    """The gradients of the parts that this process has already computed in a step."""

    def __init__(self, trainee: divided_module.DividedModule) -> None:
        self._parameters = list(trainee.parameters().values())
        self._earlier: dict[nn.Parameter, torch.Tensor] = {}

    def set_aside(self) -> None:
        """Add the gradients of a part to those of the parts before it."""
        for parameter in self._parameters:
            if (gradient := parameter.grad) is not None:
                earlier = self._earlier.get(parameter)
                self._earlier[parameter] = gradient if earlier is None else earlier.add_(gradient)
                parameter.grad = None

    def finish(self, layout: Layout) -> None:
        """Set the gradients of the step: the sums over the parts of all processes."""
        for parameter in self._parameters:
            gradient = self._earlier.get(parameter)
            if layout.ranks.size > 1:
                gradient = torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
                distributed.all_reduce(gradient, group=layout.ranks.group)
            parameter.grad = gradient
