"""The verdict on a group of workers: whether it is healthy, and if not, which rank or link is the cause."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedplat.pytorch.distributed.bench.records import LIBRARY, BenchReport, Link

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
