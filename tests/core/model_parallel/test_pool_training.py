"""Training for a server in a layout: on its ranks, on fewer, after deaths, and from another layout's checkpoints."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.parallel import Parallel
from support.ranks.backends import backends, bound
from support.ranks.group import RankError, Zygote

HERE = "support.model_parallel.pool"
Run = dict[str, Any]
SGD: dict[str, Any] = {"options": {"epochs": 6, "checkpoint_every": 4, "momentum": 0.9, "max_grad_norm": 0.5}}
ADAM: dict[str, Any] = {"options": {"epochs": 6, "checkpoint_every": 4}, "with_adam": True, "dropout": True}
TWO: tuple[str, ...] = ("shard=2", "data=2", "pipeline=2", "tensor=2")
MODES: dict[str, bool] = {
    **dict.fromkeys(("data=2", "shard=2", "shard=2,reshard=false", "shard=2,offload=cpu"), True),
    **dict.fromkeys(("shard=2,recompute=blocks", "pipeline=2,schedule=gpipe", "pipeline=2"), True),
    **dict.fromkeys(("pipeline=2,schedule=pipedream", "pipeline=2,shard=2"), True),
    **dict.fromkeys(("pipeline=2,schedule=interleaved-1f1b", "pipeline=2,schedule=zero-bubble"), False),
    **dict.fromkeys(("tensor=2", "tensor=2,sequence=true", "shard=2,tensor=2"), False),
}
"""Layouts, and whether fewer processes than ranks give the same bits; others add up in another order."""
SAME_FILES = (
    "shard=2,reshard=false",
    "shard=2,recompute=blocks",
    "pipeline=2,schedule=gpipe",
    "tensor=2,sequence=true",
)
"""Layouts whose ranks keep what those of another one keep: only the way to compute a step differs."""
EXACT = {("shard=2", "data=2"), ("data=2", "shard=2"), *zip(TWO, TWO, strict=True)}
"""Pairs of layouts whose trainings have the same bits, also with dropout."""
HYBRIDS: tuple[str, ...] = ("shard=2,tensor=2", "pipeline=2,shard=2", "pipeline=2,tensor=2")


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
    runs = [{"layout": each, **SGD} for each in TWO]
    return dict(zip(TWO, train_each(zygote, 1, runs, backend), strict=True))


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


@pytest.fixture(scope="module")
def whole(zygote: Zygote) -> Callable[[str], Run]:
    """The same training, uninterrupted, by all ranks of a layout."""

    @functools.cache
    def train(layout: str) -> Run:
        return train_each(zygote, count_ranks(layout), [run_of(layout)])[0]

    return train


def count_ranks(layout: str) -> int:
    return Parallel.from_text(layout).num_ranks


def run_of(layout: str, folder: Path | None = None) -> Run:
    options = SGD["options"]
    if "pipedream" in layout:  # which has no norm of all gradients
        options = options | {"max_grad_norm": 0.0}
    return {"layout": layout, "options": options, "folder": "" if folder is None else str(folder)}


# With NCCL only torchrun, which these lack, ends the others.
@pytest.mark.slow
@pytest.mark.fault("F35")
@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=pytest.mark.grid) if one in SAME_FILES else one for one in MODES]
)
def test_a_killed_rank_changes_no_bit(zygote: Zygote, whole: Callable[[str], Run], layout: str, tmp_path: Path) -> None:
    """All ranks resume as a new group, or those that are left do."""
    count = count_ranks(layout)
    with zygote.group(count) as group:
        group.begin(f"{HERE}:train", kill=count - 1, stop_at=6, **run_of(layout, tmp_path / "all"))
        for rank in range(count):
            with pytest.raises(RankError, match="gone"):
                group.result(rank)
    shutil.copytree(tmp_path / "all", tmp_path / "left")
    (again,) = train_each(zygote, count, [run_of(layout, tmp_path / "all")])
    (left,) = train_each(zygote, count - 1, [run_of(layout, tmp_path / "left")])
    assert again["done"][0] == left["done"][0] == 5, "they resumed after step 4"
    assert_close(again, whole(layout), bits=True)
    assert_close(left, whole(layout), bits=MODES[layout])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SGD, ADAM], ids=["sgd", "adam"])
def test_a_checkpoint_resumes_in_another_layout(zygote: Zygote, backend: str, kind: Run, tmp_path: Path) -> None:
    pairs = [(before, after) for before in TWO for after in TWO if kind is SGD or (before, after) in EXACT]

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
        assert_close(found, uninterrupted[after], bits=(before, after) in EXACT, backend=backend)
    alone = [{"layout": each, "folder": copy(each, "alone"), **kind} for each in TWO]
    for layout, found in zip(TWO, train_each(zygote, 1, alone, backend), strict=True):
        assert_close(found, uninterrupted[layout], bits="tensor" not in layout, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("distance", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_a_checkpoint_of_a_hybrid_layout_resumes_in_another_one(
    zygote: Zygote, whole: Callable[[str], Run], distance: int, tmp_path: Path
) -> None:
    pairs = list(zip(HYBRIDS, HYBRIDS[distance:] + HYBRIDS[:distance], strict=True))
    with zygote.group(4) as group:
        stopped = [{**run_of(each, tmp_path / each), "stop_at": 6} for each in HYBRIDS]
        group.call(f"{HERE}:train_all", runs=stopped)
        for before, after in pairs:
            shutil.copytree(tmp_path / before, tmp_path / f"{before} to {after}")
        runs = [run_of(after, tmp_path / f"{before} to {after}") for before, after in pairs]
        resumed = group.call(f"{HERE}:train_all", runs=runs)[0]
    for (_, after), found in zip(pairs, resumed, strict=True):
        assert found["done"][0] == 5
        assert_close(found, whole(after), bits=False)
