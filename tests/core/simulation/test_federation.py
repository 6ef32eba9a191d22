from __future__ import annotations

import doctest

import numpy as np
import pytest

from fedplat.errors import DataError
from fedplat.simulation import data
from fedplat.simulation.data import Dataset, Federation

INPUTS, TARGETS = np.zeros((4, 2), np.float32), np.arange(4)
PARTS = (np.array([0, 2]), np.array([1]))


def test_examples_are_a_copy() -> None:
    federation = Federation(INPUTS, TARGETS, PARTS, INPUTS[:0], TARGETS[:0])
    inputs, targets = federation.examples(0)
    inputs += 1
    assert federation.inputs.sum() == 0
    assert targets.tolist() == [0, 2]
    assert federation.num_clients == 2
    assert federation.num_examples(1) == 1
    assert federation.sizes().tolist() == [2, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((INPUTS, TARGETS[:3], PARTS, INPUTS[:0], TARGETS[:0]), r"inputs have shape \[4, 2\] and targets \[3\]"),
        ((INPUTS, TARGETS, PARTS, INPUTS[:1], TARGETS[:0]), "test_inputs have shape"),
        ((INPUTS, TARGETS, (), INPUTS[:0], TARGETS[:0]), "there are no clients"),
        ((INPUTS, TARGETS, (PARTS[0], PARTS[0][:0]), INPUTS[:0], TARGETS[:0]), "client 1 has no examples"),
        ((INPUTS, TARGETS, (np.array([4]),), INPUTS[:0], TARGETS[:0]), "client 0 has examples 4 to 4; expected 0 to 3"),
        ((INPUTS, TARGETS, (np.array([-1]),), INPUTS[:0], TARGETS[:0]), "client 0 has examples -1 to -1; expected"),
        ((INPUTS, TARGETS, PARTS, INPUTS[:0], TARGETS[:0], ("one",)), "1 names for 2 clients"),
        ((INPUTS, TARGETS, PARTS, INPUTS[:0], TARGETS[:0], (), PARTS[:1]), "held_out has 1 parts for 2 clients"),
        ((INPUTS, TARGETS, PARTS, INPUTS[:0], TARGETS[:0], (), (PARTS[0], PARTS[0][:0])), "client 1 has no held-out"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Federation(*arguments)  # pyright: ignore[reportArgumentType]


def test_datasets_are_checked() -> None:
    with pytest.raises(ValueError, match="there are no examples"):
        Dataset.from_arrays(INPUTS[:0], TARGETS[:0])
    with pytest.raises(ValueError, match="groups has 3 entries"):
        Dataset(INPUTS, TARGETS, INPUTS[:0], TARGETS[:0], TARGETS[:3])


def test_clients_keep_a_part_of_their_examples_from_training() -> None:
    inputs, targets = np.zeros((6, 2), np.float32), np.arange(6)
    whole = Federation(inputs, targets, [np.array([5, 3, 1, 0]), np.array([2, 4])], inputs[:1], targets[:1])
    kept = whole.with_held_out(0.25, seed=3)
    assert [(len(part), len(out)) for part, out in zip(kept.parts, kept.held_out, strict=True)] == [(3, 1), (1, 1)]
    for before, part, out in zip(whole.parts, kept.parts, kept.held_out, strict=True):
        assert [example for example in before if example in part] == part.tolist()  # in their order
        assert sorted([*part, *out]) == sorted(before)
    assert kept.sizes_held_out().tolist() == [1, 1]
    assert whole.sizes_held_out().tolist() == [0, 0]
    drawn = {tuple(whole.with_held_out(0.25, seed).held_out[0]) for seed in range(50)}
    assert len(drawn) == 4
    with pytest.raises(DataError, match="client 1 has a single example"):
        Federation(INPUTS, TARGETS, PARTS, INPUTS[:0], TARGETS[:0]).with_held_out(0.1, 0)


def test_the_example_of_the_docstring_runs() -> None:
    results = doctest.testmod(data)
    assert results.attempted
    assert not results.failed
