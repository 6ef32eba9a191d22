"""Tasks on the server's own data: what one rank cannot read or write, all ranks refuse, and none of them waits."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from support.daemons import initial_model
from support.ranks.group import RankGroup, Zygote
from support.server_trainers import trainers

LAYOUTS = ("", "shard=2")


@pytest.fixture(scope="module")
def two() -> Generator[RankGroup]:
    """Two ranks."""
    zygote = Zygote()
    with zygote.group(2) as group:
        yield group
    zygote.close()


def ask(two: RankGroup, folder: Path, layout: str, files: tuple[str, str], result: str = "result") -> list[str]:
    """The errors of a training and of an evaluation, which are the same on both ranks."""
    (folder / "model").write_bytes(initial_model().to_bytes())
    reference = trainers(folder)["public"]
    options = {"folder": str(folder), "reference": reference, "layout": layout, "files": files, "result": result}
    two.begin("support.training_tasks:ask", **options)
    of_second = two.result(1)  # if its error were its own, rank 0 would wait
    assert two.result(0) == of_second
    return of_second


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_all_ranks_read_is_trained_and_scored(two: RankGroup, layout: str, tmp_path: Path) -> None:
    assert ask(two, tmp_path, layout, ("model", "model")) == ["", ""]
    assert (tmp_path / "result").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_model_that_one_rank_cannot_read_is_refused_by_all(
    two: RankGroup, layout: str, victim: int, tmp_path: Path
) -> None:
    files = ("elsewhere", "model") if victim == 0 else ("model", "elsewhere")
    for error in ask(two, tmp_path, layout, files):
        assert error.startswith(f"the model's file cannot be used on rank {victim}: FileNotFoundError: ")


def test_a_result_that_rank_0_cannot_write_is_refused_by_all(two: RankGroup, tmp_path: Path) -> None:
    training, evaluation = ask(two, tmp_path, "shard=2", ("model", "model"), "no such folder/result")
    assert training.startswith("the result's file cannot be used on rank 0: FileNotFoundError: ")
    assert evaluation == ""
