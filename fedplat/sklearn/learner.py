"""The learner of scikit-learn's estimators, for simulations and clients."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, cast

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from fedplat.config.toml import format_value, read_record
from fedplat.errors import DataError, JobFileError, MissingExtraError, ModelError
from fedplat.extras import install_command
from fedplat.learner import Config, Data, check_data
from fedplat.model import Parameters
from fedplat.sklearn import estimators


class _Supported(NamedTuple):
    fit: estimators.Fit
    classifies: bool
    refused: Mapping[str, str] = {}
    """Options that would have no meaning, and why."""
    needs_total: bool = False
    sums: bool = False


_STATE = {"random_state": "the seed of the simulation or of the trainer takes its place"}
_STEPS = {
    **_STATE,
    "average": "the mean over clients takes its place",
    "early_stopping": "the server ends a job",
    "warm_start": "every training starts from the received model",
}
_BATCHES = {**_STEPS, "batch_size": "config.batch_size takes its place"}
_ONE_PASS = {"positive": "the sums of all clients do not give such a fit"}
ESTIMATORS: Mapping[str, _Supported] = {
    "sklearn.linear_model:SGDClassifier": _Supported(estimators.LinearFit(), True, _STEPS),
    "sklearn.linear_model:SGDRegressor": _Supported(estimators.LinearFit(), False, _STEPS),
    "sklearn.linear_model:Perceptron": _Supported(estimators.LinearFit(), True, _STEPS),
    "sklearn.linear_model:LogisticRegression": _Supported(
        estimators.LogisticFit(),
        True,
        {**_STATE, "max_iter": "config.epochs takes its place", "warm_start": _STEPS["warm_start"]},
    ),
    "sklearn.linear_model:LinearRegression": _Supported(estimators.LeastSquaresFit(), False, _ONE_PASS, sums=True),
    "sklearn.linear_model:Ridge": _Supported(
        estimators.LeastSquaresFit(), False, {**_STATE, **_ONE_PASS}, needs_total=True, sums=True
    ),
    "sklearn.neural_network:MLPClassifier": _Supported(estimators.PerceptronFit(), True, _BATCHES),
    "sklearn.neural_network:MLPRegressor": _Supported(estimators.PerceptronFit(), False, _BATCHES),
    "sklearn.naive_bayes:GaussianNB": _Supported(estimators.GaussianFit(), True, sums=True),
    "sklearn.naive_bayes:MultinomialNB": _Supported(estimators.CountsFit(), True, needs_total=True, sums=True),
    "sklearn.naive_bayes:BernoulliNB": _Supported(estimators.CountsFit(), True, needs_total=True, sums=True),
}
"""The estimators that can be trained, by reference."""


class SklearnLearner(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="learner", tag="sklearn"):
    """An estimator of scikit-learn: `[simulation.model] learner = "sklearn"`.

    `estimator` is its reference, `options` are its parameters. `features` is the number of inputs of an example;
    `classes` are the labels of a classifier, or their number if they are 0, 1, 2, ..., since a client need not have
    examples of all. `total_examples` is the number of examples of all clients, which `Ridge` and naive Bayes with a
    prior (`alpha`) need.

    >>> learner = SklearnLearner(estimator="sklearn.linear_model:SGDClassifier", features=64, classes=10)
    >>> {name: values.shape for name, values in learner.initial(0).items()}
    {'coef_': (10, 64), 'intercept_': (10,)}
    """

    estimator: str
    features: Annotated[int, Meta(ge=1, le=10_000_000)]
    classes: Annotated[int, Meta(ge=2, le=1_000_000)] | Sequence[int | str] = ()
    options: dict[str, Any] = {}
    total_examples: Annotated[int, Meta(ge=0, le=10**15)] = 0

    def build(self, folder: Path | None = None) -> Self:
        """Return the learner. Raises `JobFileError` for an estimator, or options, that cannot be used."""
        fit, problem = self._supported.fit, self._problem()
        targets = np.zeros(1) if problem.classes is None else problem.classes
        examples = np.zeros((len(targets), self.features)), targets
        try:
            _check_options(problem, examples)
            fit.train(problem, fit.initial(problem, 0), estimators.Work(examples, fit.config(), seed=0))
        except (ValueError, TypeError) as exc:
            raise JobFileError(f"options: {_first_line(exc)}") from exc
        return self

    def initial(self, seed: int = 0) -> Parameters:
        """Return the initial model. Raises `JobFileError`."""
        return _pack(self._supported.fit.initial(self._problem(), seed))

    def train(
        self,
        parameters: Parameters,
        data: Data,
        config: Config,
        seed: int,
        after_step: estimators.AfterStep = lambda done: None,
    ) -> dict[str, float]:
        """Train the model in place; return its scores on the same examples, and `local_steps`.

        Raises `ModelError` if the model is not one of this estimator, `JobFileError` for a key of `[config]` that the
        estimator does not have, and `DataError` for examples that it cannot use.
        """
        fit, problem = self._supported.fit, self._problem()
        examples = self._convert(problem, data)
        work = estimators.Work(examples, read_record(config, fit.config, "config."), seed, after_step)
        with _one_thread():
            trained, steps = fit.train(problem, self._arrays(parameters), work)
            scores = _score(fit, problem, trained, examples)
        with np.errstate(over="ignore"):
            for name, values in trained.items():
                parameters[name][...] = values
        if not parameters.is_finite():
            raise DataError(
                "the training has diverged: the model holds NaN or infinite values; use a lower learning rate"
            )
        return {**scores, "local_steps": float(steps)}

    def evaluate(self, parameters: Parameters, data: Data) -> dict[str, float]:
        """Score a model: `loss` and `accuracy` of a classifier, `loss` and `r2` of a regression."""
        problem = self._problem()
        examples = self._convert(problem, data)
        with _one_thread():
            return _score(self._supported.fit, problem, self._arrays(parameters), examples)

    def check_config(self, config: Config) -> None:
        """Raise `JobFileError` for a key of `[config]` that the estimator does not have, or a value out of range."""
        read_record(config, self._supported.fit.config, "config.")

    def restore(self, parameters: Parameters) -> Any:
        """Return a fitted estimator of scikit-learn with the values of a model. Raises `ModelError`."""
        return self._supported.fit.restore(self._problem(), self._arrays(parameters))

    @property
    def sums(self) -> bool:
        """True if the model is a sum over examples, of which a job may only compute the mean."""
        found = ESTIMATORS.get(self.estimator)
        return found is not None and found.sums

    @property
    def _supported(self) -> _Supported:
        found = ESTIMATORS.get(self.estimator)
        if found is None:
            close = difflib.get_close_matches(self.estimator, ESTIMATORS, n=1, cutoff=0.8)
            raise JobFileError(
                f"estimator = {self.estimator!r}: an estimator needs arrays that can be averaged, so "
                f"expected one of {', '.join(ESTIMATORS)}" + "".join(f"; did you mean {name}?" for name in close)
            )
        return found

    def _problem(self) -> estimators.Problem:
        supported = self._supported
        for name, reason in supported.refused.items():
            if name in self.options:
                raise JobFileError(f"options.{name} = {format_value(self.options[name])}: {reason}")
        if supported.needs_total and not self.total_examples:
            raise JobFileError(
                f"total_examples = 0: {self.estimator} weighs a prior or a penalty against the "
                "examples; expected the number of examples of all clients together"
            )
        estimator = _import(self.estimator)
        known = estimator().get_params()
        if unknown := sorted(self.options.keys() - known.keys()):
            raise JobFileError(
                f"options.{unknown[0]}: {estimator.__name__} has no such parameter; known parameters: "
                f"{', '.join(sorted(known))}"
            )
        return estimators.Problem(
            estimator=estimator,
            options=self.options,
            features=self.features,
            classes=self._labels(supported.classifies),
            total_examples=self.total_examples,
        )

    def _labels(self, classifies: bool) -> npt.NDArray[Any] | None:
        labels = np.arange(self.classes) if isinstance(self.classes, int) else np.unique(np.array(self.classes))
        if not classifies:
            if len(labels):
                raise JobFileError(f"classes: {self.estimator} predicts numbers; leave the key out")
            return None
        if len(labels) < 2:
            raise JobFileError(
                f"classes: {self.estimator} is a classifier; expected its labels, at least two, or their number"
            )
        return labels

    def _convert(self, problem: estimators.Problem, data: Data) -> Data:
        """Return inputs [examples, features] and targets [examples]. Raises `DataError` if they do not fit."""
        inputs, targets = check_data(data)
        inputs = np.ascontiguousarray(inputs.reshape(len(inputs), -1), dtype=np.float64)
        if inputs.shape[1] != problem.features:
            raise DataError(f"an example has {inputs.shape[1]} inputs; expected features, {problem.features}")
        targets = targets.reshape(len(targets), -1)
        if targets.shape[1] != 1:
            raise DataError(f"an example has {targets.shape[1]} targets; expected one")
        targets = targets[:, 0]
        if problem.classes is None:
            return inputs, targets.astype(np.float64)
        if len(other := np.setdiff1d(targets, problem.classes)):
            labels = problem.classes.tolist()
            known = ", ".join(map(repr, labels[:10])) + (", ..." if len(labels) > 10 else "")
            raise DataError(f"the targets have the label {other.tolist()[0]!r}; expected one of the classes {known}")
        return inputs, targets

    def _arrays(self, parameters: Parameters) -> estimators.Arrays:
        expected = self.initial().schema
        if difference := parameters.schema.difference_from(expected):
            raise ModelError(f"the model does not fit {self.estimator}: {difference}")
        return dict(parameters)


def _check_options(problem: estimators.Problem, examples: Data) -> None:
    """Let scikit-learn check the options, which it does in the first training of an estimator only."""
    fitted = problem.make()
    if not hasattr(fitted, "partial_fit"):
        fitted.fit(*examples)
    elif problem.classes is None:
        fitted.partial_fit(*examples)
    else:
        fitted.partial_fit(*examples, classes=problem.classes)


def _score(
    fit: estimators.Fit, problem: estimators.Problem, arrays: estimators.Arrays, examples: Data
) -> dict[str, float]:
    return (score_regressor if problem.classes is None else score_classifier)(fit.restore(problem, arrays), examples)


def _pack(arrays: estimators.Arrays) -> Parameters:
    return Parameters.from_arrays({name: values.astype(np.float32) for name, values in arrays.items()})


def _import(reference: str) -> type[Any]:
    try:
        from sklearn import linear_model, naive_bayes, neural_network
    except ImportError as exc:
        raise MissingExtraError(
            f"scikit-learn is not installed; install it with: {install_command('sklearn')}"
        ) from exc
    modules = {
        "sklearn.linear_model": linear_model,
        "sklearn.naive_bayes": naive_bayes,
        "sklearn.neural_network": neural_network,
    }
    module, _, name = reference.partition(":")
    return cast(type[Any], getattr(modules[module], name))


@functools.cache
def _controller() -> Any:
    from threadpoolctl import ThreadpoolController  # scikit-learn requires it

    return ThreadpoolController()


def _one_thread() -> Any:
    """Compute on one thread inside the block: sums of several threads would have other bits."""
    return _controller().limit(limits=1)


def _first_line(exc: Exception) -> str:
    return str(exc).strip().partition("\n")[0]


_SMALLEST = 1e-15
"""The least probability of an answer: its logarithm is finite."""


def score_classifier(fitted: Any, data: Data) -> dict[str, float]:
    """Return `accuracy` and `loss`, the mean log loss, or hinge loss if the estimator gives no probabilities."""
    inputs, targets = data
    answers: npt.NDArray[np.int64] = np.searchsorted(fitted.classes_, targets)
    rows = np.arange(len(targets))
    with np.errstate(divide="ignore", invalid="ignore"):  # a class without examples has probability 0
        if hasattr(fitted, "predict_proba"):
            scores = np.nan_to_num(fitted.predict_proba(inputs))
            losses = -np.log(np.maximum(scores[rows, answers], _SMALLEST))
        else:
            scores = np.asarray(fitted.decision_function(inputs))
            if scores.ndim == 1:
                scores = np.column_stack([-scores, scores]) / 2
            others = scores.copy()
            others[rows, answers] = -np.inf
            losses = np.maximum(0.0, 1.0 - scores[rows, answers] + others.max(1))
    return {"loss": float(losses.mean()), "accuracy": float((scores.argmax(1) == answers).mean())}


def score_regressor(fitted: Any, data: Data) -> dict[str, float]:
    """Return `loss`, the mean squared error, and `r2` unless all targets are equal."""
    inputs, targets = data
    squares = (fitted.predict(inputs) - targets) ** 2
    variance = float(np.var(targets))
    metrics = {"loss": float(squares.mean())}
    return {**metrics, "r2": 1.0 - metrics["loss"] / variance} if variance else metrics
