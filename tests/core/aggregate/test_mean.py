from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.aggregate import Contribution, weighted_mean
from fedplat.model import BLOCK, VectorBlocks, blocks

RULE = weighted_mean()


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 5])
def test_blocks_cover_every_element_once(size: int):
    covered = [index for block in blocks(size) for index in (block.start, block.stop)]
    assert covered[::2] == [0, *covered[1:-1:2]][: len(covered) // 2]
    assert sum(block.stop - block.start for block in blocks(size)) == size
    assert all(block.stop - block.start <= BLOCK for block in blocks(size))


@pytest.mark.parametrize("size", [0, 2, 4, BLOCK + 3])
def test_an_update_of_another_size_is_refused_and_nothing_is_added(size: int):
    partial = RULE.start(3)
    with pytest.raises(ValueError, match=f"{size} entries; expected 3"):
        RULE.fold(partial, VectorBlocks(np.ones(size, np.float32)), Contribution(1.0))
    assert partial.total.tolist() == [0, 0, 0]


@pytest.mark.parametrize("vector", [np.zeros((3, 1), np.float32), np.zeros(3, np.float64), np.zeros(3, np.int32)])
def test_only_float32_vectors_are_read_in_blocks(vector: Any):
    with pytest.raises(ValueError, match="expected float32 of one dimension"):
        VectorBlocks(vector)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 1e31])
def test_an_impossible_weight_is_refused_and_nothing_is_added(weight: float):
    partial = RULE.start(2)
    with pytest.raises(ValueError, match="the weight is"):
        RULE.fold(partial, VectorBlocks(np.ones(2, np.float32)), Contribution(weight))
    assert partial.total.tolist() == [0, 0]


def test_partials_of_other_lengths_are_not_merged():
    with pytest.raises(ValueError, match="2 entries; expected 3"):
        RULE.merge(RULE.start(3), RULE.start(2))


def test_a_non_contiguous_update_is_folded():
    update = np.arange(10, dtype=np.float32)[::2]
    step, _ = RULE.apply({}, RULE.fold(RULE.start(5), VectorBlocks(update), Contribution(2.0)))
    assert step.tolist() == [0, 2, 4, 6, 8]


def test_folding_makes_no_temporary_of_the_models_size():
    update = np.ones(1 << 22, np.float32)
    partial = RULE.start(update.size)
    tracemalloc.start()
    try:
        partial = RULE.fold(partial, VectorBlocks(update), Contribution(0.3))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < update.nbytes / 3


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.integers(1, 10**6)), min_size=1, max_size=20))
def test_the_mean_of_a_list_of_numbers(updates: list[tuple[float, int]]):
    partial = RULE.start(1)
    for value, weight in updates:
        partial = RULE.fold(partial, VectorBlocks(np.array([value], np.float32)), Contribution(weight))
    step, _ = RULE.apply({}, partial)
    values, weights = zip(*updates, strict=True)
    tolerance = 1e-5 * max(abs(value) for value in values) + 1e-30
    assert step[0] == pytest.approx(np.average(values, weights=weights), abs=tolerance)
