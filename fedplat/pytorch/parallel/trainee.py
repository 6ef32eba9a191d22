"""The subject of training in a layout."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from fedplat.pytorch.parallel.divided_module import DividedModule
from fedplat.pytorch.parallel.evaluation import evaluate_parts
from fedplat.pytorch.parallel.scores import sum_scores
from fedplat.pytorch.training import Examples, Sums


class ParallelTrainee(DividedModule):
    """A `Trainee` whose module is divided among the ranks of a layout; all of them call its methods."""

    @override
    def evaluate(
        self, examples: Examples, batch_size: int, after_batch: Callable[[int], object] = lambda done: None
    ) -> Sums:
        """Return the scores of the model on all examples; each part of the ranks computes some of the batches."""
        return sum_scores(self.layout.ranks, evaluate_parts(self, examples, batch_size, after_batch))
