"""Models of availability: the spells of time in which clients are online; outside of them they send nothing.

All times are virtual seconds since the start of the job. A model computes the spells of many clients at once and has
no state, so a million clients cost a few arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from typing_extensions import override

from fedplat.config import user_code
from fedplat.config.plugins import Kind, build_checked, by_name, define, is_builtin, name_of
from fedplat.errors import PluginError
from fedplat.simulation.clients.distributions import (
    Constant,
    Distribution,
    Floats,
    UniformRange,
    draw,
    hash_uniform,
    smallest,
)

Clients = npt.NDArray[np.int64]
Spells = tuple[Floats, Floats]
Probability = Annotated[float, Meta(gt=0.0, le=1.0)]
DAY_S, HOUR_S = 86_400.0, 3_600.0
AVAILABILITY_KEY = "simulation.fleet.availability"
_MAX_TRIES = 10_000
_MAX_SLOTS = 100


@runtime_checkable
class Availability(Protocol):
    """A model of when clients are online."""

    def spells(self, clients: Clients, at: Floats) -> Spells:
        """Return when each client's first spell that ends after its moment `at` begins (infinite: never) and ends.

        A client whose spell begins before `at` is online at that moment.
        """
        ...


@runtime_checkable
class AvailabilityOptions(Protocol):
    """The `availability` table of a fleet: the options of a model, selected by the key `kind`."""

    def build(self, num_clients: int, rng: np.random.Generator) -> Availability:
        """Build the model of a fleet, all of whose randomness is from `rng`."""
        ...


class AlwaysOptions(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="always"):
    """All clients are always online."""

    def build(self, num_clients: int, rng: np.random.Generator) -> Availability:
        """Build the model of a fleet."""
        return Always()


class SometimesOptions(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="probability"):
    """Each client is online with a probability, drawn for each of its slots of `slot_s` seconds.

    The slots of different clients begin at different times.
    """

    probability: Probability
    slot_s: Annotated[float, Meta(ge=1.0, le=1e9)] = 600.0

    def build(self, num_clients: int, rng: np.random.Generator) -> Availability:
        """Build the model of a fleet."""
        return Sometimes(self.probability, self.slot_s, rng.random(num_clients), int(rng.integers(2**63)))


class DiurnalOptions(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="diurnal"):
    """Each client is online once a day, such as at night: for `lasts_h` hours from `begins_h` of its local day.

    `offset_h` is its time zone, in hours east of UTC; the simulation begins at `start_h` hours UTC. On each day the
    client is online with `probability`.
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
        """Build the model of a fleet."""
        drawn = {
            name: draw(getattr(self, name), num_clients, rng, f"{AVAILABILITY_KEY}.{name}", positive=name == "lasts_h")
            for name in ("begins_h", "offset_h", "lasts_h")
        }
        begins_h = drawn["begins_h"] - drawn["offset_h"] - self.start_h
        lasts_s = np.clip(drawn["lasts_h"] * HOUR_S, 60.0, DAY_S)
        return Diurnal(begins_h * HOUR_S % DAY_S, lasts_s, self.probability, int(rng.integers(2**63)))


AVAILABILITY_MODELS: Mapping[str, type[AvailabilityOptions]] = by_name(AlwaysOptions, SometimesOptions, DiurnalOptions)
"""The options record of each built-in model, by its name in a simulation file."""

define(
    Kind(
        "availability",
        "kind",
        "an availability model",
        AvailabilityOptions,
        ("build",),
        AVAILABILITY_MODELS,
        plain=True,
    )
)


def build_availability(options: AvailabilityOptions, num_clients: int, rng: np.random.Generator) -> Availability:
    """Build the model of a fleet. A model of a plugin is checked each time that it computes spells."""
    model = build_checked(options, Availability, AVAILABILITY_KEY, num_clients, rng)
    return model if is_builtin(options, AvailabilityOptions) else CheckedAvailability(model, name_of(options))


@dataclasses.dataclass(frozen=True, eq=False)
class CheckedAvailability(Availability):
    """A model of a plugin. Raises `PluginError` or `UserCodeError` if its spells are impossible."""

    model: Availability
    name: str

    @override
    def spells(self, clients: Clients, at: Floats) -> Spells:
        action = f'{AVAILABILITY_KEY} = "{self.name}": spells()'
        with user_code.wrap_errors(action):
            begin, end = map(np.asarray, self.model.spells(clients, at))
        for found in (begin, end):
            if found.shape != clients.shape or found.dtype.kind not in "fiu":
                raise PluginError(
                    f"{action} returned {found.dtype}{list(found.shape)}; expected two arrays float64[{len(clients)}]"
                )
        wrong = ~((end > at) & (begin <= end))  # also if one of them is NaN
        if wrong.any():
            raise PluginError(
                f"{action} returned a spell from {begin[wrong][0]} to {end[wrong][0]} for client {clients[wrong][0]} "
                f"and the moment {at[wrong][0]:g}; expected that it ends after that moment, and not before it begins"
            )
        return begin.astype(np.float64), end.astype(np.float64)


class Always(Availability):
    """All clients are always online."""

    @override
    def spells(self, clients: Clients, at: Floats) -> Spells:
        return np.zeros(len(clients)), np.full(len(clients), np.inf)


@dataclasses.dataclass(frozen=True, eq=False)
class Sometimes(Availability):
    """See `SometimesOptions`; `phase` is the part of its slot that has passed for each client at the start, below 1."""

    probability: float
    slot_s: float
    phase: Floats
    seed: int

    @override
    def spells(self, clients: Clients, at: Floats) -> Spells:
        """Return the spells; a spell is cut after a hundred slots."""
        slot = np.floor(at / self.slot_s + self.phase[clients])
        slot += (slot + 1.0 - self.phase[clients]) * self.slot_s <= at  # because of rounding: that slot is over
        slot = _first(slot, lambda slots, rows: self._is_online(clients[rows], slots))
        end = slot + 1.0
        rows = np.arange(len(clients))
        for _ in range(_MAX_SLOTS):
            rows = rows[self._is_online(clients[rows], end[rows])]
            if not len(rows):
                break
            end[rows] += 1.0
        return (slot - self.phase[clients]) * self.slot_s, (end - self.phase[clients]) * self.slot_s

    def _is_online(self, clients: Clients, slot: Floats) -> npt.NDArray[np.bool_]:
        return hash_uniform(self.seed, clients, slot + 1.0) < self.probability


@dataclasses.dataclass(frozen=True, eq=False)
class Diurnal(Availability):
    """See `DiurnalOptions`; `begins_s` is the start of each client's spell, in seconds since a virtual day's start."""

    begins_s: Floats
    lasts_s: Floats
    probability: float
    seed: int

    @override
    def spells(self, clients: Clients, at: Floats) -> Spells:
        begins, lasts = self.begins_s[clients], self.lasts_s[clients]
        day = np.floor((at - begins) / DAY_S)
        day += at >= begins + day * DAY_S + lasts  # that spell is over
        if self.probability < 1.0:
            day = _first(day, lambda days, rows: hash_uniform(self.seed, clients[rows], days + 1.0) < self.probability)
        begin = begins + day * DAY_S
        return begin, begin + lasts


@dataclasses.dataclass(frozen=True, eq=False)
class Intervals(Availability):
    """Spells from a trace: those of trace client k begin at `begins[first[k]:first[k + 1]]`, in order; so do `ends`.

    `who` is the trace client that each client of the fleet behaves like. The trace repeats every `repeat_s` seconds.
    """

    first: Clients
    begins: Floats
    ends: Floats
    who: Clients
    repeat_s: float = np.inf

    @override
    def spells(self, clients: Clients, at: Floats) -> Spells:
        who = self.who[clients]
        lap = np.floor(at / self.repeat_s) * self.repeat_s if np.isfinite(self.repeat_s) else np.zeros(len(at))
        index = self._find_first_ending_after(who, at, lap)
        if np.isfinite(self.repeat_s):
            over = index == self.first[who + 1]
            lap[over] += self.repeat_s
            index[over] = self.first[who[over]]
        begin, end = np.full(len(at), np.inf), np.full(len(at), np.inf)
        exists = index < self.first[who + 1]
        begin[exists] = lap[exists] + self.begins[index[exists]]
        end[exists] = lap[exists] + self.ends[index[exists]]
        return begin, end

    def _find_first_ending_after(self, who: Clients, at: Floats, lap: Floats) -> Clients:
        """Find the index of each client's first spell that ends after `at`, by one binary search for all clients."""
        low, high = self.first[who].copy(), self.first[who + 1].copy()
        while (open_ := low < high).any():
            middle = (low + high) // 2
            later = np.zeros(len(who), np.bool_)
            later[open_] = lap[open_] + self.ends[middle[open_]] > at[open_]
            high = np.where(open_ & later, middle, high)
            low = np.where(open_ & ~later, middle + 1, low)
        return low


def _first(numbers: Floats, is_online: Callable[[Floats, Clients], npt.NDArray[np.bool_]]) -> Floats:
    """Return for each row the first number, from the given one on, at which it is online; infinite after 10,000."""
    numbers = numbers.copy()
    rows = np.arange(len(numbers))
    for _ in range(_MAX_TRIES):
        rows = rows[~is_online(numbers[rows], rows)]
        if not len(rows):
            return numbers
        numbers[rows] += 1.0
    numbers[rows] = np.inf
    return numbers
