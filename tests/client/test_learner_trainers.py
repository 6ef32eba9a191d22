"""Trainers for learners: scikit-learn, and a user's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from fedplat.errors import DataError, JobFileError, ModelError
from fedplat.learner import Data
from fedplat.model import Parameters
from fedplat_client import Cancelled, ClientOptions, Task
from fedplat_client.task import Control
from fedplat_client.trainers.learner import LearnerTrainer
from fedplat_client.trainers.sklearn import SklearnTrainer
from support.learners import Centroids

RNG = np.random.default_rng(4)
LABELS = np.arange(50) % 3
INPUTS = RNG.normal(size=(50, 4)) + LABELS[:, None]


def make(**changes: Any) -> SklearnTrainer:
    options: dict[str, Any] = {
        "estimator": "sklearn.linear_model:SGDClassifier",
        "features": 4,
        "classes": 3,
        "data": (INPUTS, LABELS),
    }
    return SklearnTrainer(**{**options, **changes})


def seven(task: Task) -> int:
    return 7


def make_task(trainer: Any, round: int = 1, **config: Any) -> Task:
    return Task(name="small", parameters=trainer.learner.initial(0), config=config, round=round)


@pytest.mark.parametrize(
    "trainer", [make(), LearnerTrainer(learner=Centroids(features=4, classes=3), data=(INPUTS, LABELS))]
)
def test_it_trains_and_evaluates(trainer: Any) -> None:
    task = make_task(trainer)
    before = trainer.evaluate(task)
    result = trainer(task)
    assert result.num_examples == before.num_examples == 50
    assert task.control.fraction == 1.0
    assert result.parameters is task.parameters
    after = trainer.evaluate(task)
    assert after.metrics["accuracy"] > max(0.5, before.metrics["accuracy"])
    assert after.metrics["accuracy"] == result.metrics["accuracy"]


def test_rounds_and_seeds_draw_anew_and_repeat() -> None:
    def train(round: int = 1, **changes: Any) -> bytes:
        task = make_task(make(**changes), round, learning_rate=0.1, epochs=1)
        make(**changes)(task)
        return task.parameters.to_bytes()

    assert train() == train() == train(seed=0)
    assert len({train(), train(round=2), train(seed=1), train(seed=seven)}) == 4
    assert train(seed=seven) == train(round=2, seed=seven)


def test_the_learning_rate_decays_with_rounds() -> None:
    first, second = (
        make_task(make(), learning_rate=0.05),
        make_task(make(), 2, learning_rate=0.1, learning_rate_decay=0.5),
    )
    for task in (first, second):
        make(seed=seven)(task)
    assert first.parameters == second.parameters


def test_data_may_be_a_function_of_the_task() -> None:
    asked: list[str] = []

    def data(task: Task) -> Data:
        asked.append(task.name)
        return INPUTS[:8], LABELS[:8]

    trainer = make(data=data)
    assert trainer(make_task(trainer)).num_examples == 8
    assert asked == ["small"]


def test_mistakes_are_refused() -> None:
    with pytest.raises(JobFileError, match=r"estimator = 'sklearn.tree:Tree': .* expected one of sklearn"):
        make(estimator="sklearn.tree:Tree")
    wrong: dict[str, Any] = {"momentum": 0.9, "dp": "flat", "epochs": 0}
    for key, value in wrong.items():
        with pytest.raises(JobFileError, match=f"config.{key} = "):
            make()(make_task(make(), **{key: value}))
    with pytest.raises(DataError, match="there are no examples"):
        make(data=(INPUTS[:0], LABELS[:0]))(make_task(make()))
    with pytest.raises(DataError, match="the inputs hold NaN"):
        make(data=(INPUTS * np.nan, LABELS)).evaluate(make_task(make()))
    foreign = Task(name="small", parameters=Parameters.from_arrays({"coef_": np.zeros((3, 9), "f4")}))
    with pytest.raises(ModelError, match=r"does not fit sklearn\.linear_model:SGDClassifier"):
        make()(foreign)


def test_lists_and_tensors_are_arrays() -> None:
    task, other = make_task(make()), make_task(make())
    make()(task)
    make(data=(INPUTS.tolist(), torch.from_numpy(LABELS)))(other)
    assert other.parameters == task.parameters


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((csr_matrix(INPUTS), LABELS), "the inputs are a csr_matrix; .*; use .toarray"),
        ((np.ma.masked_greater(INPUTS, 1.0), LABELS), "the inputs have masked values"),
        (([[1.0], [1.0, 2.0]], [0, 1]), "the inputs cannot be an array"),
        (lambda task: None, "the data is a NoneType; expected a pair"),  # pyright: ignore[reportUnknownLambdaType]
        ((INPUTS, LABELS.astype(str)), "the targets have the label '0'; expected one of the classes 0, 1, 2"),
    ],
)
def test_what_is_no_pair_of_arrays_is_refused(data: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        make(data=data)(make_task(make()))


def test_a_training_ends_at_its_deadline() -> None:
    now = [0.0]
    control = Control(training_timeout_s=10.0, options=ClientOptions(clock=lambda: now[0]))

    def data(task: Task) -> Data:
        now[0] = 11.0
        return INPUTS, LABELS

    task = Task(name="small", parameters=make().learner.initial(0), control=control)
    with pytest.raises(Cancelled):
        make(data=data)(task)
