"""What is measured, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

FACTORS: dict[str, Callable[[int], float]] = {
    "broadcast": lambda ranks: 1.0,
    "scatter": lambda ranks: (ranks - 1) / ranks,
    "gather": lambda ranks: (ranks - 1) / ranks,
    "all-gather": lambda ranks: (ranks - 1) / ranks,
    "all-to-all": lambda ranks: (ranks - 1) / ranks,
    "reduce": lambda ranks: 1.0,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
}
"""The collectives, and what their algbw is multiplied by to get busbw (NVIDIA/nccl-tests, doc/PERFORMANCE.md, and for
scatter and gather `ScatterGetBw` in src/scatter.cu and `GatherGetBw` in src/gather.cu).

The size is that of the longest vector which one rank has before or after it: the whole vector of broadcast, reduce and
all-reduce, all pieces together of the others.
"""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured.

    `sizes` in bytes, ascending, each of them for about `seconds` and at least three times; memory and links with
    `probe` bytes.
    """

    sizes: list[int]
    collectives: list[str]
    seconds: float = 0.2
    probe: int = 2**26


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One collective, done one way: the median of some repetitions. Bandwidths are in GB (10^9 bytes) a second."""

    collective: str
    way: str
    size: int
    seconds: float
    repetitions: int
    algbw: float
    busbw: float
    is_correct: bool


class Link(msgspec.Struct, frozen=True):
    """What gets from one rank to another, all others waiting, in GB/s."""

    sender: int
    receiver: int
    bandwidth: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    Collectives are medians. Of memory and links it is the best of some repetitions, since others can only slow them
    down: `copies`, the memory that each rank copies while all of them do, and `tcp`, a plain TCP stream between two
    ranks of one host, both in GB/s. `load`: the processes that ran or waited on the host before.
    """

    ranks: int
    device: str
    library: str
    cores: int
    load: float
    copies: list[float]
    links: list[Link]
    tcp: float
    measurements: list[Measurement]


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far the ranks are."""

    done: int
    total: int
    doing: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Everything was measured."""

    report: Report


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A rank could not go on."""

    rank: int
    text: str


def bandwidths(collective: str, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """The algbw and busbw of nccl-tests, in GB/s."""
    algbw = size / seconds / 1e9
    return algbw, algbw * FACTORS[collective](ranks)
