"""A round of one client: its budget, its examples, and what a run of the Trainer begins and ends with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, cast

import numpy as np
import torch
from msgspec import Meta, Struct

from fedplat.config import toml
from fedplat.errors import DataError, JobFileError, MissingExtraError
from fedplat.extras import install_command
from fedplat.learner import Config, Round
from fedplat.local_options import explain_lost_moments
from fedplat.model import Parameters
from fedplat.pytorch import training
from fedplat.pytorch.huggingface.scores import IGNORED, LabelScores
from fedplat.pytorch.training import stepper

try:
    import transformers as _library
except ImportError as exc:
    raise MissingExtraError(
        f"transformers is not installed; install it with: {install_command('huggingface')}"
    ) from exc

transformers: Any = _library  # options are passed on by name
AfterStep: TypeAlias = Callable[[int, int], bool]
"""Takes the numbers of completed micro-batches and of all; returns whether to continue, and may raise."""

Sha256: TypeAlias = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
_OPTIMIZER, _ORDER = "optimizer", "order"


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
    base_sha256: Sha256 = ""
    tokenizer_sha256: Sha256 = ""

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


@dataclass(frozen=True)
class Plan:
    """The examples of a round, and its steps: the epoch's order continues where the client's last round ended."""

    order: list[int]
    num_steps: int
    accumulate: int
    position: int
    """Examples used after the round, since the client's first one."""
    seed: int
    """Of the order in each epoch: that of the client's first round."""

    @classmethod
    def of(cls, num_examples: int, arguments: Any, options: HuggingFaceConfig, this: Round) -> Plan:
        """Return the plan of a round, which begins where the last one ended, by the client state."""
        accumulate = arguments.gradient_accumulation_steps
        size = arguments.per_device_train_batch_size * accumulate
        num_steps = options.max_steps or math.ceil(options.epochs * num_examples / size)
        note = this.client_state.get(_ORDER)
        begin, seed = (0, this.seed) if note is None else (int(note["position"]), int(note["seed"]))
        end = begin + num_steps * size
        order = [
            int(index)
            for epoch in range(begin // num_examples, -(-end // num_examples))
            for index in np.random.default_rng([seed, epoch]).permutation(num_examples)
        ]
        first = begin // num_examples * num_examples
        return cls(order[begin - first : end - first], num_steps, accumulate, end, seed)


class TrainerRun:
    """What a run of a Trainer adds: the kept optimizer, the job's schedule, scores, progress and the end."""

    def __init__(
        self, trainee: training.Trainee, plan: Plan, options: HuggingFaceConfig, this: Round, after_step: AfterStep
    ) -> None:
        if options.schedule == "job" and not this.num_rounds:
            raise JobFileError('config.schedule = "job": the number of rounds is not known; expected "round"')
        self.scores = LabelScores(trainee.module)
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
        order = {"position": np.array(position, np.int64), "seed": np.array(self._plan.seed, np.uint64)}
        state.put(_ORDER, Parameters.from_arrays(order))

    def check_labels(self) -> None:
        """Raise `DataError` if no label of the round counts: its loss is no number."""
        if self.scores.has_labels and not self.scores.count:
            raise DataError(f"no label of the examples counts; expected some that are not {IGNORED}")

    def metrics(self, trainer: Any) -> dict[str, float]:
        """Return the mean loss and the number of steps."""
        return {**self.scores.means(), "local_steps": float(trainer.state.global_step)}


def make_callback(run: TrainerRun) -> Any:
    """Return the callback that tells a run what its Trainer does."""

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
def quiet() -> Generator[None]:
    """Turn off the hints of transformers to the users of its Trainer."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
