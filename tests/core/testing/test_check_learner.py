"""The checks of learners name the violation of each that is broken on purpose."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from msgspec import Struct

from fedplat.learner import Config, Data, check_data
from fedplat.model import Parameters
from fedplat.testing import ConformanceError, check_learner

CALLS = itertools.count()
DATA = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6) % 2


class Mean(Struct, frozen=True):
    """The mean of the inputs."""

    def initial(self, seed: int) -> Parameters:
        return Parameters.from_arrays({"mean": np.zeros(2, np.float32)})

    def train(self, parameters: Parameters, data: Data, config: Config, seed: int) -> Any:
        parameters["mean"][:] = check_data(data)[0].mean(0)
        return {"loss": 0.0}

    def evaluate(self, parameters: Parameters, data: Data) -> dict[str, float]:
        return {"loss": float(((data[0] - parameters["mean"]) ** 2).mean())}


class NoMethods(Struct, frozen=True):
    def initial(self, seed: int) -> Parameters:
        return Parameters.from_arrays({})


class RandomStart(Mean, frozen=True):
    def initial(self, seed: int) -> Parameters:
        return Parameters.from_arrays({"mean": np.full(2, next(CALLS), np.float32)})


class RandomSteps(Mean, frozen=True):
    def train(self, parameters: Parameters, data: Data, config: Config, seed: int) -> Any:
        parameters["mean"][:] = next(CALLS)
        return {}


class Idle(Mean, frozen=True):
    def train(self, parameters: Parameters, data: Data, config: Config, seed: int) -> Any:
        return {}


class Copies(Mean, frozen=True):
    def train(self, parameters: Parameters, data: Data, config: Config, seed: int) -> Any:
        super().train(parameters, data, config, seed)
        return [0.0]


class ChangesData(Mean, frozen=True):
    def train(self, parameters: Parameters, data: Data, config: Config, seed: int) -> Any:
        metrics = super().train(parameters, data, config, seed)
        data[0][:] = 0.0
        return metrics


class TrainsInEvaluation(Mean, frozen=True):
    def evaluate(self, parameters: Parameters, data: Data) -> dict[str, float]:
        parameters["mean"] += 1
        return {"loss": 0.0}


class AcceptsAll(Mean, frozen=True):
    def train(self, parameters: Parameters, data: Data, config: Config, seed: int) -> Any:
        parameters["mean"][:] = np.nansum(data[0], axis=0)
        return {}


class AcceptsNaN(Mean, frozen=True):
    def train(self, parameters: Parameters, data: Data, config: Config, seed: int) -> Any:
        parameters["mean"][:] = data[0].max(0)
        return {}


def test_a_learner_that_keeps_its_contract_passes() -> None:
    check_learner(Mean(), DATA)


@pytest.mark.parametrize(
    ("learner", "sentence"),
    [
        (NoMethods(), "the learner has no train()"),
        (RandomStart(), "two calls of initial() with one seed differ"),
        (RandomSteps(), "two trainings with one seed differ"),
        (Idle(), "expected that train() writes to `parameters`"),
        (Copies(), "train() returned a list; expected metrics"),
        (ChangesData(), "the examples changed"),
        (TrainsInEvaluation(), "evaluate() changed the model"),
        (AcceptsAll(), "training on no examples raised no error"),
        (AcceptsNaN(), "training on NaN raised no error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_broken_learner_fails_with_a_clear_sentence(learner: Any, sentence: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_learner(learner, DATA)
    assert sentence in str(caught.value)


def test_one_that_cannot_be_pickled_fails() -> None:
    class Local(Mean, frozen=True):
        pass

    with pytest.raises(ConformanceError, match="it_can_be_pickled: it cannot be pickled"):
        check_learner(Local(), DATA)
