"""The checks of learners, on the user's own examples."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from fedplat import claims, model
from fedplat.learner import ArrayLearner, Config, Data
from fedplat.testing.errors import ConformanceError, run_checks

_SEED = 7


@dataclasses.dataclass(frozen=True)
class LearnerUnderTest:
    """A learner, examples of one client, and the configuration of a job."""

    learner: ArrayLearner
    data: Data
    config: Config

    def train(self, seed: int = _SEED, data: Data | None = None) -> tuple[model.Parameters, Mapping[str, float]]:
        """Train the initial model on copies of the examples; return it and the metrics."""
        parameters = self.learner.initial(_SEED)
        inputs, targets = self.data if data is None else data
        return parameters, self.learner.train(parameters, (inputs.copy(), targets.copy()), self.config, seed)


def check_learner(learner: ArrayLearner, data: Data, config: Config | None = None) -> None:
    """Check a learner on the inputs and targets of one client. Raises `ConformanceError` for the first failed check.

    `config` is the job's `[config]`.
    """
    if not isinstance(cast(object, learner), ArrayLearner):
        missing = [name for name in ("initial", "train", "evaluate") if not callable(getattr(learner, name, None))]
        raise ConformanceError("methods", f"the learner has no {missing[0]}(); expected initial, train and evaluate")
    run_checks(CHECKS, LearnerUnderTest(learner, data, config or {}))


def check_the_initial_model_is_stable(tested: LearnerUnderTest) -> Iterator[str]:
    """Require finite values, and equal bits for equal seeds: every process of a simulation creates the model."""
    first, second = (tested.learner.initial(_SEED) for _ in range(2))
    if not isinstance(cast(object, first), model.Parameters):
        yield f"initial() returned a {type(first).__name__}; expected fedplat.model.Parameters"
        return
    if not first:
        yield "the initial model has no tensors"
    if not first.is_finite():
        yield "the initial model holds NaN or infinite values"
    if first.schema != tested.learner.initial(_SEED + 1).schema:
        yield "two seeds give models of different names, shapes or dtypes"
    if first != second:
        yield "two calls of initial() with one seed differ; expected no other randomness"


def check_training_changes_the_model(tested: LearnerUnderTest) -> Iterator[str]:
    """Require that the model is trained in place, and that its tensors are those of the initial one."""
    start = tested.learner.initial(_SEED)
    trained, metrics = tested.train()
    if trained.schema != start.schema:
        yield "training changed names, shapes or dtypes of the model"
    if trained == start:
        yield "training did not change the model; expected that train() writes to `parameters`"
    if not trained.is_finite():
        yield "the trained model holds NaN or infinite values"
    yield from _mistakes_in_metrics("train", metrics)


def check_a_seed_gives_the_same_training(tested: LearnerUnderTest) -> Iterator[str]:
    """Require all randomness from the seed, and no memory, so that simulations repeat."""
    (first, scores), (second, again) = tested.train(), tested.train()
    if first != second or dict(scores) != dict(again):
        yield "two trainings with one seed differ; expected no other randomness, and no memory of earlier trainings"


def check_data_is_not_changed(tested: LearnerUnderTest) -> Iterator[str]:
    """Require that examples stay as they are: clients train on them again."""
    data = (tested.data[0].copy(), tested.data[1].copy())
    parameters = tested.learner.initial(_SEED)
    tested.learner.train(parameters, data, tested.config, _SEED)
    tested.learner.evaluate(parameters, data)
    if not all(np.array_equal(*pair) for pair in zip(data, tested.data, strict=True)):
        yield "the examples changed; expected that only the model does"


def check_evaluation_changes_nothing(tested: LearnerUnderTest) -> Iterator[str]:
    """Require finite metrics, for the initial model too, and a model that stays the same."""
    for parameters in (tested.learner.initial(_SEED), tested.train()[0]):
        before = parameters.copy()
        metrics = tested.learner.evaluate(parameters, tested.data)
        yield from _mistakes_in_metrics("evaluate", metrics)
        if parameters != before:
            yield "evaluate() changed the model"
        if dict(tested.learner.evaluate(parameters, tested.data)) != dict(metrics):
            yield "two evaluations of one model differ; expected no randomness"


def check_unusable_data_is_refused(tested: LearnerUnderTest) -> Iterator[str]:
    """Require an error for no examples, and for NaN: one such update would spoil the mean of all clients."""
    inputs, targets = tested.data
    if not _is_refused(functools.partial(tested.train, data=(inputs[:0], targets[:0]))):
        yield "training on no examples raised no error; expected one, see fedplat.learner.check_data"
    if inputs.dtype.kind == "f":
        broken = inputs.copy()
        broken.flat[0] = np.nan
        if not _is_refused(functools.partial(tested.train, data=(broken, targets))):
            yield "training on NaN raised no error; expected one, see fedplat.learner.check_data"


def check_it_can_be_pickled(tested: LearnerUnderTest) -> Iterator[str]:
    """Require that other processes and machines can train it."""
    try:
        copy = pickle.loads(pickle.dumps(tested.learner))
    except Exception as exc:  # user code may raise anything
        yield f"it cannot be pickled: {type(exc).__name__}: {exc}"
        return
    if dataclasses.replace(tested, learner=copy).train()[0] != tested.train()[0]:
        yield "its pickled copy trains another model"


def _mistakes_in_metrics(function: str, metrics: Any) -> Iterator[str]:
    if not isinstance(metrics, Mapping):
        yield f"{function}() returned a {type(metrics).__name__}; expected metrics, a mapping of numbers"
    elif mistake := claims.check_metrics({str(name): float(value) for name, value in metrics.items()}):
        yield f"{function}() returned {mistake}"


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception:  # any error refuses the data
        return True
    return False


CHECKS = (
    check_the_initial_model_is_stable,
    check_training_changes_the_model,
    check_a_seed_gives_the_same_training,
    check_data_is_not_changed,
    check_evaluation_changes_nothing,
    check_unusable_data_is_refused,
    check_it_can_be_pickled,
)
