"""A warning about a tied weight that an initial model has twice."""

from __future__ import annotations

import numpy as np
import pytest

from fedplat.job import JobSpec, parse_job
from fedplat.job.spec import describe_copies, warnings
from fedplat.model import Parameters
from support.jobs import SMALL

WORDS = np.arange(96, dtype=np.float32).reshape(32, 3)
TOP_K = '[compression]\nuplink = { codec = "topk", fraction = 0.1 }\n'


def job(more: str) -> JobSpec:
    return parse_job(SMALL + more)


def model(**tensors: np.ndarray) -> Parameters:
    return Parameters.from_arrays({name.replace("__", "."): values for name, values in tensors.items()})


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ("", ""),
        ('[compression]\nuplink = { codec = "bf16" }\n', ""),
        (TOP_K, "the codec"),
        ('[compression]\ndownlink = { codec = "quantize", bits = 4 }\n', "the codec"),
    ],
)
def test_a_tied_weight_with_both_names_is_warned_of(more: str, cause: str) -> None:
    found = describe_copies(job(more), model(lm_head__weight=WORDS, wte__weight=WORDS.copy(), b=WORDS[0]))
    assert bool(found) == bool(cause)
    if cause:
        assert found[0].startswith(
            "model.initial: 'lm_head.weight' and 'wte.weight' have the same values; if they are one tied weight, "
            f"{cause} of [compression] makes them differ, and clients then refuse the model: leave 'wte.weight' out"
        )
        assert found[0] in warnings(job(more), model(lm_head__weight=WORDS, wte__weight=WORDS))


@pytest.mark.parametrize(
    ("one", "other", "values", "warns"),
    [
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", WORDS, True),
        ("layers.0.linear1.weight", "layers.1.linear1.weight", WORDS, False),
        ("0.weight", "2.weight", WORDS, False),
        ("online.net.weight", "target.net.weight", WORDS, False),
        ("a.lora_b", "c.lora_b", np.zeros_like(WORDS), False),
        ("wte.weight", "lm_head.weight", np.ones_like(WORDS), False),
        ("wte.weight", "lm_head.weight", WORDS[:9], False),
        ("wte.weight", "lm_head.weight", WORDS.ravel(), False),
    ],
)
def test_equal_layers_and_constants_are_no_tied_weights(one: str, other: str, values: np.ndarray, warns: bool) -> None:
    parameters = Parameters.from_arrays({one: values, other: values.copy()})
    assert bool(describe_copies(job(TOP_K), parameters)) == warns


def test_one_entry_that_differs_is_enough() -> None:
    other = WORDS.copy()
    other[-1, -1] += 1
    assert not describe_copies(job(TOP_K), model(lm_head__weight=WORDS, wte__weight=other))
