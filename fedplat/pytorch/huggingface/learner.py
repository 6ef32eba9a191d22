"""The learner: one training of a client, and an evaluation, with the Trainer of transformers."""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from fedplat.client_state import ClientState
from fedplat.errors import ModelError
from fedplat.learner import Config, Data, Round
from fedplat.model import Parameters
from fedplat.pytorch import training
from fedplat.pytorch.huggingface.data import (
    ArrayExamples,
    Collator,
    Dataset,
    MakeExample,
    count_examples,
    make_causal_example,
    take,
)
from fedplat.pytorch.huggingface.run import (
    AfterStep,
    HuggingFaceConfig,
    Plan,
    TrainerRun,
    make_callback,
    quiet,
    transformers,
)
from fedplat.pytorch.huggingface.scores import LabelScores
from fedplat.pytorch.training.tokenizers import check_tokenizer

MakeTrainer: TypeAlias = Callable[[Any, Any, Any, list[Any]], Any]
"""Returns a Trainer for a model, `TrainingArguments`, a dataset and callbacks."""

_EVALUATION_BATCH_SIZE = 8
"""Logits of a language model are large: 8 x 512 x 128,000 numbers are 2 GB."""
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
    """Names of trained tensors that stay on the client, such as "*lora_B*"."""
    device: str = "cpu"
    """A PyTorch device; "auto" is CUDA if available, else the CPU."""
    example: MakeExample = make_causal_example
    """Makes an example of a row of inputs and one of targets, for data in arrays; by default they are the tokens and
    their labels. The rows may also be numbers of examples that are elsewhere."""
    tokenizer: Any = None
    """Its digest has to be that of the job's `[config]`, if there is a tokenizer."""
    _idle: training.IdleModules[training.Trainee] = field(
        default_factory=training.IdleModules, init=False, repr=False, compare=False
    )

    @property
    def _learner(self) -> training.Learner:
        return training.Learner(model=self.model, personal=self.personal, share="trained", accuracy="none")

    def initial(self, seed: int = 0) -> Parameters:
        """Return the initial model of a job: the trained tensors."""
        with _RUNS, _explain_errors():
            return self._learner.initial(seed)

    def base_sha256(self) -> str:
        """Return the SHA-256 of the base, which a job has in its `[config]`."""
        with _RUNS, _explain_errors():
            return self._learner.base_sha256()

    def check_config(self, config: Config) -> None:
        """Raise `JobFileError` for an invalid value of a key that a training reads."""
        HuggingFaceConfig.read(config)

    def train(self, parameters: Parameters, data: Data, config: Config, seed: int) -> dict[str, float]:
        """Train the model in place on rows of arrays, without client state; return `loss` and `local_steps`."""
        this = Round(number=1, num_rounds=0, seed=seed, client_state=ClientState())
        return self.train_round(parameters, data, config, this)[1]

    def train_round(
        self, parameters: Parameters, data: Data, config: Config, this: Round
    ) -> tuple[float, dict[str, float]]:
        """Train the model in place on rows of arrays; return the number of trained tokens, and the metrics."""
        options = HuggingFaceConfig.read(config)
        with self.borrow(options, is_required=False) as trainee:
            return self.train_trainee(trainee, parameters, ArrayExamples(data, self.example), options, this)

    def evaluate(self, parameters: Parameters, data: Data) -> dict[str, float]:
        """Return the scores of a model on rows of arrays, without training."""
        return self.score(parameters, data, {}, ClientState())[1]

    def score(
        self, parameters: Parameters, data: Data, config: Config, client_state: ClientState
    ) -> tuple[float, dict[str, float]]:
        """Return the number of tokens that count in rows of arrays, and the scores of a model on them."""
        options = HuggingFaceConfig.read(config)
        with self.borrow(options, is_required=False) as trainee:
            examples = ArrayExamples(data, self.example)
            return self.evaluate_trainee(trainee, parameters, examples, options, client_state)

    def borrow(
        self, options: HuggingFaceConfig, *, is_required: bool = True
    ) -> AbstractContextManager[training.Trainee]:
        """Give the block the model, which is made once. Raises `ModelError` if it or the tokenizer is not the job's.

        A job has to state the base, and the tokenizer of a learner with one, if that `is_required`.
        """
        check_tokenizer(self.tokenizer, options.tokenizer_sha256, is_required=is_required)
        return self._idle.borrow(self._make_trainee, options.base_sha256, is_required=is_required)

    def _make_trainee(self) -> training.Trainee:
        with _RUNS, _explain_errors():
            return training.Trainee(self._learner, training.choose_device(self.device))

    def train_trainee(
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
            run = TrainerRun(trainee, plan, options, this, after_step)
            arguments.max_steps = plan.num_steps
            trainer = self._make_trainer(trainee.module, arguments, take(data, plan.order), [make_callback(run)])
            run.prepare(trainer)
            try:
                with quiet():
                    trainer.train()
            finally:
                trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
                trainee.forget()
            run.check_labels()
            metrics = run.metrics(trainer)
            is_finite = math.isfinite(metrics.get("loss", 0.0))
            if is_finite:
                run.finish(trainer)
                trainee.save(parameters, this.client_state)
        if not is_finite or not parameters.is_finite():
            raise ModelError("the training has diverged: the loss or the model has NaN or infinite values")
        return run.scores.count or float(len(plan.order)), metrics

    def evaluate_trainee(
        self,
        trainee: training.Trainee,
        parameters: Parameters,
        data: Dataset,
        options: HuggingFaceConfig,
        client_state: ClientState | None = None,
        after_batch: Callable[[float], object] = lambda fraction: None,
    ) -> tuple[float, dict[str, float]]:
        """Return the number of tokens that count, and `loss` and `accuracy` as means over them, without training."""
        num_examples, scores = count_examples(data), LabelScores(trainee.module)
        batch_size = options.batch_size or _EVALUATION_BATCH_SIZE
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


@contextmanager
def _explain_errors() -> Generator[None]:
    """Turn what the function of a model raises, such as peft for targets that match nothing, into a `ModelError`."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as exc:
        raise ModelError(f"the function of the model failed: {' '.join(str(exc).split())}") from exc
