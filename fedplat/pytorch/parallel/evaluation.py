"""The subject of training in a layout, and its evaluation: each part of the ranks computes some of the batches.

All parts compute as many batches, because sharded ranks gather their parameters together; those beyond the last batch
do not count. In a pipeline, short batches are padded with copies of the last example, which do not count either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import distributed
from typing_extensions import override

from fedplat.pytorch.parallel import apply, divided_module, parts, pipeline
from fedplat.pytorch.training import Examples, Indices, Scores, Sums, iterate_batches


def evaluate_parts(
    trainee: divided_module.DividedModule,
    examples: Examples,
    batch_size: int,
    after_batch: Callable[[int], object] = lambda done: None,
) -> Scores:
    """Return this rank's part of the scores of the model, as it is; all ranks of the layout call it.

    Their sum (`sum_scores`) has each example once. `after_batch` is called with the number of examples that all parts
    together have done. Raises `TrainingError` on all ranks if the model cannot be a pipeline.
    """
    trainee.module.eval()
    scores, chain = trainee.learner.make_scores(trainee.learner.metrics), _Chain(trainee)
    size = min(batch_size, len(examples)) or len(examples)
    mine = _divide(trainee, len(examples), size)
    batches = examples.batches(batch.indices for batch in mine)
    with torch.no_grad():
        for batch in mine:
            inputs = targets = None
            if chain.reads:
                inputs, targets = next(batches)
                inputs = parts.pad_micro_batch(inputs, size) if chain.is_pipeline else inputs
            outputs = chain.forward(inputs)
            if outputs is not None and batch.counts and chain.counts:
                assert targets is not None
                outputs = outputs[: len(targets)]
                scores.add(trainee.learner.batch_loss(outputs, targets), outputs, targets)
            after_batch(batch.done)
    chain.end()
    return scores


class _Batch(NamedTuple):
    indices: Indices
    counts: bool
    done: int
    """The number of examples that all parts have done after it."""


def _divide(trainee: divided_module.DividedModule, num_examples: int, size: int) -> list[_Batch]:
    """Return the batches of this rank's part."""
    layout = trainee.layout
    part, num_parts = layout.part, layout.parallel.num_parts
    if layout.mesh is None:
        part, num_parts = layout.ranks.rank, layout.ranks.size
    order = list(iterate_batches(num_examples, size))
    mine: list[_Batch] = []
    for first in range(0, math.ceil(len(order) / num_parts) * num_parts, num_parts):
        number = first + part
        counts = number < len(order)
        mine.append(_Batch(order[number if counts else 0], counts, min(num_examples, (first + num_parts) * size)))
    return mine


class _Chain:
    """The stages of this rank between those of others, for forward passes."""

    def __init__(self, trainee: divided_module.DividedModule) -> None:
        layout = trainee.layout
        self._trainee, self._own = trainee, dict(zip(layout.stages, trainee.stages, strict=True))
        self._last = layout.parallel.num_stages - 1
        self.is_pipeline = len(self._own) <= self._last
        self.reads = not {0, self._last}.isdisjoint(self._own)
        self.counts = layout.mesh is None or layout.mesh.get_local_rank(apply.TENSOR) == 0
        self._shapes: list[pipeline.Shape] = []
        self._sends: list[tuple[distributed.Work, torch.Tensor]] = []

    def forward(self, inputs: torch.Tensor | None) -> torch.Tensor | None:
        """Compute this rank's stages for a batch; return the outputs of the last stage, on the rank that has it."""
        trainee = self._trainee
        if self.is_pipeline and not self._shapes:
            self._shapes = pipeline.find_shapes(trainee, inputs, nullcontext)
        values = inputs
        for number, stage in self._own.items():
            if number and number - 1 not in self._own:
                values = self._receive(number)
            assert values is not None
            values = parts.compute_stage(stage, values, 0, trainee.device, nullcontext())
            if number < self._last and number + 1 not in self._own:
                self._send(number, values.contiguous())
        return values if self._last in self._own else None

    def end(self) -> None:
        """Wait for the last message, and free the parameters of other ranks."""
        self._wait()
        pipeline.free_stages(self._trainee)

    def _receive(self, stage: int) -> torch.Tensor:
        values = self._shapes[stage].empty(self._trainee.device)
        group = pipeline.pipeline_group(self._trainee.layout)
        distributed.recv(values, group=group, group_src=self._rank(stage - 1))
        return values

    def _send(self, stage: int, values: torch.Tensor) -> None:
        self._wait()
        group = pipeline.pipeline_group(self._trainee.layout)
        work = distributed.isend(values, group=group, group_dst=self._rank(stage + 1))
        assert work is not None
        self._sends.append((work, values))

    def _rank(self, stage: int) -> int:
        """Return the rank in the pipeline that has a stage; see `Layout.stages`."""
        parallel = self._trainee.layout.parallel
        count = parallel.pipeline
        return 2 * count - 1 - stage if parallel.schedule == "zero-bubble" and stage >= count else stage % count

    def _wait(self) -> None:
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()


class ParallelTrainee(divided_module.DividedModule):
    """A `Trainee` whose module is divided among the ranks of a layout; all of them call its methods."""

    @override
    def evaluate(
        self, examples: Examples, batch_size: int, after_batch: Callable[[int], object] = lambda done: None
    ) -> Sums:
        """Return the scores of the model on all examples; each part of the ranks computes some of the batches."""
        return parts.sum_scores(self.layout.ranks, evaluate_parts(self, examples, batch_size, after_batch))
