"""The model of examples/large: its parts against NumPy, its split into stages, and two tensor ranks."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch")
import msgspec
import torch

import llama
import plays
from fedplat.errors import DataError
from fedplat.pytorch.parallel.plan import find_plan, split_stages
from support.model_parallel import llama_example
from support.ranks.group import Zygote

CONFIG = llama_example.CONFIG
Array = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def zygote() -> Generator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def model() -> llama.LlamaModel:
    return llama_example.make_model()


def tokens() -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, (3, 9), generator=torch.Generator().manual_seed(2))


def rotated(values: Array) -> Array:
    """Each pair (i, i + size / 2) of entries as a complex number, times exp(i * position * frequency)."""
    half = values.shape[-1] // 2
    angles = np.outer(np.arange(len(values)), CONFIG.rope_theta ** (-np.arange(half) / half))
    turned = (values[:, :half] + 1j * values[:, half:]) * np.exp(1j * angles)
    return np.concatenate((turned.real, turned.imag), axis=1)


def attended(layer: llama.GroupedQueryAttention, values: Array) -> Array:
    """Attention of one sequence, head by head, in float64."""
    weights = {name: each.detach().double().numpy() for name, each in layer.named_parameters()}
    size, shares = CONFIG.head_size, CONFIG.num_attention_heads // CONFIG.num_key_value_heads
    heads: list[Array] = []
    for head in range(CONFIG.num_attention_heads):
        own, kept = slice(head * size, (head + 1) * size), slice(head // shares * size, (head // shares + 1) * size)
        query = rotated(values @ weights["q_proj.weight"][own].T)
        key = rotated(values @ weights["k_proj.weight"][kept].T)
        scores = np.where(np.tri(len(values), dtype=bool), query @ key.T / np.sqrt(size), -np.inf)
        shares_of_values = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares_of_values /= shares_of_values.sum(axis=1, keepdims=True)
        heads.append(shares_of_values @ (values @ weights["v_proj.weight"][kept].T))
    return np.concatenate(heads, axis=1) @ weights["o_proj.weight"].T


def test_the_number_of_parameters_is_that_of_the_formula(model: llama.LlamaModel) -> None:
    assert sum(each.numel() for each in model.parameters()) == CONFIG.num_parameters
    assert sum(each.numel() for each in model.state_dict().values()) == CONFIG.num_parameters


def test_scores_have_a_row_for_each_token(model: llama.LlamaModel) -> None:
    assert model(tokens()).shape == (3, CONFIG.vocab_size, 9)


def test_scores_depend_on_no_later_position(model: llama.LlamaModel) -> None:
    values = tokens()
    changed = values.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % CONFIG.vocab_size
    before, after = model(values).detach(), model(changed).detach()
    torch.testing.assert_close(after[..., :5], before[..., :5], rtol=0.0, atol=1e-6)
    assert (after[..., 5:] - before[..., 5:]).abs().amin(dim=(0, 1)).max() > 0.0


def test_rotary_positions_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).normal(size=(7, CONFIG.head_size))
    found = llama.RotaryEmbedding(CONFIG.head_size, CONFIG.rope_theta)(torch.from_numpy(values))
    np.testing.assert_allclose(found.numpy(), rotated(values), atol=1e-6)


def test_products_of_rotated_vectors_depend_on_distances_only() -> None:
    one, other = np.random.default_rng(1).normal(size=(2, CONFIG.head_size))
    rotary = llama.RotaryEmbedding(CONFIG.head_size, CONFIG.rope_theta)
    turned = [rotary(torch.from_numpy(np.tile(each, (9, 1)))).numpy() for each in (one, other)]
    products = turned[0] @ turned[1].T
    np.testing.assert_allclose(products[3:, 3:], products[:-3, :-3], atol=1e-5)


def test_attention_is_that_of_numpy(model: llama.LlamaModel) -> None:
    layer = model.layers[0].get_submodule("self_attn")
    assert isinstance(layer, llama.GroupedQueryAttention)
    values = np.random.default_rng(3).normal(size=(6, CONFIG.hidden_size))
    found = layer(torch.from_numpy(values).float().unsqueeze(0)).detach()
    np.testing.assert_allclose(found[0].numpy(), attended(layer, values), rtol=1e-4, atol=1e-6)


def test_its_parts_are_those_of_the_plan(model: llama.LlamaModel) -> None:
    assert find_plan(model, llama.PLAN) is llama.PLAN


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_one_after_the_other_are_the_whole_bit_for_bit(model: llama.LlamaModel, num_stages: int) -> None:
    stages = split_stages(model, llama.PLAN, num_stages, list(range(num_stages)))
    values = tokens()
    for stage in stages:
        values = stage(values)
    assert torch.equal(values, model(tokens()))
    assert sum(each.numel() for stage in stages for each in stage.parameters()) == CONFIG.num_parameters


@pytest.mark.slow
def test_two_tensor_ranks_learn_what_one_process_learns(zygote: Zygote) -> None:
    with zygote.group(2) as group:
        found = group.call("support.model_parallel.llama_example:train", layout="tensor=2")
    expected = llama_example.train_alone()
    np.testing.assert_allclose(found[0]["losses"], expected, rtol=1e-5)
    whole, norms = CONFIG.num_parameters, (2 * CONFIG.num_hidden_layers + 1) * CONFIG.hidden_size
    undivided = norms + 2 * CONFIG.vocab_size * CONFIG.hidden_size
    assert [each["elements"] for each in found] == [undivided + (whole - undivided) // 2] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads = 4: expected a multiple of num_key_value_heads = 3"),
        ({"hidden_size": 36}, "hidden_size = 36: expected a multiple of 2 x 4 heads"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling"),
    ],
)
def test_configurations_that_the_model_does_not_compute_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(msgspec.to_builtins(CONFIG) | change))
    with pytest.raises(ValueError, match=message):
        llama.read_config(tmp_path / "config.json")


def test_the_parts_of_the_plays_do_not_overlap(tmp_path: Path) -> None:
    path = tmp_path / "plays.txt"
    path.write_text(plays.EXCERPT.read_text())
    parts = {name: plays.load_part(name, path, 20_000, 50) for name in plays.PARTS}
    # The last character of a part is no input, and its last incomplete row is left out.
    assert {name: len(part) for name, part in parts.items()} == {
        name: (round(20_000 * share) - 1) // 50 for name, share in plays.PARTS.items()
    }
    inputs, targets = parts["sharded"].tensors
    assert torch.equal(inputs[1:, 0], targets[:-1, -1])
    with pytest.raises(DataError, match="use fewer characters"):
        plays.load_part("server", path, 90_000, 50)
