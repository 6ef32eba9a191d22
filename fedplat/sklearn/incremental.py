"""Estimators with `partial_fit`, which make steps of gradient descent: linear models and multi-layer perceptrons."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct
from typing_extensions import override

from fedplat.sklearn.problem import Arrays, Fit, Problem, Work, as_float64, attributes_of

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
