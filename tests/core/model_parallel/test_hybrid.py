"""Products of layouts against one process."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from support.model_parallel import piped
from support.model_parallel.piped import Case, Measured
from support.ranks.backends import backends
from support.ranks.group import Zygote

EQUAL = {
    "shard": Case(layout="pipeline=2,shard=2,micro_batches=4", max_norm=0.3),
    "data": Case(layout="pipeline=2,data=2,schedule=gpipe,micro_batches=2", batch_size=25),  # the last part is empty
    "accumulate": Case(layout="pipeline=2,shard=2,micro_batches=2", batch_size=5, accumulate=3),
    "interleaved": Case(
        layout="pipeline=2,shard=2,schedule=interleaved-1f1b,micro_batches=4", batch_size=10, accumulate=2
    ),
    "zero-bubble": Case(layout="pipeline=2,shard=2,schedule=zero-bubble,micro_batches=4"),
    "dropout": Case(layout="pipeline=2,shard=2,micro_batches=4,recompute=blocks", model="dropout"),
    "sequential": Case(layout="pipeline=2,shard=2,micro_batches=4", model="sequential"),
    "offload": Case(layout="pipeline=2,shard=2,micro_batches=4,offload=cpu"),
}
CLOSE = {
    "tensor": Case(layout="pipeline=2,tensor=2,micro_batches=4", epochs=1, max_norm=0.3),
    "tensor, accumulate": Case(layout="pipeline=2,tensor=2,micro_batches=2", epochs=1, batch_size=6, accumulate=2),
    "tensor, interleaved": Case(layout="pipeline=2,tensor=2,schedule=interleaved-1f1b,micro_batches=4", epochs=1),
    "sequence": Case(layout="pipeline=2,tensor=2,sequence=true,micro_batches=4", epochs=1, max_norm=0.3),
}
OF_EIGHT = {
    "all": Case(layout="pipeline=2,shard=2,tensor=2,micro_batches=4", epochs=1, max_norm=0.3),
    "all, accumulate": Case(layout="pipeline=2,data=2,tensor=2,micro_batches=2", epochs=1, batch_size=6, accumulate=2),
}


@pytest.fixture(scope="module", params=backends(4))
def equal(request: pytest.FixtureRequest, zygote: Zygote) -> Generator[Measured[str]]:
    """What four ranks have found in two parts."""
    with piped.measure(zygote, 4, request.param, EQUAL) as found:
        yield found


@pytest.fixture(scope="module", params=backends(4))
def close(request: pytest.FixtureRequest, zygote: Zygote) -> Generator[Measured[str]]:
    """What four ranks have found, two of which divide operations."""
    with piped.measure(zygote, 4, request.param, CLOSE) as found:
        yield found


@pytest.fixture(scope="module", params=backends(8))
def of_eight(request: pytest.FixtureRequest, zygote: Zygote) -> Generator[Measured[str]]:
    """What eight ranks have found."""
    with piped.measure(zygote, 8, request.param, OF_EIGHT) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL)
def test_two_parts_have_the_bits_of_ranks_in_turn(equal: Measured[str], name: str) -> None:
    equal.compare_with_turns(name, EQUAL[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EQUAL if name != "dropout"])
def test_sharded_pipelines_compute_the_same_as_one_process(equal: Measured[str], name: str) -> None:
    compare(equal, name, EQUAL[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CLOSE)
def test_tensor_pipelines_compute_the_same_as_one_process(close: Measured[str], name: str) -> None:
    compare(close, name, CLOSE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", pytest.param("all, accumulate", marks=pytest.mark.grid)])
def test_products_of_three_compute_the_same_as_one_process(of_eight: Measured[str], name: str) -> None:
    compare(of_eight, name, OF_EIGHT[name])


def compare(ranks: Measured[str], name: str, case: Case) -> None:
    """Compare what all ranks have found with one process without a layout."""
    ranks.compare(name, piped.by_hand(case), rel=1e-5, rel_of_norms=1e-5)
