"""The fits of estimators: logistic regression, those from sums over examples, and those with `partial_fit`.

The model has those sums, divided by the number of examples. A client replaces them by its own, so the mean over
clients, weighted by their numbers of examples, has the sums of all their examples: one round gives the estimator that
scikit-learn fits to the pooled data, up to rounding. The means of fitted estimators would not: a client without a
class has no mean of it.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from typing_extensions import override

from fedplat import errors, learner

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
AfterStep: TypeAlias = Callable[[float], object]
"""Called with the fraction of a training that is done."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """An estimator's class and options, the number of features, and the class labels (None: regression).

    `total_examples` is the number of examples of all clients, or 0.
    """

    estimator: type[Any]
    options: Mapping[str, Any]
    features: int
    classes: npt.NDArray[Any] | None
    total_examples: int = 0

    def make(self, **replaced: Any) -> Any:
        """Create the estimator, some of whose options are replaced."""
        return self.estimator(**{**self.options, **replaced})


class Work(NamedTuple):
    """One training: the examples, the options of the job, and the seed of all randomness."""

    data: learner.Data
    config: Any
    seed: int
    after_step: AfterStep = lambda done: None


class Fit(Protocol):
    """How one kind of estimators is trained; `config` is the record of the keys that it supports in `[config]`."""

    config: type[Struct]

    def initial(self, problem: Problem, seed: int) -> Arrays:
        """Return the initial arrays, by the names of the estimator's attributes where it has such."""
        ...

    def train(self, problem: Problem, arrays: Arrays, work: Work) -> tuple[Arrays, int]:
        """Return the trained arrays and the number of steps."""
        ...

    def restore(self, problem: Problem, arrays: Arrays) -> Any:
        """Return a fitted estimator with these arrays."""
        ...


class NoConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a training that has none."""


def attributes_of(problem: Problem) -> dict[str, Any]:
    """Return the attributes that every fitted estimator of a problem has."""
    classes = {} if problem.classes is None else {"classes_": problem.classes}
    return {"n_features_in_": problem.features, **classes}


def as_float64(arrays: Arrays) -> Arrays:
    """Return copies in the precision in which scikit-learn computes."""
    return {name: np.array(array, np.float64, order="C") for name, array in arrays.items()}


_FILTERS = threading.Lock()
"""Warning filters belong to the process."""


class LogisticConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `[config]`: `epochs` is the largest number of iterations of the solver."""

    epochs: Annotated[int, Meta(ge=1, le=1_000_000)] = 1


class LogisticFit(Fit):
    """`LogisticRegression`, with any solver that can continue from given weights."""

    config = LogisticConfig

    @override
    def initial(self, problem: Problem, seed: int) -> Arrays:
        assert problem.classes is not None
        rows = 1 if len(problem.classes) == 2 else len(problem.classes)
        return {"coef_": np.zeros((rows, problem.features)), "intercept_": np.zeros(rows)}

    @override
    def train(self, problem: Problem, arrays: Arrays, work: Work) -> tuple[Arrays, int]:
        from sklearn.exceptions import ConvergenceWarning

        classes = problem.classes
        assert classes is not None
        inputs, targets = work.data
        weights, options = np.ones(len(targets)), dict[str, object](max_iter=work.config.epochs, warm_start=True)
        if problem.options.get("class_weight") == "balanced":
            weights, options["class_weight"] = _balance(targets), None
        fitted = self._load(problem, problem.make(**options), arrays)
        # Each class is present, with an example whose weight is 0: else the weights would have another shape.
        inputs = np.concatenate([inputs, np.zeros((len(classes), problem.features))])
        weights = np.concatenate([weights, np.zeros(len(classes))])
        with _FILTERS, warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # few iterations are what a round asks for
            fitted.fit(inputs, np.concatenate([targets, classes]), weights)
        work.after_step(1.0)
        return {"coef_": fitted.coef_, "intercept_": fitted.intercept_}, int(np.max(fitted.n_iter_))

    @override
    def restore(self, problem: Problem, arrays: Arrays) -> Any:
        return self._load(problem, problem.make(), arrays)

    def _load(self, problem: Problem, fitted: Any, arrays: Arrays) -> Any:
        if fitted.solver == "liblinear":
            raise ValueError('solver = "liblinear" cannot continue from given weights; use "lbfgs"')
        for name, value in {**as_float64(arrays), **attributes_of(problem)}.items():
            setattr(fitted, name, value)
        return fitted


def _balance(targets: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the weight of each example, so that all classes that the client has count alike.

    scikit-learn would divide by the number of examples of a class that is missing, which is 0.
    """
    _, members, counts = np.unique(targets, return_inverse=True, return_counts=True)
    return (len(targets) / (len(counts) * counts))[members]


class GaussianFit(Fit):
    """`GaussianNB`: the count of each class, and sums of its features and of their squares."""

    config = NoConfig

    @override
    def initial(self, problem: Problem, seed: int) -> Arrays:
        return _zeros(problem, "sums", "squares")

    @override
    def train(self, problem: Problem, arrays: Arrays, work: Work) -> tuple[Arrays, int]:
        inputs, targets = work.data
        member = _members(problem, targets)
        return _per_example({"counts": member.sum(1), "sums": member @ inputs, "squares": member @ inputs**2}, work)

    @override
    def restore(self, problem: Problem, arrays: Arrays) -> Any:
        values, fitted = as_float64(arrays), problem.make()
        counts, sums, squares = values["counts"], values["sums"], values["squares"]
        if not counts.any():  # the initial model: all classes are equal
            counts, squares = np.ones_like(counts), np.ones_like(squares)
        variance = (squares.sum(0) - sums.sum(0) ** 2 / counts.sum()) / counts.sum()
        fitted.epsilon_ = fitted.var_smoothing * max(float(variance.max()), np.finfo(np.float64).tiny)
        known = np.maximum(counts, np.finfo(np.float64).tiny)[:, None]
        fitted.theta_ = sums / known
        fitted.var_ = np.maximum(squares / known - fitted.theta_**2, 0.0) + fitted.epsilon_
        fitted.class_count_ = counts * (problem.total_examples or 1)
        fitted.class_prior_ = counts / counts.sum() if fitted.priors is None else np.asarray(fitted.priors)
        for name, value in attributes_of(problem).items():
            setattr(fitted, name, value)
        return fitted


class CountsFit(Fit):
    """`MultinomialNB` and `BernoulliNB`: the count of each class, and sums of its features."""

    config = NoConfig

    @override
    def initial(self, problem: Problem, seed: int) -> Arrays:
        return _zeros(problem, "sums")

    @override
    def train(self, problem: Problem, arrays: Arrays, work: Work) -> tuple[Arrays, int]:
        inputs, targets = work.data
        threshold = problem.make().get_params().get("binarize")
        if threshold is not None:
            inputs = (inputs > threshold).astype(np.float64)
        if inputs.min() < 0:
            raise errors.DataError(f"the inputs have the value {inputs.min():g}; expected counts of at least 0")
        member = _members(problem, targets)
        return _per_example({"counts": member.sum(1), "sums": member @ inputs}, work)

    @override
    def restore(self, problem: Problem, arrays: Arrays) -> Any:
        values, fitted = as_float64(arrays), problem.make()
        counts, sums = values["counts"], values["sums"]
        if not counts.any():
            counts = np.ones_like(counts)
        is_binary = "binarize" in fitted.get_params()
        threshold = fitted.binarize if is_binary else None
        if is_binary:
            fitted.binarize = None  # the means below are no examples
        # One example for each class, its mean, with the weight of all of them: the sums are those of all examples.
        means = np.maximum(sums / np.maximum(counts, np.finfo(np.float64).tiny)[:, None], 0.0)
        weights = counts / counts.sum() * problem.total_examples
        with np.errstate(divide="ignore"):  # the logarithm of the count 0 of a class that no client has
            fitted.partial_fit(means, problem.classes, problem.classes, weights)
        if is_binary:
            fitted.binarize = threshold
        return fitted


class LeastSquaresFit(Fit):
    """`LinearRegression` and `Ridge`: the products of all pairs of features, and of features and targets."""

    config = NoConfig

    @override
    def initial(self, problem: Problem, seed: int) -> Arrays:
        size = problem.features + 1
        return {"products": np.zeros((size, size)), "moments": np.zeros(size)}

    @override
    def train(self, problem: Problem, arrays: Arrays, work: Work) -> tuple[Arrays, int]:
        inputs, targets = work.data
        inputs = np.column_stack([inputs, np.ones(len(inputs))])
        return _per_example({"products": inputs.T @ inputs, "moments": inputs.T @ targets}, work)

    @override
    def restore(self, problem: Problem, arrays: Arrays) -> Any:
        values, fitted = as_float64(arrays), problem.make()
        products, moments = values["products"], values["moments"]
        penalty = float(getattr(fitted, "alpha", 0.0)) / (problem.total_examples or 1)
        products[np.arange(problem.features), np.arange(problem.features)] += penalty  # not that of the intercept
        size = problem.features + bool(fitted.fit_intercept)
        solution: npt.NDArray[np.float64] = np.linalg.lstsq(products[:size, :size], moments[:size], rcond=None)[0]
        fitted.coef_ = solution[: problem.features]
        fitted.intercept_ = float(solution[problem.features]) if fitted.fit_intercept else 0.0
        for name, value in attributes_of(problem).items():
            setattr(fitted, name, value)
        return fitted


def _zeros(problem: Problem, *names: str) -> Arrays:
    assert problem.classes is not None
    shape = (len(problem.classes), problem.features)
    return {"counts": np.zeros(len(problem.classes)), **{name: np.zeros(shape) for name in names}}


def _members(problem: Problem, targets: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return 1 for each class and each example of it, and 0 elsewhere: [classes, examples]."""
    assert problem.classes is not None
    return (problem.classes[:, None] == targets).astype(np.float64)


def _per_example(sums: Arrays, work: Work) -> tuple[Arrays, int]:
    work.after_step(1.0)
    return {name: array / len(work.data[1]) for name, array in sums.items()}, 1


_TINY = 1e-300
"""A learning rate that changes no weight: the first call of `partial_fit` creates the weights, and makes a step."""


class IncrementalConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `[config]`; without `learning_rate` the estimator's own schedule begins anew in each training."""

    epochs: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    batch_size: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    learning_rate: Annotated[float, Meta(gt=0.0, le=1e30)] | None = None


class LinearFit(Fit):
    """Steps of single examples: `SGDClassifier`, `SGDRegressor` and `Perceptron`. Weights are 0 at first."""

    config = IncrementalConfig

    @override
    def initial(self, problem: Problem, seed: int) -> Arrays:
        if problem.classes is None:
            return {"coef_": np.zeros(problem.features), "intercept_": np.zeros(1)}
        rows = 1 if len(problem.classes) == 2 else len(problem.classes)
        return {"coef_": np.zeros((rows, problem.features)), "intercept_": np.zeros(rows)}

    @override
    def train(self, problem: Problem, arrays: Arrays, work: Work) -> tuple[Arrays, int]:
        rate = {} if work.config.learning_rate is None else {"eta0": work.config.learning_rate}
        if rate and "learning_rate" in problem.estimator().get_params():  # a perceptron's rate is always constant
            rate["learning_rate"] = "constant"
        fitted = self._load(problem, problem.make(shuffle=False, random_state=to_state(work.seed), **rate), arrays)
        _train_epochs(fitted, work)
        return {"coef_": fitted.coef_, "intercept_": fitted.intercept_}, work.config.epochs * len(work.data[1])

    @override
    def restore(self, problem: Problem, arrays: Arrays) -> Any:
        return self._load(problem, problem.make(), arrays)

    def _load(self, problem: Problem, fitted: Any, arrays: Arrays) -> Any:
        # With these attributes, `partial_fit` continues as if it had created them in an earlier call.
        for name, values in {**as_float64(arrays), **attributes_of(problem), "t_": 1.0}.items():
            setattr(fitted, name, values)
        return fitted


class PerceptronFit(Fit):
    """Steps of batches: `MLPClassifier`, `MLPRegressor`. The optimizer's memory begins anew in each training."""

    config = IncrementalConfig

    @override
    def initial(self, problem: Problem, seed: int) -> Arrays:
        return self._save(self._make(problem, seed))

    @override
    def train(self, problem: Problem, arrays: Arrays, work: Work) -> tuple[Arrays, int]:
        fitted = self._load(self._make(problem, work.seed), arrays)
        fitted.shuffle = False
        if work.config.learning_rate is not None:
            fitted.learning_rate_init = work.config.learning_rate
        return self._save(fitted), _train_epochs(fitted, work)

    @override
    def restore(self, problem: Problem, arrays: Arrays) -> Any:
        return self._load(self._make(problem, 0), arrays)

    def _make(self, problem: Problem, seed: int) -> Any:
        """Let an estimator create its attributes, by a first call with an example of zeros for each class."""
        fitted, classes = problem.make(random_state=to_state(seed), learning_rate_init=_TINY), problem.classes
        if fitted.solver == "lbfgs":
            raise ValueError('solver = "lbfgs" makes no steps of batches; use "sgd" or "adam"')
        if classes is None:
            fitted.partial_fit(np.zeros((1, problem.features)), np.zeros(1))
        else:
            fitted.partial_fit(np.zeros((len(classes), problem.features)), classes, classes=classes)
        vars(fitted).pop("_optimizer")  # it has the tiny learning rate
        fitted.learning_rate_init = problem.make().learning_rate_init
        return fitted

    def _load(self, fitted: Any, arrays: Arrays) -> Any:
        values = as_float64(arrays)
        for name in ("coefs_", "intercepts_"):
            setattr(fitted, name, [values[f"{name}.{layer}"] for layer in range(len(getattr(fitted, name)))])
        fitted.t_ = 0
        return fitted

    def _save(self, fitted: Any) -> Arrays:
        return {
            f"{name}.{layer}": values
            for name in ("coefs_", "intercepts_")
            for layer, values in enumerate(getattr(fitted, name))
        }


def _train_epochs(fitted: Any, work: Work) -> int:
    """Train on shuffled batches; return their number."""
    (inputs, targets), rng = work.data, np.random.default_rng([work.seed, 0])
    total, size = len(targets), work.config.batch_size or len(targets)
    per_epoch = -(-total // size)
    for epoch in range(work.config.epochs):
        order = rng.permutation(total)
        for number in range(per_epoch):
            batch = order[number * size : (number + 1) * size]
            if hasattr(fitted, "batch_size"):
                fitted.batch_size = len(batch)
            fitted.partial_fit(inputs[batch], targets[batch])
            work.after_step((epoch * per_epoch + number + 1) / (work.config.epochs * per_epoch))
    return work.config.epochs * per_epoch


def to_state(seed: int) -> int:
    """Return a seed of 32 bits, as scikit-learn expects."""
    return int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])
