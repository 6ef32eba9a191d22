"""Local training with PyTorch (extra "torch")."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from fedplat import errors, extras
from fedplat.local_options import Pins
from fedplat.metrics import Metric
from fedplat.parallel import Parallel
from fedplat_client._state.privacy_ledger import PrivacyLimit
from fedplat_client.task import EvaluateResult, Scalar, Task, TrainResult

try:
    import torch
except ImportError as exc:
    raise errors.MissingExtraError(
        f"TorchTrainer needs PyTorch, which is not installed; install it with: {extras.install_command('torch')}"
    ) from exc
from torch import nn
from torch.utils.data import Dataset

from fedplat.pytorch import training
from fedplat.pytorch.training.tokenizers import check_tokenizer
from fedplat_client.trainers import dp as private
from fedplat_client.trainers.pace import StepClock
from fedplat_client.trainers.strategy import Precision, SingleProcess, TrainingStrategy

if TYPE_CHECKING:
    from fedplat.pytorch.distributed import Backend
    from fedplat.pytorch.parallel import ParallelPlan
    from fedplat_client.trainers.distributed import LaunchedGroup
    from fedplat_client.trainers.layout import LayoutProcesses

Examples: TypeAlias = Dataset[Any] | tuple[Any, Any]
Data: TypeAlias = Examples | Callable[[Task], Examples]
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter], Mapping[str, Scalar]], torch.optim.Optimizer]

_EVALUATION_BATCH_SIZE = 256
_replacements: list[Parallel | Literal["none", "data"]] = []


@dataclass(frozen=True, kw_only=True)
class TorchTrainer:
    """A trainer and an evaluator for a module and a dataset of (input, target) pairs.

    ```python
    trainer = TorchTrainer(model=make_model, data=dataset)
    client.add_trainer("digits", trainer)
    client.add_evaluator("digits", trainer.evaluate)
    ```

    The job's configuration sets the training options: `fedplat.pytorch.training.LocalOptions`. Equal seeds, data and
    tasks give equal bits on one CPU; each round draws anew. PyTorch's global random state is restored afterwards.
    """

    model: Callable[[], nn.Module]
    """Creates the module; the server's values replace its initial ones."""
    data: Data
    """A dataset with a length, a pair of arrays, or a function that returns one for a task."""
    loss: training.Loss = nn.functional.cross_entropy
    """Mean loss of a batch of (output, target)."""
    personal: tuple[str, ...] = ()
    """Names of tensors that stay on the client and are not in the model, see `fedplat.pytorch.training.Learner`."""
    share: training.Share = "all"
    """With "trained" the model has only what training changes, such as a head or an adapter. All other tensors are the
    base: they stay here, and a job states their SHA-256 (`base_sha256`) in its `[config]`. The module is then made once
    for all tasks, since a base may take minutes to load."""
    tokenizer: Any = None
    """The tokenizer of the data of a language model, whose digest (`fedplat.pytorch.huggingface.tokenizer_sha256`) jobs
    then state in their `[config]`."""
    metrics: tuple[Metric, ...] = ()
    """Metrics of evaluations, such as `fedplat.metrics.F1()`, besides `loss` and `accuracy`."""
    accuracy: training.Accuracy = "auto"
    """Which answers are correct, for a loss of your own, see `fedplat.pytorch.training.Learner`."""
    optimizer: MakeOptimizer | None = None
    """Creates an optimizer to replace SGD, from the parameters and the job's configuration."""
    private: PrivacyLimit | None = None
    """The data owner's privacy limit for single examples, which applies to all jobs (extra "opacus")."""
    device: str = "auto"
    """A PyTorch device; "auto" is CUDA if available, else the CPU."""
    seed: int = 0
    """Seeds all randomness, except the drawing of examples and the noise of private training."""
    parallel: Parallel | Literal["none", "data"] = "none"
    """How all processes that torchrun, mpirun or srun started train together as one client: with "data" each has the
    whole model, in a layout (`Parallel(shard=2, tensor=2)`) a part of it. See docs/algorithms.md."""
    plan: ParallelPlan | None = None
    """The parts of the module for a layout; by default those that a model of Hugging Face names itself."""
    backend: Literal["auto", "mpi"] = "auto"
    """With `parallel`: the library that carries tensors between processes. "auto" is NCCL on GPUs and Gloo on CPUs."""
    _idle: training.IdleModules[training.Trainee] = field(
        default_factory=training.IdleModules, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        training.as_dataset(self.data)  # mistakes are reported here, not in the first round
        if _replacements:
            object.__setattr__(self, "parallel", _replacements[-1])
        if self.parallel == "none":
            return
        if self.device not in ("auto", "cpu"):
            name = '"data"' if self.parallel == "data" else "Parallel(...)"
            raise ValueError(f'device = "{self.device}": expected "auto" or "cpu" with parallel = {name}')
        if isinstance(self.parallel, Parallel):
            from fedplat_client.trainers import layout

            layout.check_layout(self.parallel, self.personal, self.share)
        self._find_group()  # now: the client checks whether this process leads before it has a task

    def __call__(self, task: Task) -> TrainResult:
        """Train for `config["epochs"]` epochs, or until the deadline if the job accepts partial work.

        Raises `PrivacyLimitError` before anything is computed from the data, if the owner does not allow the training.
        """
        options, make_optimizer = self._options(task)
        private.check_training(options, self.private)
        with (
            self._choose_strategy(task, options) as strategy,
            self._open(task, strategy, options.precision) as (trainee, examples),
        ):
            seed = int(np.random.SeedSequence([self.seed, task.round, task.attempt]).generate_state(1)[0])
            work = training.LocalTraining(
                examples=examples,
                options=options,
                seed=seed,
                round_number=task.round,
                client_state=task.client_state,
                after_step=strategy.after_step(StepClock(task, options.partial_work).after_step),
                make_optimizer=make_optimizer,
                gradients=strategy.make_gradients(seed),
                ledger=private.TaskLedger(task, self.private),
            )
            metrics = training.train(trainee, strategy.parameters, work)
            return strategy.make_result(len(examples), metrics)

    def evaluate(self, task: Task) -> EvaluateResult:
        """Measure the task's parameters on the dataset, without training. Raises `PrivacyLimitError`."""
        private.check_evaluation(self.private)
        size = task.config.get("batch_size", _EVALUATION_BATCH_SIZE)
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"config.batch_size = {size!r}: expected a whole number of at least 0")
        group = self._find_group()
        if group is not None and isinstance(self.parallel, Parallel):
            with (
                self._open_layout(group, self.parallel, task, evaluates=True) as strategy,
                self._open(task, strategy) as (trainee, examples),
            ):
                metrics = strategy.evaluate(trainee, examples, size, task.progress)
            return EvaluateResult(num_examples=len(examples), metrics=metrics)
        with self._open(task, SingleProcess(training.choose_device(self.device), task)) as (trainee, examples):
            metrics = training.evaluate(
                trainee, task.parameters, examples, size, client_state=task.client_state, after_batch=task.progress
            )
        return EvaluateResult(num_examples=len(examples), metrics=metrics)

    def _options(self, task: Task) -> tuple[training.LocalOptions, training.MakeOptimizer | None]:
        make = self.optimizer
        if make is None:
            return training.LocalOptions.from_config(task.config, task.plugins), None
        # A custom optimizer need not have a learning rate.
        config = {"learning_rate": 1.0, **{key: value for key, value in task.config.items() if key != "optimizer"}}
        options = training.LocalOptions.from_config(config, task.plugins)
        return options, lambda parameters: make(parameters, task.config)

    def _choose_strategy(self, task: Task, options: training.LocalOptions) -> AbstractContextManager[TrainingStrategy]:
        group = self._find_group()
        if group is None:
            return nullcontext(SingleProcess(training.choose_device(self.device), task))
        if options.is_private:
            raise ValueError(
                f'config.dp = "{options.dp}": training in several processes cannot protect single examples; expected '
                '"none", or TorchTrainer(parallel="none")'
            )
        if isinstance(self.parallel, Parallel):
            from fedplat.pytorch.parallel.algorithms import refuse_algorithm

            self.parallel.check_precision(options.precision)
            refuse_algorithm(options, training.build_guarded_algorithm(options))
            return self._open_layout(group, self.parallel, task)
        algorithm, name = training.build_guarded_algorithm(options), options.algorithm_name
        if algorithm.perturb is not None:
            raise ValueError(
                f'config.algorithm = "{name}": it computes gradients at other weights, which needs a single process; '
                'expected TorchTrainer(parallel="none"), or another algorithm'
            )
        if algorithm.make_loss is not None and not algorithm.loss_is_mean:
            raise ValueError(
                f'config.algorithm = "{name}": several processes compute a part of each batch, and its loss is not '
                'declared as a mean over examples (loss_is_mean); expected TorchTrainer(parallel="none")'
            )
        return group.train_together(task, self._backend)

    @contextmanager
    def _open_layout(
        self, group: LaunchedGroup, parallel: Parallel, task: Task, *, evaluates: bool = False
    ) -> Generator[LayoutProcesses]:
        from fedplat_client.trainers.layout import LayoutProcesses

        with group.compute_in_layout(task, self._backend, evaluates=evaluates) as (ranks, parameters):
            yield LayoutProcesses(ranks, parallel, self.plan, parameters, task)

    @property
    def _backend(self) -> Backend:
        if self.backend == "mpi":
            return "mpi"
        return "gloo" if self.device == "cpu" else "auto"

    def _find_group(self) -> LaunchedGroup | None:
        if self.parallel == "none":
            return None
        from fedplat_client.trainers import distributed

        return distributed.find_group(self._backend)

    @contextmanager
    def _open(
        self, task: Task, strategy: TrainingStrategy, precision: Precision = "fp32"
    ) -> Generator[tuple[training.Trainee, training.Examples]]:
        """Give the block a module that no other task uses, and the examples."""
        pins = Pins.from_config(task.config)
        check_tokenizer(self.tokenizer, pins.tokenizer_sha256)
        with ExitStack() as borrowed:

            def make() -> tuple[training.Trainee, training.Examples]:
                trainee = borrowed.enter_context(
                    self._idle.borrow(
                        lambda: strategy.make_trainee(self._learner, self.seed, precision), pins.base_sha256
                    )
                )
                examples = self._examples(task, strategy.device)
                strategy.check(trainee, len(examples))
                return trainee, examples

            yield strategy.make_on_all(make)

    @property
    def _learner(self) -> training.Learner:
        return training.Learner(
            model=self.model,
            loss=self.loss,
            personal=self.personal,
            share=self.share,
            metrics=self.metrics,
            accuracy=self.accuracy,
        )

    def _examples(self, task: Task, device: torch.device) -> training.Examples:
        given: Any = self.data
        return training.check_examples(given(task) if training.as_dataset(given) is None else given, device)


@contextmanager
def replace_parallel(parallel: Parallel | Literal["none", "data"]) -> Generator[None]:
    """Create all trainers within the block with this `parallel`, whatever their code says: for the command line."""
    _replacements.append(parallel)
    try:
        yield
    finally:
        _replacements.pop()
