"""Sums of logical ranks' vectors: the bits of NumPy's, whichever rank adds them and however they are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedplat.model import WINDOW
from fedplat.pytorch.distributed import VectorLayout
from support.ranks.group import RankError, RankGroup, Zygote
from support.ranks.on_ranks import vector_of

pytestmark = pytest.mark.slow

HERE = "support.ranks.on_ranks"
SIZE = 100_000
CLASSES = {"shared_memory": "SharedMemoryVectors", "p2p": "P2PVectors"}
CASES = {
    "one each": (2, [0, 50_000, SIZE]),
    "three on two": (3, [0, 30_001, SIZE]),
    "five on two": (5, [0, 65_536, SIZE]),
    "one on two": (1, [0, 50_000, SIZE]),
    "a rank without columns": (3, [0, SIZE, SIZE]),
    "empty": (2, [0, 0, 0]),
}


def expected(logical: int, size: int) -> npt.NDArray[np.float32]:
    total = vector_of(0, size)
    for number in range(1, logical):
        total = total + vector_of(number, size)
    return total


def read(path: Path) -> npt.NDArray[np.float32]:
    return np.frombuffer(path.read_bytes(), np.float32)


@pytest.mark.fault("F35")
@pytest.mark.parametrize("transport", ["shared_memory", "p2p"])
@pytest.mark.parametrize("case", CASES)
def test_sums_have_the_bits_of_the_order_of_logical_ranks(
    pair: RankGroup, transport: str, case: str, tmp_path: Path
) -> None:
    logical, bounds = CASES[case]
    replies = pair.call(f"{HERE}:add_up", transport=transport, logical=logical, bounds=bounds, folder=str(tmp_path))
    total = expected(logical, bounds[-1])
    for rank, reply in enumerate(replies):
        own = list(range(rank, logical, 2))
        assert reply == {"class": CLASSES[transport], "zeros": True, "own": own}
        for name in ("first", "second"):
            columns = read(tmp_path / f"columns-{name}-{rank}")
            np.testing.assert_array_equal(columns, total[bounds[rank] : bounds[rank + 1]])
            np.testing.assert_array_equal(read(tmp_path / f"whole-{name}-{rank}"), total * 2)


@pytest.mark.fault("F35")
@pytest.mark.parametrize("transport", ["auto", "p2p"])
def test_the_bits_do_not_depend_on_the_number_of_processes(zygote: Zygote, transport: str, tmp_path: Path) -> None:
    for count, bounds in ((1, [0, SIZE]), (3, [0, 20_000, 90_000, SIZE])):
        with zygote.group(count) as group:
            group.call(f"{HERE}:add_up", transport=transport, logical=4, bounds=bounds, folder=str(tmp_path))
        np.testing.assert_array_equal(read(tmp_path / f"whole-second-{count - 1}"), expected(4, SIZE) * 2)


def test_the_order_matters_to_the_numbers_of_these_tests() -> None:
    in_turn = vector_of(2, SIZE) + vector_of(0, SIZE) + vector_of(1, SIZE)
    assert (in_turn != expected(3, SIZE)).any()


def test_nothing_is_left_of_shared_memory(pair: RankGroup) -> None:
    # Each rank has its own file and the other's, as long as the vectors exist.
    assert pair.call(f"{HERE}:memory_files") == [[2, 2, 0, 0], [2, 2, 0, 0]]


def test_all_ranks_send_when_one_has_no_memory_to_share(pair: RankGroup) -> None:
    call = f"{HERE}:make_vectors_without_files"
    assert pair.call(call, transport="auto") == ["P2PVectors", "P2PVectors"]
    pair.begin(call, transport="shared_memory")
    for rank in range(2):
        with pytest.raises(RankError, match="ValueError: the ranks cannot share memory"):
            pair.result(rank)


def test_a_layout_is_for_one_number_of_processes(pair: RankGroup) -> None:
    pair.begin(f"{HERE}:of_another_number")
    for rank in range(2):
        with pytest.raises(RankError, match="columns for 3 processes; expected them for 2"):
            pair.result(rank)


@pytest.mark.fault("F35")
@pytest.mark.parametrize("transport", ["shared_memory", "p2p"])
def test_a_rank_that_is_killed_ends_the_sums_of_the_others(zygote: Zygote, transport: str) -> None:
    with zygote.group(2) as group:
        group.begin(f"{HERE}:die_or_wait", victim=1, transport=transport)
        with pytest.raises(RankError, match="RuntimeError"):
            group.result(0)


@pytest.mark.parametrize(
    ("layout", "bounds"),
    [
        (VectorLayout.even(2, 2, 10), (0, 0, 10)),
        (VectorLayout.even(2, 2, 3 * WINDOW + 1), (0, 2 * WINDOW, 3 * WINDOW + 1)),
        (VectorLayout.even(7, 3, 9, multiple=1), (0, 3, 6, 9)),
        (VectorLayout.even(1, 1, 0), (0, 0)),
    ],
)
def test_even_columns_are_multiples(layout: VectorLayout, bounds: tuple[int, ...]) -> None:
    assert layout.bounds == bounds


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, (0, 1)), "0 logical ranks: expected 1 or more"),
        ((1, (0,)), "expected 0 and one more for each process"),
        ((1, (1, 2)), "expected 0 and one more for each process"),
        ((1, (0, 2, 1)), "expected 0 and one more for each process"),
    ],
)
def test_mistakes_in_a_layout(arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        VectorLayout(*arguments)
