"""Updates of rules that look at where the clients ended, not at how far they went: FedAsync."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from fedplat.aggregate import RULES, Accumulator, Contribution, FedAsync, rebase
from fedplat.model import BLOCK, WINDOW, Parameters
from support.rules import make_rule


def model(seed: int, size: int = BLOCK + 3) -> Parameters:
    rng = np.random.default_rng(seed)
    arrays: dict[str, npt.NDArray[Any]] = {
        "w": rng.normal(size=size).astype(np.float32),
        "steps": np.array(10 * seed),
        "b": rng.normal(size=5).astype(ml_dtypes.bfloat16),
    }
    return Parameters.from_arrays(arrays, "max")


def wide(parameters: Parameters) -> npt.NDArray[np.float64]:
    return parameters.to_vector().astype(np.float64)


def test_a_rebased_update_leads_to_the_clients_model():
    origin, base, update = model(1), model(2), model(3)
    moved = rebase(update, origin, base)
    blocks = [block.copy() for block in moved.to_blocks()]
    assert [block.size for block in blocks[:-1]] == [BLOCK] * (len(blocks) - 1)
    np.testing.assert_allclose(np.concatenate(blocks), wide(update) + wide(origin) - wide(base), atol=1e-6)
    assert np.concatenate(blocks).tobytes() == b"".join(block.tobytes() for block in moved.to_blocks())
    accumulator = Accumulator(base.schema, make_rule("fedavg"))
    accumulator.fold(moved, Contribution(1.0))
    result, _ = accumulator.finish(base, {})
    np.testing.assert_allclose(result["w"], origin["w"] + update["w"], atol=1e-6)
    assert result["steps"] == 30  # the update's


def test_the_rules_that_want_it():
    assert {name for name in RULES if make_rule(name).from_latest} == {"fedasync"}


def test_fedasync_is_algorithm_1():
    """One report a version; the client began `staleness` versions ago."""
    alpha, size = 0.6, 30
    rng, rule = np.random.default_rng(0), FedAsync(mixing=alpha).build()
    versions = [Parameters.from_arrays({"w": rng.normal(size=size).astype(np.float32)})]
    expected = [wide(versions[0])]
    for number in range(12):
        staleness = min(number, number % 4)
        origin, latest = versions[-1 - staleness], versions[-1]
        update = Parameters.from_arrays({"w": rng.normal(size=size).astype(np.float32)})
        s = (1 + staleness) ** -0.5
        accumulator = Accumulator(latest.schema, rule)
        accumulator.fold(rebase(update, origin, latest), Contribution(s, staleness=staleness))
        versions.append(accumulator.finish(latest, {})[0])
        client = expected[-1 - staleness] + wide(update)
        expected.append((1 - alpha * s) * expected[-1] + alpha * s * client)
    np.testing.assert_allclose(wide(versions[-1]), expected[-1], atol=1e-5)


@pytest.mark.parametrize("size", [4 * WINDOW])
def test_rebasing_needs_a_block_of_memory(size: int):
    one = Parameters.from_arrays({"w": np.ones(size, np.float32)})
    tracemalloc.start()
    try:
        for _ in rebase(one, one, one).to_blocks():
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * 4 * BLOCK
