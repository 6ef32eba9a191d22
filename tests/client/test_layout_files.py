"""The model of a task as a file on each host of a client's ranks."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from support.ranks.group import RankGroup, Zygote

PRIVATE = ["0o700", "0o600"]


@pytest.fixture(scope="module")
def three() -> Generator[RankGroup]:
    zygote = Zygote()
    with zygote.group(3) as group:
        yield group
    zygote.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "seen", "modes"),
    [
        ([0, 0, 0], [10.0, 10.0, 10.0], [PRIVATE, [], []]),
        ([0, 1, 1], [10.0, 5.0, 5.0], [PRIVATE, PRIVATE, []]),
    ],
    ids=["one host", "two hosts"],
)
def test_ranks_map_one_private_file_on_each_host_that_is_removed(
    three: RankGroup, tmp_path: Path, hosts: list[int], seen: list[float], modes: list[list[str]]
) -> None:
    """A rank of rank 0's host sees what rank 0 writes: the file is mapped, not copied."""
    replies = three.call("support.model_files:share", folder=str(tmp_path), hosts=hosts)
    assert [reply["same"] for reply in replies] == [True] * 3
    assert [reply["left"] for reply in replies] == [[]] * 3
    assert [reply["seen"] for reply in replies] == seen
    assert [reply["modes"] for reply in replies] == modes
    assert replies[0]["update"]
    assert not list(tmp_path.iterdir())
