"""Local training with scikit-learn (extra "sklearn")."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedplat.errors import MissingExtraError
from fedplat.extras import install_command
from fedplat.learner import check_data
from fedplat.sklearn import SklearnLearner
from fedplat_client.task import EvaluateResult, Task, TrainResult
from fedplat_client.trainers.learner import ClientData, Seed, train

try:
    import sklearn
except ImportError as exc:
    raise MissingExtraError(
        f"SklearnTrainer needs scikit-learn, which is not installed; install it with: {install_command('sklearn')}"
    ) from exc
del sklearn


@dataclass(frozen=True, kw_only=True)
class SklearnTrainer:
    """A trainer and an evaluator for an estimator of scikit-learn.

    ```python
    trainer = SklearnTrainer(
        estimator="sklearn.linear_model:SGDClassifier", features=64, classes=10, data=(inputs, labels)
    )
    client.add_trainer("digits", trainer)
    client.add_evaluator("digits", trainer.evaluate)
    ```

    The fields are those of `fedplat.sklearn.SklearnLearner`, which describes them; the server's model is arrays, and
    nothing that it sends is unpickled. Equal seeds, data and tasks give equal bits; each round draws anew.
    """

    estimator: str
    features: int
    data: ClientData
    """Inputs and targets, or a function that returns them for a task."""
    classes: int | Sequence[int | str] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    total_examples: int = 0
    seed: Seed = 0
    """Seeds all randomness; or a function of the task that returns the seed of its training."""

    def __post_init__(self) -> None:
        self.learner.build()  # mistakes are reported here, not in the first round

    @functools.cached_property
    def learner(self) -> SklearnLearner:
        """The learner that a simulation would train."""
        return SklearnLearner(
            estimator=self.estimator,
            features=self.features,
            classes=self.classes if isinstance(self.classes, int) else tuple(self.classes),
            options=dict(self.options),
            total_examples=self.total_examples,
        )

    def __call__(self, task: Task) -> TrainResult:
        """Train for `config["epochs"]` epochs."""
        data = check_data(self.data(task) if callable(self.data) else self.data)
        metrics = train(self.learner, task, data, self.seed, after_step=task.progress)
        return TrainResult(parameters=task.parameters, num_examples=len(data[1]), metrics=metrics)

    def evaluate(self, task: Task) -> EvaluateResult:
        """Score the task's model on the data, without training."""
        data = check_data(self.data(task) if callable(self.data) else self.data)
        return EvaluateResult(num_examples=len(data[1]), metrics=self.learner.evaluate(task.parameters, data))
