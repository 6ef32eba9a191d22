"""Training and evaluation of one model by all ranks of a client, each with a part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from typing_extensions import override

from fedplat.model import Parameters
from fedplat.parallel import Parallel
from fedplat.pytorch import training
from fedplat.pytorch.distributed import Ranks, find_rank
from fedplat.pytorch.parallel import ParallelPlan, ParallelTrainee, make_gradients, make_layout
from fedplat_client.task import Task, TrainResult
from fedplat_client.trainers import distributed, model_file, strategy


def check_layout(parallel: Parallel, personal: tuple[str, ...] = (), share: training.Share = "all") -> None:
    """Raise `ValueError` if the processes of this client cannot train in the layout."""
    if parallel.schedule == "pipedream":
        raise ValueError('parallel: schedule = "pipedream" is for the server\'s pool; expected another schedule')
    if personal:
        raise ValueError(
            'parallel: a layout cannot train personal tensors, which stay on one process; expected "none" or "data"'
        )
    if share != "all":
        raise ValueError(
            f'parallel: a layout divides all tensors of a module, so it cannot train with share = "{share}"; expected '
            '"none" or "data"'
        )
    place = find_rank()
    size = 1 if place is None else place.size
    try:
        parallel.check_ranks(size)
    except ValueError as exc:
        raise ValueError(
            f"parallel: {exc}. Start one process for each rank, such as: torchrun --standalone --nproc-per-node "
            f"{parallel.num_ranks} PROGRAM, or mpirun -np {parallel.num_ranks} PROGRAM"
        ) from exc
    if size == 1:
        raise ValueError('parallel: a layout is for two ranks or more; expected "none" for a single process')


class LayoutProcesses(distributed.MultiProcess):
    """Training by the ranks of a layout together."""

    def __init__(
        self, ranks: Ranks, parallel: Parallel, plan: ParallelPlan | None, parameters: Parameters, task: Task
    ) -> None:
        """`parameters`: the model in a file of this host, which rank 0 may change; all ranks call this."""
        super().__init__(ranks, task)
        self.parameters = parameters
        self._layout, self._plan, self._base = make_layout(ranks, parallel), plan, task.parameters

    @override
    def make_trainee(self, learner: training.Learner, seed: int, precision: strategy.Precision) -> ParallelTrainee:
        """Make this rank's part of the module."""
        return ParallelTrainee(learner, self._layout, self._plan, precision, seed)

    @override
    def check(self, trainee: training.Trainee, num_examples: int) -> None:
        """Accept any number of examples."""

    @override
    def make_gradients(self, seed: int) -> training.GradientComputation:
        """Return the gradient computation of the layout."""
        return make_gradients(self._layout, seed)

    @override
    def make_result(self, num_examples: int, metrics: Mapping[str, float]) -> TrainResult:
        """Return the update: the trained model, which is in the file, less the task's one.

        Both are files in memory's place: rank 0 has no copy of the model, unless a codec or a mask needs one.
        """
        update = model_file.subtract(self.parameters, self._base) if self._ranks.is_first else self.parameters
        return TrainResult(delta=update, num_examples=num_examples, metrics=metrics)

    def evaluate(
        self, trainee: training.Trainee, examples: training.Examples, batch_size: int, progress: Callable[[float], None]
    ) -> Mapping[str, float]:
        """Return the scores of the model, on all ranks; a cancelled evaluation ends on all of them."""
        after_step = distributed.follow_first(self._ranks, lambda done, total: _report(progress, done / total))
        total = len(examples)
        return training.evaluate(
            trainee,
            self.parameters,
            examples,
            batch_size or total,
            after_batch=lambda fraction: after_step(round(fraction * total), total),
        )


def _report(progress: Callable[[float], None], fraction: float) -> bool:
    progress(fraction)
    return True
