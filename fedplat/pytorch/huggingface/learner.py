"""The learner: one training of a client, and an evaluation, with the Trainer of transformers."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils.data import Subset

from fedplat.client_state import ClientState
from fedplat.errors import DataError, ModelError
from fedplat.model import Parameters
from fedplat.pytorch import training
from fedplat.pytorch.huggingface.run import (
    AfterStep,
    HuggingFaceConfig,
    Plan,
    Round,
    Run,
    make_callback,
    quiet,
    transformers,
)
from fedplat.pytorch.huggingface.scores import Scores

Dataset: TypeAlias = Any
"""A map-style dataset of PyTorch or of the package `datasets`, whose examples the Trainer or the collator takes."""
Collator: TypeAlias = Callable[[list[Any]], Mapping[str, torch.Tensor]]
MakeTrainer: TypeAlias = Callable[[Any, Any, Any, list[Any]], Any]
"""Returns a Trainer for a model, `TrainingArguments`, a dataset and callbacks."""

_RUNS = threading.Lock()
"""Accelerate's state and the generators, which also draw new weights, belong to the process."""
_OWN: Mapping[str, Any] = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "push_to_hub": False,
    "load_best_model_at_end": False,
    "train_sampling_strategy": "sequential",
}
"""The arguments of every run: it leaves no files, prints nothing, and has the order of fedplat."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceLearner:
    """A model of transformers, of which what is trained is shared, such as the adapters of peft."""

    model: Callable[[], torch.nn.Module]
    """Creates the model with its weights; those that are not trained are the base."""
    collator: Collator | None = None
    """Makes a batch of examples; by default that of transformers."""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`TrainingArguments`; the job's `[config]` replaces some of them."""
    trainer: MakeTrainer | None = None
    """Makes a Trainer of another class, such as one of TRL."""
    personal: tuple[str, ...] = ()

    @property
    def _learner(self) -> training.Learner:
        return training.Learner(model=self.model, personal=self.personal, share="trained", accuracy="none")

    def initial(self, seed: int = 0) -> Parameters:
        """Return the initial model of a job: the trained tensors."""
        with _RUNS:
            return self._learner.initial(seed)

    def base_sha256(self) -> str:
        """Return the SHA-256 of the base, which a job has in its `[config]`."""
        with _RUNS:
            return self._learner.base_sha256()

    def make_trainee(self, device: torch.device, seed: int = 0) -> training.Trainee:
        """Return the model, to be trained repeatedly."""
        with _RUNS:
            return training.Trainee(self._learner, device, seed)

    def train(
        self,
        trainee: training.Trainee,
        parameters: Parameters,
        data: Dataset,
        options: HuggingFaceConfig,
        this: Round,
        after_step: AfterStep = lambda done, total: True,
    ) -> tuple[float, dict[str, float]]:
        """Train the model in place; return the number of trained tokens, and the metrics.

        It is the number of examples for data without labels. `loss` is the mean over the tokens of the round. Raises
        `DataError`, `JobFileError`, `ModelError`, and what the model and the Trainer raise.
        """
        turn = trainee.train_in_turn(options.alternate, this.number)
        with _RUNS, tempfile.TemporaryDirectory() as folder, training.use_seed(trainee.device, this.seed), turn:
            trainee.load(parameters, this.client_state)
            arguments = self._make_arguments(options, this, trainee.device, folder)
            plan = Plan.of(count_examples(data), arguments, options, this)
            run = Run(trainee, plan, options, this, after_step)
            arguments.max_steps = plan.num_steps
            trainer = self._make_trainer(trainee.module, arguments, take(data, plan.order), [make_callback(run)])
            run.prepare(trainer)
            try:
                with quiet():
                    trainer.train()
            finally:
                trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
                trainee.forget()
            run.finish(trainer)
            trainee.save(parameters, this.client_state)
        if not parameters.is_finite():
            raise ModelError("the training has diverged: the model has NaN or infinite values")
        return run.scores.count or float(len(plan.order)), run.metrics(trainer)

    def evaluate(
        self,
        trainee: training.Trainee,
        parameters: Parameters,
        data: Dataset,
        batch_size: int,
        client_state: ClientState | None = None,
        after_batch: Callable[[float], object] = lambda fraction: None,
    ) -> tuple[float, dict[str, float]]:
        """Return the number of tokens that count, and `loss` and `accuracy` as means over them, without training."""
        num_examples, scores = count_examples(data), Scores(trainee.module)
        with _RUNS, training.use_seed(trainee.device, 0), tempfile.TemporaryDirectory() as folder:
            trainee.load(parameters, client_state or ClientState())
            arguments = transformers.TrainingArguments(
                output_dir=folder, **{**_OWN, **self.arguments, **_OWN, "use_cpu": trainee.device.type == "cpu"}
            )
            collate = self._make_trainer(trainee.module, arguments, data, []).data_collator
            trainee.module.eval()
            try:
                with torch.no_grad():
                    for begin in range(0, num_examples, batch_size):
                        batch = collate([data[index] for index in range(begin, min(begin + batch_size, num_examples))])
                        scores.score({name: value.to(trainee.device) for name, value in batch.items()})
                        after_batch(min(1.0, (begin + batch_size) / num_examples))
            finally:
                trainee.forget()
        return scores.count or float(num_examples), scores.means()

    def _make_arguments(self, options: HuggingFaceConfig, this: Round, device: torch.device, folder: str) -> Any:
        given = {"dataloader_pin_memory": device.type == "cuda", **self.arguments, **options.arguments(), **_OWN}
        given |= {"output_dir": folder, "use_cpu": device.type == "cpu", "seed": this.seed % 2**32}
        arguments = transformers.TrainingArguments(**given)
        if arguments.n_gpu > 1:  # else the Trainer would replicate the model on all GPUs of the machine
            arguments._n_gpu = 1
        return arguments

    def _make_trainer(self, model: Any, arguments: Any, data: Any, callbacks: list[Any]) -> Any:
        if self.trainer is not None:
            trainer = self.trainer(model, arguments, data, callbacks)
        else:
            trainer = transformers.Trainer(
                model=model, args=arguments, train_dataset=data, data_collator=self.collator, callbacks=callbacks
            )
        trainer.remove_callback(transformers.PrinterCallback)  # it prints to the standard output
        return trainer


def count_examples(data: Dataset) -> int:
    """Return the number of examples. Raises `DataError` if it is unknown or 0."""
    try:
        count = len(data)
    except TypeError as exc:
        raise DataError(
            f"the data {type(data).__name__} has no length; expected a map-style dataset, not a stream"
        ) from exc
    if not count:
        raise DataError("there are no examples; expected at least one")
    return count


def take(data: Dataset, order: Sequence[int]) -> Dataset:
    """Return the examples of a dataset in an order, which may repeat them."""
    select = getattr(data, "select", None)  # of `datasets.Dataset`, whose columns Trainers read
    return Subset(data, order) if select is None else select(order)
