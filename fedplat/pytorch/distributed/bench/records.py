"""The plan of a benchmark, its report, what ranks send while they measure, and the verdict on a group of workers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

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


SLOW_FRACTION = 0.5
"""A rank or link below this fraction of the median of the others is slow; the noise of a busy machine is less."""
MIN_TCP_FRACTION = 0.2
"""Links below this fraction of a plain TCP stream are misconfigured."""


def find_problems(report: BenchReport) -> list[str]:
    """Return the problems, a sentence each; an empty list if the workers are healthy."""
    problems = _find_wrong_results(report)
    slow_ranks = [
        f"rank {rank} copies memory at {copied:.2f} GB/s, the others at {others:.2f} GB/s: "
        "another program runs there, or its memory is throttled"
        for rank, copied in enumerate(report.copies)
        if copied < SLOW_FRACTION * (others := _median(report.copies, rank))
    ]
    return [*problems, *slow_ranks, *_slow_links(report)]


def _find_wrong_results(report: BenchReport) -> list[str]:
    wrong = sorted({(each.collective, each.implementation) for each in report.measurements if not each.is_correct})
    return [
        f"wrong results of {collective} ({report.library if name == LIBRARY else name}): do not use this pool"
        for collective, name in wrong
    ]


def _slow_links(report: BenchReport) -> list[str]:
    slow = [
        link for number, link in enumerate(report.links) if link.bandwidth < SLOW_FRACTION * _rest(report.links, number)
    ]
    problems: list[str] = []
    for rank in range(report.ranks if report.ranks > 2 else 0):
        own = [link for link in report.links if rank in (link.sender, link.receiver)]
        if own and all(link in slow for link in own):
            problems.append(f"rank {rank} is slow on all of its links ({_range(own)}): look at its host or its GPU")
            slow = [link for link in slow if link not in own]
    problems += [
        f"the link from rank {link.sender} to rank {link.receiver} carries {link.bandwidth:.2f} GB/s, "
        f"the others {_rest(report.links, report.links.index(link)):.2f} GB/s"
        for link in slow
    ]
    if report.links and report.device == "cpu":
        median = statistics.median(link.bandwidth for link in report.links)
        if median < MIN_TCP_FRACTION * report.tcp:
            problems.append(
                f"links carry {median:.2f} GB/s, and plain TCP {report.tcp:.2f} GB/s: "
                "is there a CPU for each rank, and GLOO_SOCKET_IFNAME a fast network?"
            )
    return problems


def _median(values: Sequence[float], without: int) -> float:
    return statistics.median([value for number, value in enumerate(values) if number != without] or [0.0])


def _rest(links: Sequence[Link], without: int) -> float:
    return _median([link.bandwidth for link in links], without)


def _range(links: Sequence[Link]) -> str:
    bandwidths = [link.bandwidth for link in links]
    return f"{min(bandwidths):.2f} to {max(bandwidths):.2f} GB/s"
