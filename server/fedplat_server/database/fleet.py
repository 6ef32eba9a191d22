"""Records of the whole fleet: what its clients are, and how many were there in each hour."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple


@dataclasses.dataclass(frozen=True, slots=True)
class ClientTraits:
    """What is counted of a client. `sequence` grows in the order of enrollment."""

    sequence: int
    population: str
    labels: Mapping[str, str]
    software_version: str
    is_revoked: bool


class AvailabilityHour(NamedTuple):
    """An hour of a population, from `hour_unix_s` on.

    `num_seen` different clients checked in, and `max_available` is the most that waited or worked at one time.
    """

    population: str
    hour_unix_s: float
    num_seen: int
    max_available: int
