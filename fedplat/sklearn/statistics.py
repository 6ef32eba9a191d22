"""Estimators whose fit needs nothing but sums over examples: naive Bayes and least squares.

The model has those sums, divided by the number of examples. A client replaces them by its own, so the mean over
clients, weighted by their numbers of examples, has the sums of all their examples: one round gives the estimator that
scikit-learn fits to the pooled data, up to rounding. The means of fitted estimators would not: a client without a
class has no mean of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedplat.errors import DataError
from fedplat.sklearn.problem import Arrays, Fit, NoConfig, Problem, Work, as_float64, attributes_of


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
            raise DataError(f"the inputs have the value {inputs.min():g}; expected counts of at least 0")
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
