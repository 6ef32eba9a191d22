"""What the fits of all estimators have in common: an estimator's class, its options, and the shape of its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fedplat.learner import Data

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

    data: Data
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
