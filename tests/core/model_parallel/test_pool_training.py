"""Training for a server in a layout: on its ranks, on fewer, after deaths, and from another layout's checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.ranks.backends import backends, bound
from support.ranks.group import RankError, Zygote

HERE = "support.model_parallel.pool"
SGD: dict[str, Any] = {"options": {"epochs": 6, "checkpoint_every": 4, "momentum": 0.9, "max_grad_norm": 0.5}}
ADAM: dict[str, Any] = {"options": {"epochs": 6, "checkpoint_every": 4}, "with_adam": True, "dropout": True}
TWO: tuple[str, ...] = ("shard=2", "data=2", "pipeline=2", "tensor=2")
Run = dict[str, Any]


def train_each(zygote: Zygote, count: int, runs: list[Run], backend: str = "gloo") -> list[Run]:
    """What rank 0 of a group found."""
    with zygote.group(count, BACKEND=backend) as group:
        return group.call(f"{HERE}:train_all", runs=runs)[0]


def assert_close(found: Run, expected: Run, *, bits: bool, backend: str = "gloo") -> None:
    begin = found["done"][0] - 1
    if bits and backend == "gloo":
        assert found["losses"] == expected["losses"]
        assert found["digest"] == expected["digest"]
    np.testing.assert_allclose(found["losses"][begin:], expected["losses"][begin:], rtol=bound(backend, 1e-5))
    np.testing.assert_allclose(found["values"], expected["values"], rtol=1e-3, atol=bound(backend, 1e-5))


@pytest.fixture(scope="module", params=backends(2))
def backend(request: pytest.FixtureRequest) -> str:
    """The library of the ranks."""
    return request.param


@pytest.fixture(scope="module")
def in_turn(zygote: Zygote, backend: str) -> dict[str, Run]:
    """The same trainings, uninterrupted, by one process that computes everything in turn."""
    layouts = [*TWO, "shard=2,tensor=2", "pipeline=2,shard=2"]
    runs = [{"layout": each, **SGD} for each in layouts]
    return dict(zip(layouts, train_each(zygote, 1, runs, backend), strict=True))


@pytest.mark.slow
def test_fewer_processes_train_the_same(zygote: Zygote, in_turn: dict[str, Run], backend: str) -> None:
    runs = [{"layout": each, **SGD} for each in TWO]
    for layout, found in zip(TWO, train_each(zygote, 2, runs, backend), strict=True):
        assert_close(found, in_turn[layout], bits="tensor" not in layout, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("library", backends(3))
def test_an_evaluation_in_a_layout_is_that_of_one_process(zygote: Zygote, library: str) -> None:
    with zygote.group(1, BACKEND=library) as group:
        expected = group.call(f"{HERE}:evaluate_all", layouts=["shard=2"])[0][0]
    assert expected.keys() == {"loss", "accuracy", "f1"}
    with zygote.group(3, BACKEND=library) as group:
        found, _, idle = group.call(f"{HERE}:evaluate_all", layouts=TWO)
    assert idle == [{}] * len(TWO)
    for each in found:
        assert each == pytest.approx(expected, rel=bound(library, 1e-5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["gloo"], indirect=True
)  # with NCCL only torchrun, which these lack, ends the others
@pytest.mark.parametrize("layout", ["shard=2,tensor=2", "pipeline=2,shard=2"])  # two ranks: test_pool_layouts.py
def test_a_killed_rank_does_not_change_the_result(
    zygote: Zygote, in_turn: dict[str, Run], layout: str, tmp_path: Path
) -> None:
    count = 2 ** (1 + layout.count(","))
    with zygote.group(count) as group:
        group.begin(f"{HERE}:train", layout=layout, folder=str(tmp_path), kill=count - 1, stop_at=6, **SGD)
        for rank in range(count):
            with pytest.raises(RankError, match="gone"):
                group.result(rank)
    (found,) = train_each(zygote, 1, [{"layout": layout, "folder": str(tmp_path), **SGD}])
    assert found["done"][0] == 5, "it resumed after step 4"
    assert_close(found, in_turn[layout], bits="tensor" not in layout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SGD, ADAM], ids=["sgd", "adam"])
def test_a_checkpoint_resumes_in_another_layout(zygote: Zygote, backend: str, kind: Run, tmp_path: Path) -> None:
    exact = {("shard=2", "data=2"), ("data=2", "shard=2"), *zip(TWO, TWO, strict=True)}
    pairs = [(before, after) for before in TWO for after in TWO if kind is SGD or (before, after) in exact]

    def copy(before: str, after: str) -> str:
        return str(shutil.copytree(tmp_path / before, tmp_path / f"{before} to {after}"))

    with zygote.group(2, BACKEND=backend) as group:
        whole = group.call(f"{HERE}:train_all", runs=[{"layout": each, **kind} for each in TWO])[0]
        uninterrupted = dict(zip(TWO, whole, strict=True))
        stopped = [{"layout": each, "folder": str(tmp_path / each), "stop_at": 6, **kind} for each in TWO]
        group.call(f"{HERE}:train_all", runs=stopped)
        runs = [{"layout": after, "folder": copy(before, after), **kind} for before, after in pairs]
        resumed = group.call(f"{HERE}:train_all", runs=runs)[0]
    for (before, after), found in zip(pairs, resumed, strict=True):
        assert found["done"][0] == 5
        assert_close(found, uninterrupted[after], bits=(before, after) in exact, backend=backend)
    alone = [{"layout": each, "folder": copy(each, "alone"), **kind} for each in TWO]
    for layout, found in zip(TWO, train_each(zygote, 1, alone, backend), strict=True):
        assert_close(found, uninterrupted[layout], bits="tensor" not in layout, backend=backend)
