"""Whether a pool is healthy, and if not, which rank or link is to blame."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedplat.backends.ranks.bench.records import Link, Report

SLOW = 0.5
"""What is slower than so much of the median of its like is worth a look: noise of a busy machine is less."""
FAR_BELOW_TCP = 0.2
"""Links that reach less of a plain TCP stream have a cause."""


def findings(report: Report) -> list[str]:
    """What is wrong, a sentence each; nothing if the pool is healthy."""
    found = _wrong(report)
    slow_ranks = [
        f"rank {rank} copies memory at {copied:.2f} GB/s, the others at {others:.2f} GB/s: "
        "something else works there, or its memory is throttled"
        for rank, copied in enumerate(report.copies)
        if copied < SLOW * (others := _median(report.copies, rank))
    ]
    return [*found, *slow_ranks, *_slow_links(report)]


def _wrong(report: Report) -> list[str]:
    wrong = sorted({(each.collective, each.way) for each in report.measurements if not each.is_correct})
    names = [f"{collective} ({report.library if way == 'library' else way})" for collective, way in wrong]
    return [f"wrong results of {name}: do not let this pool work" for name in names]


def _slow_links(report: Report) -> list[str]:
    slow = [link for number, link in enumerate(report.links) if link.bandwidth < SLOW * _rest(report.links, number)]
    found: list[str] = []
    for rank in range(report.ranks if report.ranks > 2 else 0):
        own = [link for link in report.links if rank in (link.sender, link.receiver)]
        if own and all(link in slow for link in own):
            found.append(f"rank {rank} is slow on all of its links ({_range(own)}): look at its host or its GPU")
            slow = [link for link in slow if link not in own]
    found += [
        f"the link from rank {link.sender} to rank {link.receiver} carries {link.bandwidth:.2f} GB/s, "
        f"the others {_rest(report.links, report.links.index(link)):.2f} GB/s"
        for link in slow
    ]
    if report.links and report.device == "cpu":
        median = statistics.median(link.bandwidth for link in report.links)
        if median < FAR_BELOW_TCP * report.tcp:
            found.append(
                f"links carry {median:.2f} GB/s, and plain TCP {report.tcp:.2f} GB/s: "
                "is there a CPU for each rank, and GLOO_SOCKET_IFNAME a fast network?"
            )
    return found


def _median(values: Sequence[float], without: int) -> float:
    return statistics.median([value for number, value in enumerate(values) if number != without] or [0.0])


def _rest(links: Sequence[Link], without: int) -> float:
    return _median([link.bandwidth for link in links], without)


def _range(links: Sequence[Link]) -> str:
    bandwidths = [link.bandwidth for link in links]
    return f"{min(bandwidths):.2f} to {max(bandwidths):.2f} GB/s"
