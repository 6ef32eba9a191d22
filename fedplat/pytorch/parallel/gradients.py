"""The gradients of a step in a layout without a pipeline: every rank computes whole forward passes of its parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from typing_extensions import override

from fedplat.pytorch.parallel.apply import sharded_modules
from fedplat.pytorch.parallel.divided_module import DividedModule
from fedplat.pytorch.parallel.in_turn import GradientsInTurn
from fedplat.pytorch.parallel.layout_gradients import LayoutGradients
from fedplat.pytorch.parallel.mesh import Layout
from fedplat.pytorch.parallel.pipedream import PipeDreamGradients
from fedplat.pytorch.parallel.pipeline import PipelineGradients, PipelineObserver
from fedplat.pytorch.training import Examples, GradientComputation, Scores, StepSchedule, use_seed
from fedplat.pytorch.training.stepper import Stepper


def make_gradients(
    layout: Layout, seed: int, begin: int = 0, observer: PipelineObserver | None = None, drain_every: int = 0
) -> GradientComputation:
    """Return the gradient computation of a layout; the first `begin` steps of a plan are skipped.

    The `observer` receives the operations of a pipeline. A training may resume after every `drain_every` steps, where
    the schedule "pipedream" drains the pipeline.
    """
    if layout.parallel.schedule == "pipedream" and layout.parallel.pipeline > 1:
        return PipeDreamGradients(layout, seed, begin, drain_every)
    if layout.mesh is None:
        return GradientsInTurn(layout, seed, begin)
    if layout.parallel.pipeline > 1:
        return PipelineGradients(layout, seed, begin, observer)
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
        self, trainee: DividedModule, stepper: Stepper, plan: StepSchedule, examples: Examples
    ) -> Iterator[Scores]:
        module = trainee.module.train()
        units = sharded_modules(module)
        steps, ahead = itertools.tee(self.parts(plan))
        batches = examples.batches(part.indices for step in ahead for part in step)
        for step in steps:
            scores = Scores(trainee.learner.count_answers)
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
