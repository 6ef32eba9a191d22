"""A fleet: one array for each property, one entry for each client, drawn once from a seed."""

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
from fedplat.simulation.clients.availability import Availability, Clients
from fedplat.simulation.clients.distributions import Floats
from fedplat.simulation.clients.options import FleetOptions

SLOWEST = 1e-9
"""Nobody is slower than this, in examples or bytes a second: an infinite time would stand in every sum."""


@dataclasses.dataclass(frozen=True, eq=False)
class Label:
    """The values that a label has, and the one of each client as an index into them: int16 [clients]."""

    values: tuple[str, ...]
    codes: npt.NDArray[np.int16]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Fleet:
    """What each client is like; see `FleetOptions` for the units. All arrays have `num_clients` entries.

    A client trains on `examples`, and scores models with `held_out` more; where nobody has such, with the former.
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
        """Number of clients."""
        return len(self.speed)

    @cached_property
    def kinds(self) -> npt.NDArray[np.int64]:
        """A number for each client, which those with the same labels share."""
        kinds = np.zeros(self.num_clients, np.int64)
        for label in self.labels.values():
            kinds = kinds * len(label.values) + label.codes
            kinds = np.unique(kinds, return_inverse=True)[1]  # so that the product of many labels does not overflow
        return kinds

    def labels_of(self, client: int) -> dict[str, str]:
        """What a client says of itself."""
        return {name: label.values[label.codes[client]] for name, label in self.labels.items()}

    def with_examples(self, examples: npt.ArrayLike, held_out: npt.ArrayLike | None = None) -> Fleet:
        """The fleet with the numbers of examples that its data say: to train on, and to score models with."""
        known = np.asarray(examples, np.float64)
        kept = np.zeros_like(known) if held_out is None else np.asarray(held_out, np.float64)
        if known.shape != (self.num_clients,) or kept.shape != known.shape:
            raise ValueError(f"the data has {known.size} clients, and the fleet {self.num_clients}; expected as many")
        return dataclasses.replace(self, examples=known, held_out=kept)


def build_fleet(options: FleetOptions, seed: int, num_clients: int = 0, folder: Path | None = None) -> Fleet:
    """Draws a fleet; the same arguments give the same one.

    `num_clients` is that of the data, if there is any; `folder` is what paths of traces are relative to. Raises
    `JobFileError` when the numbers of clients do not agree, or a trace cannot be used.
    """
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0xF1EE7]))
    devices = trace.read_devices((folder or Path()) / options.trace) if options.trace else trace.Devices()
    count = _count(options, num_clients, devices)
    rows = _rows(devices.num_devices, count, rng)
    drawn: dict[str, Floats] = {}
    for name in ("speed", "download", "upload", "latency_s", "examples"):
        values = getattr(options, name).draw(count, rng)  # also where a trace replaces it: the others stay the same
        drawn[name] = devices.numbers[name][rows] if name in devices.numbers else values
    for name in ("speed", "download", "upload"):
        drawn[name] = np.maximum(drawn[name], SLOWEST)
    drawn["latency_s"] = np.maximum(drawn["latency_s"], 0.0)
    drawn["examples"] = np.maximum(np.rint(drawn["examples"]), 1.0)
    labels = {name: _drawn_label(shares, count, rng) for name, shares in sorted(options.labels.items())}
    labels |= {name: _traced_label(devices.labels[name], rows) for name in devices.labels}
    if options.availability_trace:
        path = (folder or Path()) / options.availability_trace
        availability: Availability = trace.read_intervals(path, devices.names, rows, count, options.repeat_s, rng)
    else:
        availability = options.availability.build(count, rng)
    held_out = np.zeros(count)
    return Fleet(options=options, labels=labels, availability=availability, held_out=held_out, **drawn)


def _count(options: FleetOptions, num_clients: int, devices: trace.Devices) -> int:
    count = options.num_clients or num_clients or devices.num_devices
    if not count:
        raise JobFileError("simulation.fleet.num_clients: this key is required where there is neither data nor a trace")
    if num_clients and count != num_clients:
        raise JobFileError(
            f"simulation.fleet.num_clients = {count}: the data has {num_clients}; leave the key out, or say as many"
        )
    return count


def _rows(num_devices: int, count: int, rng: np.random.Generator) -> Clients:
    """Which device of a trace each client is: each its own if there are as many, else drawn."""
    if num_devices in (0, count):
        return np.arange(count)
    return rng.integers(num_devices, size=count)


def _drawn_label(shares: Mapping[str, float], count: int, rng: np.random.Generator) -> Label:
    weights = np.array(list(shares.values()))
    return Label(tuple(shares), rng.choice(len(shares), count, p=weights / weights.sum()).astype(np.int16))


def _traced_label(values: Any, rows: Clients) -> Label:
    known, codes = np.unique(np.asarray(values, np.str_), return_inverse=True)
    return Label(tuple(map(str, known)), codes.astype(np.int16)[rows])
