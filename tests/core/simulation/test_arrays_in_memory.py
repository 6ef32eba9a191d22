"""Arrays that a program passes: what a file source refuses in words, they are refused in words too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedplat.errors import DataError
from fedplat.job import Selection
from fedplat.pytorch.training import Learner
from fedplat.simulation import SimulationOptions, make_job, simulate
from fedplat.simulation.data import Dataset, Federation

INPUTS = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
LABELS = (INPUTS[:, 0] > 0).astype(np.int64)
LOOP: Any = "loop"
NAMES = np.array(["no", "yes"])[LABELS]


def with_nan() -> np.ndarray:
    inputs = INPUTS.copy()
    inputs[7, 1] = np.nan
    return inputs


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (INPUTS.tolist(), LABELS.tolist()),
        (pd.DataFrame(INPUTS), pd.Series(LABELS)),
        (pd.DataFrame(INPUTS), pd.Series(LABELS, index=np.random.default_rng(1).permutation(30))),  # rows have an order
        (torch.from_numpy(INPUTS), torch.from_numpy(LABELS)),
        (INPUTS, LABELS.astype(bool)),
        (INPUTS, NAMES),
        (INPUTS, pd.Series(NAMES)),
        (INPUTS, pd.Categorical(NAMES)),
    ],
)
def test_what_people_have_becomes_arrays(inputs: Any, targets: Any) -> None:
    found = Dataset.from_arrays(inputs, targets, (inputs, targets))
    for values in (found.inputs, found.test_inputs):
        assert type(values) is np.ndarray
        np.testing.assert_allclose(values, INPUTS)
    for values in (found.targets, found.test_targets):
        assert type(values) is np.ndarray
        assert values.dtype == np.int64
        np.testing.assert_array_equal(values, LABELS)
    is_text = isinstance(np.asarray(targets).flat[0], str)
    assert found.classes == (("no", "yes") if is_text else ())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Dataset.from_arrays(with_nan(), LABELS), r"inputs, row 8, column 2: nan; leave the row out"),
        (lambda: Dataset.from_arrays(INPUTS, LABELS, (with_nan(), LABELS)), r"test_inputs, row 8, column 2: nan"),
        (lambda: Dataset.from_arrays(INPUTS, np.where(LABELS, np.inf, 0.5)), r"targets, row \d+: inf"),
        (lambda: Dataset.from_arrays([[1.0], [1.0, 2.0]], [0, 1]), "inputs cannot be an array"),
        (lambda: Dataset.from_arrays(np.ma.masked_array(INPUTS, INPUTS > 1), LABELS), "inputs has masked values"),
        (lambda: Dataset.from_arrays(pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}), [0, 1]), "inputs has values of the"),
        (lambda: Dataset.from_arrays(NAMES, LABELS), "inputs has texts; expected numbers of one type"),
        (
            lambda: Dataset.from_arrays(INPUTS, pd.Series([None, 1] * 15, dtype="Int64")),
            "targets.* (nan|type)",
        ),
        (lambda: Dataset.from_arrays(INPUTS, NAMES, (INPUTS, ["maybe"] * 30)), "the class 'maybe', which no example"),
        (lambda: federation(INPUTS, NAMES), r"targets has texts; .* Dataset.from_arrays\(inputs, targets\) turns"),
        (lambda: run(federation(with_nan(), LABELS)), r"inputs, row 8 of client 0, column 2: nan; leave the row out"),
    ],
)
def test_mistakes(make: Callable[[], object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        make()


def federation(inputs: Any, targets: Any) -> Federation:
    parts = [np.arange(15), np.arange(15, 30)]
    return Federation(inputs, targets, parts, inputs[:0], targets[:0])


def run(data: Federation | Dataset) -> object:
    job = make_job(
        None,
        rounds=1,
        selection=Selection(goal=2, over_selection=1.0),
        config={"epochs": 1, "batch_size": 4, "learning_rate": 0.1},
    )
    learner = Learner(model=lambda: nn.Linear(3, 2))
    return simulate(job, SimulationOptions(engine=LOOP), data=data, learner=learner, progress=False).model


def test_the_examples_of_a_client_are_rows_and_not_labels_of_an_index() -> None:
    shuffled = pd.Series(LABELS, index=np.random.default_rng(1).permutation(30))
    found = federation(pd.DataFrame(INPUTS), shuffled)
    np.testing.assert_array_equal(found.examples(1)[1], LABELS[15:])
    assert run(found) == run(federation(INPUTS, LABELS))
