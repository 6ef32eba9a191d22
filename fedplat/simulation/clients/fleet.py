"""A fleet: one array per property with one entry per client, drawn once from a seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.errors import JobFileError
from fedplat.simulation.clients import trace
from fedplat.simulation.clients.availability import Availability, Clients, build_availability
from fedplat.simulation.clients.distributions import Floats, draw
from fedplat.simulation.clients.options import FleetOptions

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
    devices = trace.read_devices((folder or Path()) / options.trace) if options.trace else trace.Devices()
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
        availability: Availability = trace.read_intervals(path, devices.names, rows, count, options.repeat_s, rng)
    else:
        availability = build_availability(options.availability, count, rng)
    held_out = np.zeros(count)
    return Fleet(options=options, labels=labels, availability=availability, held_out=held_out, **drawn)


def _count(options: FleetOptions, num_clients: int, devices: trace.Devices) -> int:
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
