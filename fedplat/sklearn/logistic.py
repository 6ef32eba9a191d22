"""Logistic regression: some iterations of its solver on all examples of a client, from the received weights."""

from __future__ import annotations

import threading
import warnings
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from typing_extensions import override

from fedplat.sklearn.problem import Arrays, Fit, Problem, Work, as_float64, attributes_of

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
