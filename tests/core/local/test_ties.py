"""A tied weight: one entry of the model, whatever the module calls it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedplat.client_state import ClientState
from fedplat.errors import ModelError
from fedplat.model import Parameters
from fedplat.pytorch.training import Learner, LocalOptions, LocalTraining, TensorExamples, Trainee, evaluate, train


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 3)
        self.output = nn.Linear(3, 6, bias=False)
        self.output.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.words(tokens))


LEARNER = Learner(model=Tied)
TOKENS = torch.arange(12) % 6


def trained(model: Parameters) -> Parameters:
    options = LocalOptions.from_config({"epochs": 2, "batch_size": 4, "learning_rate": 0.5, "momentum": 0.9})
    work = LocalTraining(examples=TensorExamples(TOKENS, TOKENS), options=options, seed=3, client_state=ClientState())
    result = model.copy()
    train(Trainee(LEARNER), result, work)
    return result


def test_the_model_has_it_once_and_trains_to_the_same_bits() -> None:
    once = LEARNER.initial(seed=1)
    assert set(once) == {"words.weight"}
    twice = Parameters.from_arrays(dict.fromkeys(("words.weight", "output.weight"), once["words.weight"]))
    other = Parameters.from_arrays({"output.weight": once["words.weight"]})
    expected = trained(once)["words.weight"]
    assert not np.array_equal(expected, once["words.weight"])
    for result in (trained(twice), trained(other)):  # models of earlier versions, and of other tools
        for name in result:
            np.testing.assert_array_equal(result[name], expected)


def test_copies_that_differ_are_refused() -> None:
    values = LEARNER.initial(seed=1)["words.weight"]
    drifted = Parameters.from_arrays({"words.weight": values, "output.weight": values + np.float32(0.1)})
    with pytest.raises(ModelError, match=r"'words.weight' and 'output.weight' of the model differ"):
        evaluate(Trainee(LEARNER), drifted, TensorExamples(TOKENS, TOKENS))
