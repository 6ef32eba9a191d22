"""What the synchronous gradient computations of a layout have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from typing_extensions import override

from fedplat.pytorch.parallel.divided_module import DividedModule
from fedplat.pytorch.parallel.mesh import TENSOR, Layout
from fedplat.pytorch.parallel.norms import clip_gradients
from fedplat.pytorch.parallel.parts import RankBatch, divide
from fedplat.pytorch.parallel.replicas import ReplicaCheck
from fedplat.pytorch.parallel.scores import sum_scores
from fedplat.pytorch.training import Examples, GradientComputation, Scores, StepSchedule, Sums, Trainee
from fedplat.pytorch.training.stepper import Stepper


class LayoutGradients(GradientComputation):
    """Base of gradient computations whose ranks compute parts of every batch, and clip their gradients together."""

    def __init__(self, layout: Layout, seed: int, begin: int, parts: Sequence[int]) -> None:
        """`parts` are the numbers of those of this process; the first `begin` steps of a plan are skipped."""
        self._layout, self._seed, self._begin, self._own = layout, seed, begin, parts

    @override
    def smallest_batch(self, trainee: Trainee) -> int:
        return 1

    @override
    def compute_steps(
        self, trainee: Trainee, stepper: Stepper, plan: StepSchedule, examples: Examples
    ) -> Iterator[Scores]:
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
        self, trainee: DividedModule, stepper: Stepper, plan: StepSchedule, examples: Examples
    ) -> Iterator[Scores]:
        """Compute the gradients of each step; yield the step's scores of this process before the weights change."""
        ...

    def parts(self, plan: StepSchedule) -> Iterator[list[RankBatch]]:
        """Yield the parts of each step that this process computes, ordered by their numbers."""
        return divide(plan, self._layout.parallel.num_parts, self._own, self._seed, self._begin)

    @override
    def sum_scores(self, scores: Scores) -> Sums:
        return sum_scores(self._layout.ranks, scores)

    @override
    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> object:
        return clip_gradients(parameters, max_norm, self._layout)

    @property
    def _counts(self) -> bool:
        """True if this rank's scores count: those of tensor ranks with the same part are the same."""
        mesh = self._layout.mesh
        return mesh is None or mesh.get_local_rank(TENSOR) == 0
