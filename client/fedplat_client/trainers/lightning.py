"""Local training with PyTorch Lightning (extra "lightning")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from fedplat import errors, extras
from fedplat.local_options import Pins
from fedplat_client.task import EvaluateResult, Task, TrainResult
from fedplat_client.trainers.learner import Seed, train

try:
    from fedplat.pytorch.lightning import LightningData, LightningLearner, count_examples
except errors.MissingExtraError as exc:
    raise errors.MissingExtraError(
        "LightningTrainer needs PyTorch Lightning, which is not installed; install it with: "
        + extras.install_command("lightning")
    ) from exc
from lightning.pytorch import LightningModule

from fedplat.pytorch.training.tokenizers import check_tokenizer

OwnData: TypeAlias = LightningData | Callable[[Task], LightningData]


@dataclass(frozen=True, kw_only=True)
class LightningTrainer:
    """A trainer and an evaluator for a module of PyTorch Lightning.

    ```python
    trainer = LightningTrainer(module=MyModule, data=dataset)
    client.add_trainer("digits", trainer)
    client.add_evaluator("digits", trainer.evaluate)
    ```

    Lightning's own `Trainer` runs `config["epochs"]` epochs, or `config["max_steps"]` steps, from the received weights.
    The module finds the job's configuration in its attribute `job_config`, in `configure_optimizers` for instance.
    Equal seeds, data and tasks give equal bits on one CPU, if `data` is a dataset or arrays; a loader and a data module
    have their own order.
    """

    module: Callable[[], LightningModule]
    """The module's class, or a function that creates it; the server's values replace its initial ones."""
    data: OwnData
    """A dataset, a pair of arrays, a loader or a `LightningDataModule`; or a function that returns one for a task."""
    device: str = "auto"
    """Lightning's `accelerator`: "auto", "cpu", "gpu" and so on; one device."""
    share: Literal["all", "trained"] = "all"
    """With "trained" the model has only what training changes, and jobs state the base, see `TorchTrainer`. The module
    is then made once for all tasks."""
    tokenizer: Any = None
    """The tokenizer of the data, whose digest (`tokenizer_sha256`) jobs then state in their `[config]`."""
    seed: Seed = 0
    """Seeds all randomness; or a function of the task that returns the seed of its training."""
    _learner: LightningLearner = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_learner", LightningLearner(self.module, self.device, self.share))

    def __call__(self, task: Task) -> TrainResult:
        """Train for `config["max_steps"]` steps or `config["epochs"]` epochs."""
        learner, data = self._check(task), self._data(task)
        count = count_examples(data)
        metrics = train(learner, task, data, self.seed, seeds_itself=True, after_step=task.progress)
        return TrainResult(parameters=task.parameters, num_examples=count, metrics=metrics)

    def evaluate(self, task: Task) -> EvaluateResult:
        """Return what the module's `validation_step` logs, without training."""
        learner, data = self._check(task), self._data(task)
        metrics = learner.evaluate(task.parameters, data, task.config)
        return EvaluateResult(num_examples=count_examples(data), metrics=metrics)

    def _check(self, task: Task) -> LightningLearner:
        """Return the learner. Raises `ModelError` unless the job states its base, and the tokenizer of its data."""
        check_tokenizer(self.tokenizer, Pins.from_config(task.config).tokenizer_sha256)
        self._learner.require_base(task.config)
        return self._learner

    def _data(self, task: Task) -> LightningData:
        return self.data(task) if callable(self.data) else self.data
