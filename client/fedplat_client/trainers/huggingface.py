"""Local fine-tuning with Hugging Face's `Trainer` (extra "huggingface")."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fedplat import errors, extras
from fedplat.learner import Round, config_of_round
from fedplat_client.task import EvaluateResult, Task, TrainResult
from fedplat_client.trainers.learner import Seed, seed_of
from fedplat_client.trainers.pace import StepClock

try:
    from fedplat.pytorch.huggingface import (
        Collator,
        Dataset,
        HuggingFaceConfig,
        HuggingFaceLearner,
        MakeTrainer,
    )
except errors.MissingExtraError as exc:
    raise errors.MissingExtraError(
        "HuggingFaceTrainer needs transformers, which is not installed; install it with: "
        + extras.install_command("huggingface")
    ) from exc

Data: TypeAlias = Dataset | Callable[[Task], Dataset]


@dataclass(frozen=True, kw_only=True)
class HuggingFaceTrainer:
    """A trainer and an evaluator for a model of transformers, with `Trainer` or a subclass such as those of TRL.

    ```python
    trainer = HuggingFaceTrainer(model=make_model, data=dataset, arguments={"per_device_train_batch_size": 4})
    client.add_trainer("chat", trainer)
    client.add_evaluator("chat", trainer.evaluate)
    ```

    What is trained is shared, such as the adapters of peft; all other weights are the base, see `TorchTrainer.share`.
    The job's configuration sets the budget of a round: `fedplat.pytorch.huggingface.HuggingFaceConfig`. Averages weight
    the client by its trained tokens, and `loss` and `accuracy` are means over tokens.
    """

    model: Callable[[], Any]
    """Creates the model with its weights; called once for all tasks."""
    data: Data
    """A map-style dataset, such as those of the package `datasets`; or a function that returns one for a task."""
    collator: Collator | None = None
    """Makes a batch of a list of examples; by default that of transformers."""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`TrainingArguments`; the job's `[config]` replaces some of them."""
    trainer: MakeTrainer | None = None
    """Makes another Trainer from the model, the arguments, the dataset and a list of callbacks."""
    personal: tuple[str, ...] = ()
    """Names of trained tensors that stay on the client, such as "*lora_B*"."""
    tokenizer: Any = None
    """The tokenizer of the data, whose digest (`tokenizer_sha256`) jobs then state in their `[config]`."""
    device: str = "auto"
    """A PyTorch device; "auto" is CUDA if available, else the CPU."""
    seed: Seed = 0
    """Seeds all randomness; or a function of the task that returns the seed of its training. The order of examples
    follows from the seed of the client's first round."""

    def __call__(self, task: Task) -> TrainResult:
        """Train for `config["max_steps"]` steps or `config["epochs"]` epochs.

        With `config["partial_work"]` the training ends before its deadline, and its steps until then count.
        """
        options = HuggingFaceConfig.read(config_of_round(task.config, task.round))
        this = Round(
            number=task.round,
            num_rounds=task.num_rounds,
            seed=seed_of(task, self.seed),
            client_state=task.client_state,
        )
        after_step = StepClock(task, options.partial_work).after_step
        with self._learner.borrow(options) as model:
            count, metrics = self._learner.train_trainee(
                model, task.parameters, self._data(task), options, this, after_step
            )
        return TrainResult(parameters=task.parameters, num_examples=count, metrics=metrics)

    def evaluate(self, task: Task) -> EvaluateResult:
        """Measure the task's parameters on the dataset, without training: `loss` and `accuracy`, means over tokens."""
        options = HuggingFaceConfig.read(task.config)
        with self._learner.borrow(options) as model:
            count, metrics = self._learner.evaluate_trainee(
                model, task.parameters, self._data(task), options, task.client_state, task.progress
            )
        return EvaluateResult(num_examples=count, metrics=metrics)

    @functools.cached_property
    def _learner(self) -> HuggingFaceLearner:
        return HuggingFaceLearner(
            model=self.model,
            collator=self.collator,
            arguments=self.arguments,
            trainer=self.trainer,
            personal=self.personal,
            device=self.device,
            tokenizer=self.tokenizer,
        )

    def _data(self, task: Task) -> Dataset:
        return self.data(task) if callable(self.data) else self.data
