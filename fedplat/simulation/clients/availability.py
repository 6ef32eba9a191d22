"""When clients are there: spells of time in which they ask for work, and outside of which nobody hears of them.

All times are virtual seconds since the job was started. Each model answers one question for many clients at once, and
remembers nothing, so that a million clients cost a few arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from fedplat.simulation.clients.distributions import (
    Constant,
    Distribution,
    Floats,
    UniformRange,
    hash_uniform,
    smallest,
)

Clients = npt.NDArray[np.int64]
Spells = tuple[Floats, Floats]
Probability = Annotated[float, Meta(gt=0.0, le=1.0)]
DAY_S, HOUR_S = 86_400.0, 3_600.0
_MAX_TRIES = 10_000
_MAX_SLOTS = 100


class Availability(Protocol):
    """A model of when clients are there."""

    def spells(self, clients: Clients, at: Floats) -> Spells:
        """For each client the first spell that ends after its moment `at`: when it begins (infinite: never) and ends.

        A client whose spell begins before `at` is there at that moment.
        """
        ...


class AlwaysOptions(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="always"):
    """Everybody is always there."""

    def build(self, num_clients: int, rng: np.random.Generator) -> Availability:
        """The model of a fleet."""
        return Always()


class SometimesOptions(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="probability"):
    """Each client is there with a probability, anew in each slot of `slot_s` seconds; each has slots of its own."""

    probability: Probability
    slot_s: Annotated[float, Meta(ge=1.0, le=1e9)] = 600.0

    def build(self, num_clients: int, rng: np.random.Generator) -> Availability:
        """The model of a fleet."""
        return Sometimes(self.probability, self.slot_s, rng.random(num_clients), int(rng.integers(2**63)))


class DiurnalOptions(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="diurnal"):
    """Each client is there once a day, at night say: from an hour of its local day on, for some hours.

    `offset_h` is its time zone, in hours east of UTC; the simulation begins at `start_h` hours UTC. On each day it is
    there with `probability`.
    """

    begins_h: Distribution = UniformRange(20.0, 24.0)
    lasts_h: Distribution = UniformRange(6.0, 10.0)
    offset_h: Distribution = Constant(0.0)
    start_h: Annotated[float, Meta(ge=0.0, le=24.0)] = 0.0
    probability: Probability = 1.0

    def __post_init__(self) -> None:
        if smallest(self.lasts_h) < 0.0:
            raise ValueError("lasts_h: expected no negative hours")

    def build(self, num_clients: int, rng: np.random.Generator) -> Availability:
        """The model of a fleet."""
        begins_h = self.begins_h.draw(num_clients, rng) - self.offset_h.draw(num_clients, rng) - self.start_h
        lasts_s = np.clip(self.lasts_h.draw(num_clients, rng) * HOUR_S, 60.0, DAY_S)
        return Diurnal(begins_h * HOUR_S % DAY_S, lasts_s, self.probability, int(rng.integers(2**63)))


AvailabilityOptions = AlwaysOptions | SometimesOptions | DiurnalOptions
"""The `availability` table of a fleet, whose key `kind` tells the models apart."""


class Always:
    """Everybody is always there."""

    def spells(self, clients: Clients, at: Floats) -> Spells:
        """See `Availability`."""
        return np.zeros(len(clients)), np.full(len(clients), np.inf)


@dataclasses.dataclass(frozen=True, eq=False)
class Sometimes:
    """See `SometimesOptions`; `phase` is where in a slot each client is when the simulation begins, of 1."""

    probability: float
    slot_s: float
    phase: Floats
    seed: int

    def spells(self, clients: Clients, at: Floats) -> Spells:
        """See `Availability`; a spell is cut after a hundred slots."""
        slot = np.floor(at / self.slot_s + self.phase[clients])
        slot += (slot + 1.0 - self.phase[clients]) * self.slot_s <= at  # by rounding: that slot is over
        slot = _first(slot, lambda wanted, rows: self._is_there(clients[rows], wanted))
        end = slot + 1.0
        rows = np.arange(len(clients))
        for _ in range(_MAX_SLOTS):
            rows = rows[self._is_there(clients[rows], end[rows])]
            if not len(rows):
                break
            end[rows] += 1.0
        return (slot - self.phase[clients]) * self.slot_s, (end - self.phase[clients]) * self.slot_s

    def _is_there(self, clients: Clients, slot: Floats) -> npt.NDArray[np.bool_]:
        return hash_uniform(self.seed, clients, slot + 1.0) < self.probability


@dataclasses.dataclass(frozen=True, eq=False)
class Diurnal:
    """See `DiurnalOptions`; `begins_s` is the moment in each virtual day, in seconds from 0 on."""

    begins_s: Floats
    lasts_s: Floats
    probability: float
    seed: int

    def spells(self, clients: Clients, at: Floats) -> Spells:
        """See `Availability`."""
        begins, lasts = self.begins_s[clients], self.lasts_s[clients]
        day = np.floor((at - begins) / DAY_S)
        day += at >= begins + day * DAY_S + lasts  # that spell is over
        if self.probability < 1.0:
            day = _first(
                day, lambda wanted, rows: hash_uniform(self.seed, clients[rows], wanted + 1.0) < self.probability
            )
        begin = begins + day * DAY_S
        return begin, begin + lasts


@dataclasses.dataclass(frozen=True, eq=False)
class Intervals:
    """Spells read from a trace: those of trace client k are `begins[first[k]:first[k + 1]]`, in order, and `ends`.

    `who` is the client of the trace that each client of the fleet behaves as. With `repeat_s` all begins anew after
    so many seconds.
    """

    first: Clients
    begins: Floats
    ends: Floats
    who: Clients
    repeat_s: float = np.inf

    def spells(self, clients: Clients, at: Floats) -> Spells:
        """See `Availability`."""
        who = self.who[clients]
        lap = np.floor(at / self.repeat_s) * self.repeat_s if np.isfinite(self.repeat_s) else np.zeros(len(at))
        found = self._first_that_ends_after(who, at, lap)
        if np.isfinite(self.repeat_s):
            over = found == self.first[who + 1]
            lap[over] += self.repeat_s
            found[over] = self.first[who[over]]
        begin, end = np.full(len(at), np.inf), np.full(len(at), np.inf)
        there = found < self.first[who + 1]
        begin[there] = lap[there] + self.begins[found[there]]
        end[there] = lap[there] + self.ends[found[there]]
        return begin, end

    def _first_that_ends_after(self, who: Clients, at: Floats, lap: Floats) -> Clients:
        """A binary search for all at once."""
        low, high = self.first[who].copy(), self.first[who + 1].copy()
        while (open_ := low < high).any():
            middle = (low + high) // 2
            later = np.zeros(len(who), np.bool_)
            later[open_] = lap[open_] + self.ends[middle[open_]] > at[open_]
            high = np.where(open_ & later, middle, high)
            low = np.where(open_ & ~later, middle + 1, low)
        return low


def _first(numbers: Floats, is_there: Callable[[Floats, Clients], npt.NDArray[np.bool_]]) -> Floats:
    """For each row the first number, from the given one on, at which it is there."""
    numbers = numbers.copy()
    rows = np.arange(len(numbers))
    for _ in range(_MAX_TRIES):
        rows = rows[~is_there(numbers[rows], rows)]
        if not len(rows):
            return numbers
        numbers[rows] += 1.0
    numbers[rows] = np.inf
    return numbers
