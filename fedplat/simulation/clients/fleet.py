"""A fleet: the tables `[simulation.fleet]` and `[simulation.links]`, and arrays of its clients, drawn from a seed.

The files that the tables name are CSV files with a header, or JSON lines (`.jsonl`) of objects.

- Devices: `speed` (examples a second), `download`, `upload` (bytes a second), `latency_s`, `examples`, all optional;
  every column `label.NAME` is a label; `client` names the device for the other file. Unknown columns are errors.
- Spells: `client`, `begin_s`, `end_s`, in seconds since the trace began.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from fedplat.errors import JobFileError
from fedplat.simulation.clients import distributions
from fedplat.simulation.clients.availability import (
    AlwaysOptions,
    Availability,
    AvailabilityOptions,
    Clients,
    Intervals,
    build_availability,
)
from fedplat.simulation.clients.distributions import Constant, Distribution, Floats, draw, smallest

MIN_SPEED = 1e-9
"""The lowest speed, in examples or bytes a second: a speed of 0 would make times, and their sums, infinite."""


@dataclasses.dataclass(frozen=True, eq=False)
class Label:
    """The values of a label, and for each client the index of its value: int16 [clients]."""

    values: tuple[str, ...]
    codes: npt.NDArray[np.int16]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Fleet:
    """The properties of all clients; see `FleetOptions` for the units. All arrays have `num_clients` entries.

    A client trains on `examples`, and scores models on `held_out` others; if it has none of those, on the former.
    """

    options: FleetOptions
    speed: Floats
    download: Floats
    upload: Floats
    latency_s: Floats
    examples: Floats
    held_out: Floats
    labels: Mapping[str, Label]
    availability: Availability

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.speed)

    @cached_property
    def kinds(self) -> npt.NDArray[np.int64]:
        """A number for each client that is the same for clients with the same labels."""
        kinds = np.zeros(self.num_clients, np.int64)
        for label in self.labels.values():
            kinds = kinds * len(label.values) + label.codes
            kinds = np.unique(kinds, return_inverse=True)[1]  # so that the product of many labels does not overflow
        return kinds

    def labels_of(self, client: int) -> dict[str, str]:
        """Return the labels of a client."""
        return {name: label.values[label.codes[client]] for name, label in self.labels.items()}

    def with_examples(self, examples: npt.ArrayLike, held_out: npt.ArrayLike | None = None) -> Fleet:
        """Return the fleet with its data's numbers of examples, to train on and to score models on.

        Raises `ValueError` if the data has another number of clients than the fleet.
        """
        train = np.asarray(examples, np.float64)
        test = np.zeros_like(train) if held_out is None else np.asarray(held_out, np.float64)
        if train.shape != (self.num_clients,) or test.shape != train.shape:
            raise ValueError(f"the data has {train.size} clients, and the fleet {self.num_clients}; expected as many")
        return dataclasses.replace(self, examples=train, held_out=test)


def build_fleet(options: FleetOptions, seed: int, num_clients: int = 0, folder: Path | None = None) -> Fleet:
    """Draw a fleet; equal arguments return equal fleets.

    `num_clients` is that of the data (0: there is no data); paths of traces are relative to `folder`. Raises
    `JobFileError` if the numbers of clients disagree, or a trace cannot be used.
    """
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0xF1EE7]))
    devices = read_devices((folder or Path()) / options.trace) if options.trace else Devices()
    count = _count(options, num_clients, devices)
    rows = _rows(devices.num_devices, count, rng)
    drawn: dict[str, Floats] = {}
    for name in ("speed", "download", "upload", "latency_s", "examples"):
        # Draw even if a trace replaces it, so that the other draws stay the same.
        key, positive = f"simulation.fleet.{name}", name != "latency_s"
        values = draw(getattr(options, name), count, rng, key, positive=positive)
        drawn[name] = devices.numbers[name][rows] if name in devices.numbers else values
    for name in ("speed", "download", "upload"):
        drawn[name] = np.maximum(drawn[name], MIN_SPEED)
    drawn["latency_s"] = np.maximum(drawn["latency_s"], 0.0)
    drawn["examples"] = np.maximum(np.rint(drawn["examples"]), 1.0)
    labels = {name: _drawn_label(shares, count, rng) for name, shares in sorted(options.labels.items())}
    labels |= {name: _traced_label(devices.labels[name], rows) for name in devices.labels}
    if options.availability_trace:
        path = (folder or Path()) / options.availability_trace
        availability: Availability = read_intervals(path, devices.names, rows, count, options.repeat_s, rng)
    else:
        availability = build_availability(options.availability, count, rng)
    held_out = np.zeros(count)
    return Fleet(options=options, labels=labels, availability=availability, held_out=held_out, **drawn)


def _count(options: FleetOptions, num_clients: int, devices: Devices) -> int:
    count = options.num_clients or num_clients or devices.num_devices
    if not count:
        raise JobFileError("simulation.fleet.num_clients: this key is required without data and without a trace")
    if num_clients and count != num_clients:
        raise JobFileError(
            f"simulation.fleet.num_clients = {count}: the data has {num_clients}; leave the key out, or set it to that"
        )
    return count


def _rows(num_devices: int, count: int, rng: np.random.Generator) -> Clients:
    """Return the device of each client: a different one each if a trace has as many devices, else drawn at random."""
    if num_devices in (0, count):
        return np.arange(count)
    return rng.integers(num_devices, size=count)


def _drawn_label(shares: Mapping[str, float], count: int, rng: np.random.Generator) -> Label:
    weights = np.array(list(shares.values()))
    return Label(tuple(shares), rng.choice(len(shares), count, p=weights / weights.sum()).astype(np.int16))


def _traced_label(values: Any, rows: Clients) -> Label:
    names, codes = np.unique(np.asarray(values, np.str_), return_inverse=True)
    return Label(tuple(map(str, names)), codes.astype(np.int16)[rows])


Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(ge=0.0, le=31_536_000.0)]
MAX_CLIENTS = 10_000_000


class FleetOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The properties of the clients of a simulation; each client's values are drawn once.

    `num_clients`: 0 stands for the number of clients in the data. `speed`: examples a second. `download`, `upload`:
    bytes a second. `latency_s`: of each transfer. `examples`: of each client, without data. `labels`: for each label,
    the shares of its values. `noise`: each training time is multiplied by exp(N(0, noise²)).

    Of all assignments the share `fails` ends with an error that the client reports, the share `vanishes` with a client
    that goes offline silently for `away_s`, and the share `stragglers` has time for a uniformly drawn part of its local
    steps only. In each step of secure aggregation after the training, the share `drops_out` of its clients goes offline
    in the same way. `trace`: a CSV or JSON-lines file, relative to the simulation file, with one device a line; its
    columns replace the distributions. `availability_trace`: such a file with spells of availability, repeated every
    `repeat_s` (0: never).

    A check-in waits `wait_s` for an assignment. Check-ins reach the coordinator in batches, `batch_s` after the first
    of each, or when something else happens (0: each at its own moment). All clients check in for the first time within
    `arrive_s` (0: as if they returned from pauses that the coordinator had requested while it had no job).
    """

    num_clients: Annotated[int, Meta(ge=0, le=MAX_CLIENTS)] = 0
    speed: Distribution = Constant(1000.0)
    download: Distribution = Constant(10e6)
    upload: Distribution = Constant(2e6)
    latency_s: Distribution = Constant(0.05)
    examples: Distribution = Constant(100.0)
    labels: dict[str, dict[str, Share]] = {}
    availability: AvailabilityOptions = AlwaysOptions()
    noise: Annotated[float, Meta(ge=0.0, le=3.0)] = 0.0
    fails: Share = 0.0
    vanishes: Share = 0.0
    away_s: Seconds = 600.0
    stragglers: Share = 0.0
    drops_out: Share = 0.0
    trace: str = ""
    availability_trace: str = ""
    repeat_s: Seconds = 0.0
    wait_s: Annotated[float, Meta(ge=0.1, le=300.0)] = 60.0
    batch_s: Seconds = 0.0
    arrive_s: Seconds = 0.0

    def __post_init__(self) -> None:
        for name in ("speed", "download", "upload"):
            if smallest(getattr(self, name)) < 0.0 or getattr(self, name) == Constant(0.0):
                raise ValueError(f"{name}: expected values above 0 only")
        for name in ("latency_s", "examples"):
            if smallest(getattr(self, name)) < 0.0:
                raise ValueError(f"{name}: expected no value below 0")
        for label, shares in self.labels.items():
            if not 0.999 <= sum(shares.values()) <= 1.001:
                raise ValueError(f"labels.{label}: the shares add up to {sum(shares.values()):g}; expected 1")
        if self.fails + self.vanishes > 1.0:
            raise ValueError(f"fails + vanishes = {self.fails + self.vanishes:g}: expected at most 1")
        if self.batch_s > self.wait_s:
            raise ValueError(f"batch_s = {self.batch_s}: expected at most wait_s, which is {self.wait_s}")


NUMBERS = ("speed", "download", "upload", "latency_s", "examples")
_SPELL = ("client", "begin_s", "end_s")


@dataclasses.dataclass(frozen=True)
class Devices:
    """The columns that a file of devices has."""

    numbers: Mapping[str, Floats] = dataclasses.field(default_factory=dict[str, Floats])
    labels: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict[str, Sequence[str]])
    names: Sequence[str] = ()
    num_devices: int = 0


def read_devices(path: Path) -> Devices:
    """Read a file of devices. Raises `JobFileError` with the line of the mistake."""
    numbers: dict[str, list[float]] = {}
    labels: dict[str, list[str]] = {}
    names: list[str] = []
    count = 0
    for line, row in _trace_rows(path):
        for column, value in row.items():
            if column in NUMBERS:
                numbers.setdefault(column, []).append(_number(path, line, column, value, above=column != "latency_s"))
            elif column.startswith("label."):
                labels.setdefault(column.removeprefix("label."), []).append(str(value))
            elif column == "client":
                names.append(str(value))
            else:
                known = ", ".join((*NUMBERS, "client", "label.NAME"))
                raise JobFileError(f"{path}, line {line}: there is no column {column!r}; known columns: {known}")
        count += 1
        if uneven := [name for name, values in {**numbers, **labels}.items() if len(values) != count]:
            raise JobFileError(
                f"{path}, line {line}: {uneven[0]} is missing in this line or an earlier one; expected it in all lines"
            )
    if not count:
        raise JobFileError(f"{path}: the file has no devices; expected at least one")
    return Devices({name: np.array(values) for name, values in numbers.items()}, labels, names, count)


def read_intervals(
    path: Path, names: Sequence[str], rows: Clients, count: int, repeat_s: float, rng: np.random.Generator
) -> Intervals:
    """Read a file of spells.

    With device `names`, client i behaves like device `rows[i]`. Without, it behaves like a trace client: a different
    one each if the trace has `count` of them, else one drawn at random. Raises `JobFileError` with the line of the
    mistake.
    """
    by_client: dict[str, list[tuple[float, float]]] = {}
    for line, row in _trace_rows(path):
        if set(row) != set(_SPELL):
            raise JobFileError(f"{path}, line {line}: it has {', '.join(row)}; expected {', '.join(_SPELL)}")
        begin, end = (_number(path, line, column, row[column], above=False) for column in _SPELL[1:])
        if not begin < end or (repeat_s and end > repeat_s):
            raise JobFileError(
                f"{path}, line {line}: the spell is from {begin:g} to {end:g}; expected begin_s < end_s"
                + (f" <= repeat_s = {repeat_s:g}" if repeat_s else "")
            )
        by_client.setdefault(str(row["client"]), []).append((begin, end))
    if not by_client:
        raise JobFileError(f"{path}: the file has no spells; expected at least one")
    order = list(names) if names else sorted(by_client)
    spells = [spell for name in order for spell in _merge_spells(by_client.get(name, []))]
    sizes = [len(_merge_spells(by_client.get(name, []))) for name in order]
    first = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    drawn = np.arange(count) if len(order) == count else rng.integers(len(order), size=count)
    who = rows if names else drawn
    begins, ends = np.array(spells, np.float64).reshape(-1, 2).T
    return Intervals(first, begins.copy(), ends.copy(), who, repeat_s or np.inf)


def _merge_spells(spells: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sort spells, and merge those that touch or overlap."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spells):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _trace_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a file with their line numbers."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            if path.suffix == ".jsonl":
                for line, text in enumerate(file, 1):
                    if text.strip():
                        yield line, msgspec.json.decode(text, type=dict[str, Any])
                return
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    raise JobFileError(f"{path}, line {reader.line_num}: expected as many cells as in the first line")
                yield reader.line_num, row
    except OSError as exc:
        raise JobFileError(f"the trace {path} cannot be read: {exc.strerror or exc}") from exc
    except (ValueError, csv.Error, msgspec.MsgspecError) as exc:
        raise JobFileError(f"{path} is not a trace: {exc}; expected CSV with a header, or .jsonl") from exc


def _number(path: Path, line: int, column: str, value: Any, *, above: bool) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0.0 or (above and number == 0.0):
        wanted = "a number above 0" if above else "a number of at least 0"
        raise JobFileError(f"{path}, line {line}: {column} is {value!r}; expected {wanted}")
    return number


SiloIndex = Annotated[int, Meta(ge=0, lt=MAX_CLIENTS)]
RoundNumber = Annotated[int, Meta(ge=1, le=10_000_000)]
Mask = npt.NDArray[np.bool_]


class Cut(Struct, frozen=True, forbid_unknown_fields=True):
    """A link between two silos that carries nothing from round `first` to round `last`."""

    silos: tuple[SiloIndex, SiloIndex]
    first: RoundNumber
    last: RoundNumber

    def __post_init__(self) -> None:
        _check_span(self.first, self.last)


class Outage(Struct, frozen=True, forbid_unknown_fields=True):
    """A silo that dies in round `first`, once it has its neighbours' models, and is back after round `last`."""

    silo: SiloIndex
    first: RoundNumber
    last: RoundNumber

    def __post_init__(self) -> None:
        _check_span(self.first, self.last)


class LinkOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The faults of a decentralised job: of all messages between silos the share `loss` is lost, `cuts` and `dead`."""

    loss: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    cuts: Annotated[tuple[Cut, ...], Meta(max_length=10_000)] = ()
    dead: Annotated[tuple[Outage, ...], Meta(max_length=10_000)] = ()

    def is_dead(self, silo: int, round_number: int, *, at_end: bool = False) -> bool:
        """Return whether a silo is dead at the beginning of a round, or at its end."""
        begin = round_number if at_end else round_number - 1
        return any(each.silo == silo and each.first <= begin and round_number <= each.last for each in self.dead)

    def is_lost(self, seed: int, round_number: int, links: npt.NDArray[np.int64]) -> Mask:
        """Return which messages are lost in a round, for links [links, 2] from sender to receiver."""
        lost = distributions.hash_uniform(seed, links[:, 0], links[:, 1], round_number) < self.loss
        for cut in self.cuts:
            if cut.first <= round_number <= cut.last:
                lost |= np.all(links == cut.silos, axis=1) | np.all(links == cut.silos[::-1], axis=1)
        return lost


def _check_span(first: int, last: int) -> None:
    if last < first:
        raise ValueError(f"last = {last}: expected at least first, which is {first}")
