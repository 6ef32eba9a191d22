"""The plan of a benchmark, its report, and the messages that ranks send while they measure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

LIBRARY = "library"
"""The implementation of `torch.distributed`."""

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
"""The collectives, and the factor between their algbw and busbw (NVIDIA/nccl-tests, doc/PERFORMANCE.md, and for
scatter and gather `ScatterGetBw` in src/scatter.cu and `GatherGetBw` in src/gather.cu).

The size is that of the longest vector on one rank before or after: the whole vector of broadcast, reduce and
all-reduce, all pieces together of the others.
"""


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives and sizes to measure.

    `sizes` in bytes, ascending. Each is measured for about `seconds` and at least three times; memory and links with
    `probe` bytes.
    """

    sizes: list[int]
    collectives: list[str]
    seconds: float = 0.2
    probe: int = 2**26


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement of one implementation: the median of some repetitions. Bandwidths are in GB/s (10^9 bytes)."""

    collective: str
    implementation: str
    size: int
    seconds: float
    repetitions: int
    algbw: float
    busbw: float
    is_correct: bool


class Link(msgspec.Struct, frozen=True):
    """The bandwidth from one rank to another while all others wait, in GB/s."""

    sender: int
    receiver: int
    bandwidth: float


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a benchmark.

    Collectives are medians. Memory and links are the best of some repetitions, since other programs can only slow them
    down: `copies`, the memory that each rank copies while all of them do, and `tcp`, a plain TCP stream between two
    ranks of one host, both in GB/s. `load`: the number of running or waiting processes on the host before the start.
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


class BenchStep(msgspec.Struct, frozen=True, tag="step"):
    """The step that rank 0 starts now."""

    done: int
    total: int
    doing: str


class BenchFinished(msgspec.Struct, frozen=True, tag="finished"):
    """The report, after everything was measured."""

    report: BenchReport


class BenchFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The reason why a rank failed."""

    rank: int
    text: str


def bandwidths(collective: str, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Return the algbw and busbw of nccl-tests, in GB/s."""
    algbw = size / seconds / 1e9
    return algbw, algbw * FACTORS[collective](ranks)
