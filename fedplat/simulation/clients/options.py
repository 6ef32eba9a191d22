"""The table `[simulation.fleet]` of a simulation file: the properties of the clients, all drawn from one seed."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from fedplat.simulation.clients.availability import AlwaysOptions, AvailabilityOptions
from fedplat.simulation.clients.distributions import Constant, Distribution, smallest

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
