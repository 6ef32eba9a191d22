"""Fine-tuning with the `Trainer` of Hugging Face's transformers (extra "huggingface").

A round is one run of the Trainer from the received weights, and all rounds of a client together are one longer run: the
order of its examples, the optimizer and the learning rate's schedule continue where the client's last round ended.
"""

from __future__ import annotations

import math
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, cast

import numpy as np
import torch
from msgspec import Meta, Struct
from torch.utils.data import Subset

from fedplat.client_state import ClientState
from fedplat.config import toml
from fedplat.errors import DataError, JobFileError, MissingExtraError, ModelError
from fedplat.extras import install_command
from fedplat.learner import Config
from fedplat.local_options import explain_lost_moments
from fedplat.model import Parameters
from fedplat.pytorch import training
from fedplat.pytorch.training import stepper

try:
    import transformers as _library
except ImportError as exc:
    raise MissingExtraError(
        f"transformers is not installed; install it with: {install_command('huggingface')}"
    ) from exc

transformers: Any = _library  # options are passed on by name
Dataset: TypeAlias = Any
"""A map-style dataset of PyTorch or of the package `datasets`, whose examples the Trainer or the collator takes."""
Collator: TypeAlias = Callable[[list[Any]], Mapping[str, torch.Tensor]]
AfterStep: TypeAlias = Callable[[int, int], bool]
"""Takes the numbers of completed micro-batches and of all; returns whether to continue, and may raise."""
MakeTrainer: TypeAlias = Callable[[Any, Any, Any, list[Any]], Any]
"""Returns a Trainer for a model, `TrainingArguments`, a dataset and callbacks."""

IGNORED = -100
"""The label of tokens that do not count, such as padding."""
_OPTIMIZER, _ORDER = "optimizer", "order"
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


class HuggingFaceConfig(Struct, frozen=True, kw_only=True):
    """The keys of `[config]`: the budget of a round, and some of `TrainingArguments`, whose values they replace."""

    max_steps: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    """Optimizer steps of a round; 0 for those of `epochs`."""
    epochs: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    batch_size: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    accumulate: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    learning_rate: Annotated[float, Meta(gt=0.0, le=1e30)] | None = None
    weight_decay: Annotated[float, Meta(ge=0.0, le=1e30)] | None = None
    max_grad_norm: Annotated[float, Meta(ge=0.0, le=1e30)] | None = None
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"] | None = None
    warmup_steps: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None
    keep_optimizer: bool = False
    """True if the optimizer continues with its state of the client's previous round, which is client state."""
    schedule: Literal["round", "job"] = "round"
    """What the learning rate's schedule spans: each round by itself, or all rounds of the job."""
    partial_work: bool = False
    alternate: str = ""
    """Groups of trained tensors that take turns, one in each round, see `fedplat.local_options.LocalOptions`."""
    base_sha256: str = ""

    @classmethod
    def read(cls, config: Config) -> HuggingFaceConfig:
        """Read the keys of a job's `[config]`; others are for the data's function. Raises `JobFileError`."""
        own = {name: value for name, value in config.items() if name in cls.__struct_fields__}
        options = toml.read_record(own, cls, "config.")
        if options.max_steps and "epochs" in config:
            raise JobFileError(f"config.max_steps = {options.max_steps}: expected either it or epochs, not both")
        if options.alternate and options.keep_optimizer:
            raise JobFileError(f"config.{explain_lost_moments(options.alternate)}")
        return options

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that the job sets."""
        named = {
            "per_device_train_batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulate,
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "max_grad_norm": self.max_grad_norm,
            "lr_scheduler_type": self.lr_scheduler_type,
            "warmup_steps": self.warmup_steps,
        }
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of one client: `number` counts from 1; `num_rounds` are those of the job, 0 if they are not known."""

    number: int
    num_rounds: int
    seed: int
    """Of dropout and the like."""
    order_seed: int
    """Of the order of examples in each epoch, the same in all rounds of a client."""
    client_state: ClientState


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
            plan = _Plan.of(count_examples(data), arguments, options, this)
            run = _Run(trainee, plan, options, this, after_step)
            arguments.max_steps = plan.num_steps
            trainer = self._make_trainer(trainee.module, arguments, take(data, plan.order), [_make_callback(run)])
            run.prepare(trainer)
            try:
                with _quiet():
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
        num_examples, scores = count_examples(data), _Scores(trainee.module)
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


@dataclass(frozen=True)
class _Plan:
    """The examples of a round, and its steps: the epoch's order continues where the client's last round ended."""

    order: list[int]
    num_steps: int
    accumulate: int
    position: int
    """Examples used after the round, since the client's first one."""

    @classmethod
    def of(cls, num_examples: int, arguments: Any, options: HuggingFaceConfig, this: Round) -> _Plan:
        accumulate = arguments.gradient_accumulation_steps
        size = arguments.per_device_train_batch_size * accumulate
        num_steps = options.max_steps or math.ceil(options.epochs * num_examples / size)
        note = this.client_state.get(_ORDER)
        begin = 0 if note is None else int(note["position"])
        end = begin + num_steps * size
        order = [
            int(index)
            for epoch in range(begin // num_examples, -(-end // num_examples))
            for index in np.random.default_rng([this.order_seed, epoch]).permutation(num_examples)
        ]
        first = begin // num_examples * num_examples
        return cls(order[begin - first : end - first], num_steps, accumulate, end)


class _Run:
    """What a run of a Trainer adds: the kept optimizer, the job's schedule, scores, progress and the end."""

    def __init__(
        self, trainee: training.Trainee, plan: _Plan, options: HuggingFaceConfig, this: Round, after_step: AfterStep
    ) -> None:
        if options.schedule == "job" and not this.num_rounds:
            raise JobFileError('config.schedule = "job": the number of rounds is not known; expected "round"')
        self.scores = _Scores(trainee.module)
        self._trainee, self._plan, self._options, self._this = trainee, plan, options, this
        self._after_step, self._done = after_step, 0

    def prepare(self, trainer: Any) -> None:
        """Observe the loss, and replace the schedule."""
        compute = trainer.compute_loss

        def observe(model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            labels = inputs.get("labels")
            result = compute(model, inputs, return_outputs, **more)
            loss = result[0] if return_outputs else result
            self.scores.add_scaled(loss.detach(), labels, more.get("num_items_in_batch"))
            return result

        trainer.compute_loss = observe
        if self._options.schedule == "job":
            make = trainer.create_scheduler
            past, total = (
                self._plan.num_steps * (self._this.number - 1),
                self._plan.num_steps * self._this.num_rounds,
            )

            def create_scheduler(num_training_steps: int, optimizer: Any = None) -> Any:
                scheduler = make(total, optimizer)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                    for _ in range(past):
                        scheduler.step()
                return scheduler

            trainer.create_scheduler = create_scheduler

    def begin(self, optimizer: Any) -> None:
        """Restore the optimizer, before the first step."""
        kept = self._this.client_state.get(_OPTIMIZER) if self._options.keep_optimizer else None
        if kept is not None:
            stepper.restore_state(_unwrap(optimizer), self._trainee.parameters(), kept)

    def count_batch(self) -> bool:
        """Note that a micro-batch is done; return whether to continue."""
        self._done += 1
        total = self._plan.num_steps * self._plan.accumulate
        return self._after_step(min(self._done, total), total) or not self._options.partial_work

    def finish(self, trainer: Any) -> None:
        """Store what the client's next round begins with."""
        state = self._this.client_state
        if self._options.keep_optimizer:
            state.put(_OPTIMIZER, stepper.pack_state(_unwrap(trainer.optimizer), self._trainee.parameters()))
        made = trainer.state.global_step * len(self._plan.order) // self._plan.num_steps
        position = self._plan.position - len(self._plan.order) + made
        state.put(_ORDER, Parameters.from_arrays({"position": np.array(position, np.int64)}))

    def metrics(self, trainer: Any) -> dict[str, float]:
        """Return the mean loss and the number of steps."""
        return {**self.scores.means(), "local_steps": float(trainer.state.global_step)}


class _Scores:
    """Sums over the tokens, or the examples, whose labels count."""

    def __init__(self, module: torch.nn.Module) -> None:
        base = getattr(module, "get_base_model", lambda: module)()
        self._module, self._shifts = module, getattr(base, "loss_type", None) == "ForCausalLM"
        self._loss = self._hits = self._answers = 0.0
        self.count = 0.0
        """The number of labels that count."""

    def add_scaled(self, loss: torch.Tensor, labels: torch.Tensor | None, num_items: torch.Tensor | int | None) -> None:
        """Add a batch's loss, the mean over its labels, or a part of the mean over `num_items` of several batches."""
        count = self._count(labels)
        self.count += count
        self._loss += float(loss) * (count if num_items is None else float(num_items))

    def score(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Add the loss and the correct answers of the model for a batch."""
        outputs, labels = self._module(**batch), batch.get("labels")
        loss = getattr(outputs, "loss", None)
        if labels is None or loss is None:
            raise DataError('an evaluation needs labels; expected a collator whose batches have "labels"')
        count = self._count(labels)
        if not count:
            return  # the loss of padding alone is NaN
        self.count += count
        self._loss += float(loss) * count
        logits = outputs.logits
        if labels.is_floating_point() or logits.shape[:-1] != labels.shape:
            return
        if self._shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        self._hits += float(((logits.argmax(-1) == labels) & (labels != IGNORED)).sum())
        self._answers += count

    def means(self) -> dict[str, float]:
        """Return `loss`, and `accuracy` if answers were counted."""
        means = {"loss": self._loss / self.count} if self.count else {}
        return means | ({"accuracy": self._hits / self._answers} if self._answers else {})

    def _count(self, labels: torch.Tensor | None) -> float:
        if labels is None:
            return 0.0
        if labels.is_floating_point():
            return float(len(labels))
        return float((labels[..., 1:] if self._shifts else labels).ne(IGNORED).sum())


def _make_callback(run: _Run) -> Any:
    class Observer(_library.TrainerCallback):
        """Tells the run what happens."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            run.begin(more["optimizer"])

        def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            run.count_batch()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if not run.count_batch():
                control.should_training_stop = True

    return Observer()


def _unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer within that of accelerate."""
    return cast(torch.optim.Optimizer, getattr(optimizer, "optimizer", optimizer))


@contextmanager
def _quiet() -> Generator[None]:
    """Turn off the hints of transformers to the users of its Trainer."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
