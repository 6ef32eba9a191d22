"""The trainer that each process of an engine has: for learners of all kinds, and for those without PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

from fedplat.client_state import ClientState
from fedplat.config import user_code
from fedplat.errors import ModelError, UserCodeError
from fedplat.learner import ArrayLearner, Config, Data, Round, StatefulLearner, check_config, config_of_round
from fedplat.model import Bytes, Parameters, Schema
from fedplat.randomness import use_seeds
from fedplat.simulation.data.federation import Array, Part
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.tasks import NO_UPDATE, ClientTraining, Contents, LocalResult


class TaskTrainer(Protocol):
    """Trains clients one after the other, on data in the memory of this process."""

    splits_test: bool
    """True if the metrics of test data are the means of those of its parts."""

    def check(self, model: Parameters) -> None:
        """Raise `ModelError` if a model does not fit the learner."""
        ...

    def publish(self, version: int, model: Parameters) -> None:
        """Store a version until it is retired. Raises `ModelError` if it does not fit the learner."""
        ...

    def retire(self, version: int) -> None:
        """Remove a version."""
        ...

    def answer(self, task: ClientTask, contents: Contents, buffer: Bytes | None = None) -> LocalResult:
        """Train or score a client; the update is written to `buffer` if there is one."""
        ...

    def evaluate(self, model: Parameters, start: int = 0, stop: int | None = None) -> dict[str, float]:
        """Score a model on the central test examples [start, stop); returns no metrics without examples."""
        ...


def make_trainer(task: ClientTraining) -> TaskTrainer:
    """Return a trainer for the learner of a task."""
    if isinstance(task.learner, ArrayLearner):
        return InProcessArrays(task)
    from fedplat.simulation.engines.client_trainer import InProcessTrainer

    return InProcessTrainer(task)


class ArrayTrainer:
    """Trains clients one after the other with a learner, on the examples that the caller passes.

    Raises `JobFileError` for options that the learner does not support.
    """

    splits_test = False

    def __init__(self, learner: ArrayLearner, config: Config, seed: int = 0, num_rounds: int = 0) -> None:
        self._learner = learner if isinstance(learner, StatefulLearner) else _Stateless(learner)
        self._config, self._num_rounds = config, num_rounds
        self._name = type(learner).__name__
        check_config(learner, config)
        self._schema: Schema = learner.initial(seed).schema
        self._versions: dict[int, Parameters] = {}

    def check(self, model: Parameters) -> None:
        """Raise `ModelError` if a model does not have the tensors of the initial one, besides those of the server."""
        if difference := model.schema.uploaded.difference_from(self._schema):
            raise ModelError(f"the model does not fit the learner {self._name}: {difference}")

    def publish(self, version: int, model: Parameters) -> None:
        """Store a version until it is retired. Raises `ModelError` if it does not fit the learner."""
        self.check(model)
        self._versions[version] = model

    def retire(self, version: int) -> None:
        """Remove a version."""
        del self._versions[version]

    def answer_on(self, data: Data, task: ClientTask, contents: Contents, buffer: Bytes | None = None) -> LocalResult:
        """Train or score on a client's examples; the update is written to `buffer` if there is one."""
        base, state = self._versions[task.version], ClientState(contents)
        if task.scores:
            weight, metrics = self._score(data, base, state)
            return LocalResult(NO_UPDATE, metrics, None, weight)
        parameters = base.copy()
        config = config_of_round(self._config, task.training_round)
        this = Round(number=task.training_round, num_rounds=self._num_rounds, seed=task.seed, client_state=state)
        with one_thread_of_torch(), use_seeds(task.seed), user_code.wrap_errors(f"{self._name}.train()"):
            weight, metrics = self._learner.train_round(parameters, data, config, this)
            metrics = _check_metrics(metrics)
        update = parameters.minus(base)
        if buffer is not None:
            buffer[:] = update.buffer
        return LocalResult(update, metrics, state.contents if state.changed else None, weight)

    def evaluate_on(self, data: Data, model: Parameters) -> dict[str, float]:
        """Score a model; returns no metrics if there are no examples."""
        return self._score(data, model, ClientState())[1] if len(data[1]) else {}

    def _score(self, data: Data, model: Parameters, state: ClientState) -> tuple[float | None, dict[str, float]]:
        with one_thread_of_torch(), use_seeds(0), user_code.wrap_errors(f"{self._name}.evaluate()"):
            weight, metrics = self._learner.score(model, data, self._config, state)
            return weight, _check_metrics(metrics)

    def examples(self, inputs: Array, targets: Array, part: Part) -> Data:
        """Return copies of the examples at the indices `part`."""
        return inputs[part], targets[part]


class InProcessArrays(ArrayTrainer):
    """Trains clients on data in the memory of this process: a `TaskTrainer`."""

    def __init__(self, task: ClientTraining) -> None:
        super().__init__(task.learner, task.options, task.seed, task.num_rounds)
        self._federation = task.federation

    def answer(self, task: ClientTask, contents: Contents, buffer: Bytes | None = None) -> LocalResult:
        """Train or score a client; the update is written to `buffer` if there is one."""
        data = self._federation
        part = (data.held_out if task.scores else data.parts)[task.client]
        return self.answer_on(self.examples(data.inputs, data.targets, part), task, contents, buffer)

    def evaluate(self, model: Parameters, start: int = 0, stop: int | None = None) -> dict[str, float]:
        """Score a model on the central test examples [start, stop); returns no metrics without examples."""
        data = self._federation
        return self.evaluate_on((data.test_inputs[start:stop], data.test_targets[start:stop]), model)


class _Stateless:
    """A learner without memory, whose clients weigh as much as they have examples."""

    def __init__(self, learner: ArrayLearner) -> None:
        self._inner = learner

    def train_round(
        self, parameters: Parameters, data: Data, config: Config, this: Round
    ) -> tuple[None, Mapping[str, float]]:
        return None, self._inner.train(parameters, data, config, this.seed)

    def score(
        self, parameters: Parameters, data: Data, config: Config, client_state: ClientState
    ) -> tuple[None, Mapping[str, float]]:
        return None, self._inner.evaluate(parameters, data)


def _check_metrics(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise UserCodeError(f"the learner returned a {type(metrics).__name__}; expected metrics, a mapping of numbers")
    checked: dict[str, float] = {}
    for name, value in cast(Mapping[object, Any], metrics).items():
        try:
            checked[str(name)] = float(value)
        except (TypeError, ValueError) as exc:
            raise UserCodeError(f"the learner returned the metric {name!r}, {value!r}; expected a number") from exc
    return checked


@contextmanager
def one_thread_of_torch() -> Generator[None]:
    """Compute on the calling thread inside the block, if PyTorch is used: sums have the same order in all processes."""
    if "torch" not in sys.modules:
        yield
        return
    from fedplat.simulation.engines.client_trainer import one_thread

    with one_thread():
        yield
