"""The measurement of a group of ranks: right results, the bandwidths of nccl-tests, and the verdict."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fedplat.pytorch.distributed.bench import records
from fedplat.pytorch.distributed.bench.records import FACTORS, BenchReport, Link, Measurement, bandwidths
from support.ranks.group import RankGroup, Zygote

HERE = "support.ranks.on_ranks"


@pytest.mark.slow
def test_the_library_is_right_and_everything_is_measured(zygote: Zygote) -> None:
    count, sizes = 3, [12, 4 * (2**20 + 3)]
    with zygote.group(count) as group:
        replies = group.call(f"{HERE}:bench", sizes=sizes)
    report = msgspec.convert(replies[0]["report"], BenchReport)
    assert [each for each in report.measurements if not each.is_correct] == []
    assert [each.implementation for each in report.measurements] == ["library"] * 2 * len(FACTORS)
    assert [each.collective for each in report.measurements] == [*FACTORS, *FACTORS]
    assert {each.size for each in report.measurements} == {size // 4 // count * count * 4 for size in sizes}
    assert len(report.copies) == count
    assert len(report.links) == count * (count - 1)
    assert (report.library, report.device, report.ranks) == ("gloo", "cpu", count)
    steps = replies[0]["steps"]
    assert [done for done, _ in steps] == list(range(steps[0][1]))


def test_bandwidths_are_those_of_nccl_tests() -> None:
    # 4 ranks, 8 GB in 2 s: doc/PERFORMANCE.md, "Summary".
    busbw = {collective: bandwidths(collective, 8_000_000_000, 2.0, 4)[1] for collective in FACTORS}
    assert busbw == {
        "broadcast": 4.0,
        "scatter": 3.0,
        "gather": 3.0,
        "all-gather": 3.0,
        "all-to-all": 3.0,
        "reduce": 4.0,
        "reduce-scatter": 3.0,
        "all-reduce": 6.0,
    }
    assert {bandwidths(collective, 8_000_000_000, 2.0, 4)[0] for collective in FACTORS} == {4.0}


def test_what_was_not_done_is_not_right(pair: RankGroup) -> None:
    # Rank 0 of a broadcast has its result before; of a gather and a reduce, only rank 0 has one.
    assert pair.call(f"{HERE}:what_is_correct_without_doing_it") == [["broadcast"], ["gather", "reduce"]]


def report(ranks: int, **changes: Any) -> BenchReport:
    links = [Link(a, b, 2.0) for a in range(ranks) for b in range(ranks) if a != b]
    whole = BenchReport(
        ranks=ranks,
        device="cpu",
        library="gloo",
        cores=4,
        load=0.5,
        copies=[10.0] * ranks,
        links=links,
        tcp=4.0,
        measurements=[],
    )
    return msgspec.structs.replace(whole, **changes)


def slowed(ranks: int, *slow: tuple[int, int]) -> list[Link]:
    return [
        Link(link.sender, link.receiver, 0.5) if (link.sender, link.receiver) in slow else link
        for link in report(ranks).links
    ]


def wrong(collective: str, implementation: str) -> Measurement:
    return Measurement(
        collective=collective,
        implementation=implementation,
        size=4,
        seconds=1.0,
        repetitions=3,
        algbw=1.0,
        busbw=1.0,
        is_correct=False,
    )


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (report(2), []),
        (report(2, copies=[10.0, 5.5]), []),
        (report(2, copies=[4.0, 10.0]), ["rank 0 copies memory at 4.00 GB/s, the others at 10.00"]),
        (report(4, links=slowed(4, (2, 1))), ["the link from rank 2 to rank 1 carries 0.50 GB/s, the others 2.00"]),
        (
            report(4, links=slowed(4, (3, 0), (3, 1), (3, 2), (0, 3), (1, 3), (2, 3))),
            ["rank 3 is slow on all of its links (0.50 to 0.50 GB/s)"],
        ),
        (report(2, tcp=20.0), ["links carry 2.00 GB/s, and plain TCP 20.00 GB/s"]),
        (report(2, tcp=20.0, device="NVIDIA H200"), []),
        (
            report(2, measurements=[wrong("reduce", "library"), wrong("all-reduce", "ring")]),
            ["wrong results of all-reduce (ring)", "wrong results of reduce (gloo)"],
        ),
    ],
)
def test_the_verdict_names_what_is_slow(measured: BenchReport, said: list[str]) -> None:
    found = records.find_problems(measured)
    assert len(found) == len(said)
    assert all(sentence.startswith(start) for sentence, start in zip(found, said, strict=True))
