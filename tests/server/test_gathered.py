"""Calls for one key each are combined into calls for many keys."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from fedplat_server.database.transactions import BatchLoader
from fedplat_server.errors import LeadershipLostError, StoreError, StoreUnavailableError
from support.daemons import Gate


class Asked:
    """Answers with the length of a key, and knows no key that begins with an x."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.gate: Gate | None = None
        self.failing = False

    async def __call__(self, keys: Sequence[str]) -> Mapping[str, int]:
        self.calls.append(list(keys))
        if self.gate is not None:
            await self.gate()
        if self.failing:
            raise StoreUnavailableError("gone")
        return {key: len(key) for key in keys if not key.startswith("x")}


async def test_callers_that_ask_meanwhile_share_the_next_call() -> None:
    asked = Asked()
    gathered = BatchLoader(asked, max_keys=3)
    gate = asked.gate = Gate()
    first = asyncio.create_task(gathered.load("a"))
    await gate.reached.wait()
    later = [asyncio.create_task(gathered.load(key)) for key in ("bb", "bb", "xx", "ccc", "dddd")]
    await asyncio.sleep(0)
    gate.open()
    assert await first == 1
    assert await asyncio.gather(*later) == [2, 2, None, 3, 4]
    assert asked.calls == [["a"], ["bb", "xx", "ccc"], ["bb", "dddd"]]
    assert await gathered.load("e") == 1
    assert asked.calls[3:] == [["e"]]


async def test_a_caller_that_is_gone_is_left_out() -> None:
    asked = Asked()
    gathered = BatchLoader(asked)
    gate = asked.gate = Gate()
    calls = [asyncio.create_task(gathered.load("a"))]
    await gate.reached.wait()
    calls += [asyncio.create_task(gathered.load(key)) for key in ("b", "c")]
    await asyncio.sleep(0)
    for call in calls[:2]:
        call.cancel()
    gate.open()
    assert await calls[2] == 1
    assert asked.calls == [["a"], ["c"]]
    assert [call.cancelled() for call in calls] == [True, True, False]


async def test_all_callers_are_told_of_a_failure_and_the_next_call_is_made() -> None:
    asked = Asked()
    asked.failing = True
    gathered = BatchLoader(asked)
    answers = await asyncio.gather(*(gathered.load(key) for key in "abc"), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["gone"] * 3
    assert len({id(answer) for answer in answers}) == 3
    with pytest.raises(StoreUnavailableError):
        await gathered.load("d")
    asked.failing = False
    assert await gathered.load("d") == 1


class Picky:
    """Refuses every call that names the key `bad`, as a database does that cannot store it."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.error: Exception = StoreError("cannot be encoded")

    async def __call__(self, keys: Sequence[str]) -> Mapping[str, int]:
        self.calls.append(list(keys))
        if "bad" in keys:
            raise self.error
        return {key: len(key) for key in keys}


@pytest.mark.fault("F40")
async def test_a_key_that_is_refused_fails_its_own_caller_only() -> None:
    picky = Picky()
    gathered = BatchLoader(picky)
    answers = await asyncio.gather(*(gathered.load(key) for key in ("a", "bad", "ccc")), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["1", "cannot be encoded", "3"]
    assert picky.calls == [["a", "bad", "ccc"], ["a"], ["bad"], ["ccc"]]


@pytest.mark.parametrize("error", [StoreUnavailableError("away"), LeadershipLostError("gone")])
async def test_a_database_that_is_away_is_not_asked_for_each_key(error: Exception) -> None:
    picky = Picky()
    picky.error = error
    gathered = BatchLoader(picky)
    answers = await asyncio.gather(*(gathered.load(key) for key in ("a", "bad", "ccc")), return_exceptions=True)
    assert [type(answer) for answer in answers] == [type(error)] * 3
    assert len(picky.calls) == 1
