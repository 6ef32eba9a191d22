"""The group of ranks: small messages, parts of it, and what happens when one is killed."""

from __future__ import annotations

import socket

import pytest

from fedplat.pytorch.distributed import join_group
from support import ports
from support.ranks.group import RankError, RankGroup, Zygote

HERE = "support.ranks.on_ranks"


def test_what_ranks_say_to_each_other(pair: RankGroup) -> None:
    replies = pair.call(f"{HERE}:talk")
    assert replies == [
        {"gathered": [0, 1], "same": True, "told": "from 0", "nothing": "", "is_first": rank == 0} for rank in range(2)
    ]


@pytest.fixture(scope="module")
def three(zygote: Zygote) -> object:
    with zygote.group(3) as group:
        yield group


def test_parts_of_the_group(three: RankGroup) -> None:
    mistakes = [
        "a subgroup cannot be divided again; expected all ranks",
        "a subgroup of 0 ranks: expected 1 or more",
    ]
    assert three.call(f"{HERE}:in_parts") == [
        ["0/1", "0/2 1/2", "0/2 1/2", "0/3 1/3 2/3", "0/3 1/3 2/3", *mistakes],
        [None, "0/2 1/2", "0/2 1/2", "0/3 1/3 2/3", "0/3 1/3 2/3", *mistakes],
        [None, None, None, "0/3 1/3 2/3", "0/3 1/3 2/3", None, mistakes[1]],
    ]


@pytest.mark.parametrize("transport", ["shared_memory", "p2p"])
def test_a_part_of_the_group_adds_up(three: RankGroup, transport: str) -> None:
    assert three.call(f"{HERE}:add_up_in_subgroup", transport=transport) == [[6.0] * 4, [6.0] * 4, None]


@pytest.mark.parametrize(("last", "replies"), [("a", ["a rank"] * 3), ("b", [2, 2, 0])])
def test_a_stranger_in_the_place_of_a_rank_is_found_out(three: RankGroup, last: str, replies: list[object]) -> None:
    """Gloo takes what connects first for a rank; one that does not have the key cannot prove it."""
    told = three.call(f"{HERE}:prove", keys=["a", "a", last])
    strangers = [f"the process connected as rank {reply} does not have the ranks' key" for reply in replies]
    assert told == (replies if last == "a" else strangers)


@pytest.mark.fault("F35")
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_ends_the_calls_of_the_others(zygote: Zygote, victim: int) -> None:
    with zygote.group(3) as group:
        group.begin(f"{HERE}:gather_or_die", victim=victim)
        for rank in {0, 1, 2} - {victim}:
            with pytest.raises(RankError, match="RuntimeError"):
                group.result(rank)


def test_a_group_gets_another_port_if_its_own_is_taken(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        numbers = iter([other.getsockname()[1], ports.free_port()])
        monkeypatch.setattr(ports, "free_port", lambda: next(numbers))
        with zygote.group(2) as group:
            assert len(group.call(f"{HERE}:talk")) == 2


@pytest.mark.fault("F35")
def test_a_process_without_others_is_a_group_of_one() -> None:
    with join_group("gloo") as ranks:
        assert (ranks.rank, ranks.size, ranks.device.type) == (0, 1, "cpu")
        assert ranks.all_gather(b"alone") == [b"alone"]
        assert ranks.broadcast(b"alone") == b"alone"
        assert ranks.subgroup(1) is ranks
        ranks.barrier()


def test_nccl_wants_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "99", "LOCAL_WORLD_SIZE": "99"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r'"nccl": expected a GPU for each of 99 ranks, found \d+'), join_group("nccl"):
        pass
