"""Places for callers: who waits, who gives a place away, and that no caller keeps the others out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

from fedplat import fair_places
from fedplat.fair_places import FairPlaces, Groups, PlaceLimits, PlacesFullError, TooSlowError

LIMITS = PlaceLimits(total=3, per_network=2, waiting_per_network=4, wait_s=60.0, share_s=0.0)


@dataclasses.dataclass(eq=False)
class Holder:
    """A caller in a task of its own, which keeps its place until `done`."""

    places: FairPlaces
    groups: Groups
    connection: str = ""
    has_place: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    done: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.task = asyncio.ensure_future(self._hold())

    async def _hold(self) -> None:
        async with self.places.place(self.groups, self.connection):
            self.has_place.set()
            await self.done.wait()

    async def get(self) -> Holder:
        """Wait for the place."""
        getting = asyncio.ensure_future(self.has_place.wait())
        await asyncio.wait([getting, self.task], return_when=asyncio.FIRST_COMPLETED)
        getting.cancel()
        assert self.has_place.is_set()
        return self

    async def lost(self) -> str:
        """Return why the caller has no place."""
        with pytest.raises(PlacesFullError) as caught:
            await self.task
        return str(caught.value)


def test_the_greediest_is_the_oldest_of_the_widest_group_with_most() -> None:
    @dataclasses.dataclass
    class Caller:
        groups: Groups

    six = [Caller(fair_places.groups_of(f"2001:db8:0:{number:x}::1")) for number in (0, 0x100, 0x101)]
    four = [Caller(fair_places.groups_of("192.0.2.1")) for _ in range(2)]
    assert fair_places.find_greediest([four[0], *six, four[1]]) is six[1]  # of the /48, in it of the fuller /56
    assert fair_places.find_greediest([four[0], six[0], four[1]]) is four[0]
    assert fair_places.find_greediest([six[0], four[0]]) is six[0]


async def test_the_oldest_of_the_greediest_gives_its_place_away() -> None:
    places = FairPlaces(lambda: LIMITS)
    held = [await Holder(places, (network,)).get() for network in ("one", "two", "two")]
    newcomer = await Holder(places, ("three",)).get()
    assert await held[1].lost() == "others waited for its place"
    neighbour = await Holder(places, ("two",)).get()
    assert await held[2].lost()  # one of its own network, before the only one of another
    last = await Holder(places, ("four",)).get()
    assert await held[0].lost()  # all have one: the oldest
    for one in (newcomer, neighbour, last):
        one.done.set()
        await one.task
    assert (places.num_held, places.num_waiting) == (0, 0)


async def test_a_network_only_takes_from_itself() -> None:
    places = FairPlaces(lambda: LIMITS)
    other = await Holder(places, ("one",)).get()
    held = [await Holder(places, ("two",)).get() for _ in range(2)]
    for _ in range(3):
        held.append(await Holder(places, ("two",)).get())
        await held.pop(0).lost()
    assert not other.task.done()
    for one in (other, *held):
        one.done.set()
        await one.task


async def test_many_of_one_network_do_not_take_the_only_place_of_another() -> None:
    limits = dataclasses.replace(LIMITS, per_network=3, waiting_per_network=50)
    places = FairPlaces(lambda: limits)
    other = await Holder(places, ("one",)).get()
    greedy = [Holder(places, ("two",)) for _ in range(50)]
    third = await Holder(places, ("three",)).get()
    assert not other.task.done()
    assert not third.task.done()
    for one in (other, third):
        one.done.set()
        await one.task
    for one in greedy:
        one.task.cancel()
    await asyncio.gather(*(one.task for one in greedy), return_exceptions=True)
    assert (places.num_held, places.num_waiting) == (0, 0)


async def test_those_who_wait_come_in_turns() -> None:
    """Without a share of time no place is taken away: one of each network comes, then one of each again."""
    limits = dataclasses.replace(LIMITS, total=1, share_s=float("inf"), waiting_per_network=3)
    places = FairPlaces(lambda: limits)
    order: list[str] = []

    async def visit(network: str, connection: str) -> None:
        async with places.place((network,), connection):
            order.append(connection)
            await asyncio.sleep(0)

    first = await Holder(places, ("one",)).get()
    greedy = [asyncio.ensure_future(visit("one", "a")) for _ in range(3)]
    await asyncio.sleep(0)
    others = [asyncio.ensure_future(visit(network, name)) for network, name in (("one", "b"), ("two", "c"))]
    await asyncio.sleep(0)
    assert (places.num_held, places.num_waiting) == (1, 4)
    first.done.set()
    results = await asyncio.gather(*greedy, *others, return_exceptions=True)
    assert isinstance(results[0], PlacesFullError)  # the greediest connection, beyond the three that may wait
    assert results[1:] == [None] * 4
    assert order == ["a", "c", "b", "a"]


async def test_a_place_ends_with_its_time_and_a_wait_as_well() -> None:
    limits = PlaceLimits(1, 1, 4, wait_s=0.02, hold_s=60.0)
    places = FairPlaces(lambda: limits)
    first = await Holder(places, ("one",)).get()
    assert await Holder(places, ("two",)).lost() == "too many others were sending"
    first.done.set()
    await first.task
    limits = PlaceLimits(1, 1, 4, wait_s=60.0, hold_s=0.02)
    with pytest.raises(TooSlowError, match=r"not complete after 0\.02 s"):
        await Holder(places, ("two",)).task
    with contextlib.suppress(ValueError):
        async with places.place(("two",)):
            raise ValueError
    assert places.num_held == 0


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    places = FairPlaces(lambda: dataclasses.replace(LIMITS, total=1, share_s=float("inf")))
    first, second = await Holder(places, ("one",)).get(), Holder(places, ("two",))
    await asyncio.sleep(0)
    second.task.cancel()
    first.done.set()
    await asyncio.gather(first.task, second.task, return_exceptions=True)
    assert (places.num_held, places.num_waiting) == (0, 0)
    last = await Holder(places, ("two",)).get()
    last.done.set()
    await last.task
