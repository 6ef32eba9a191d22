"""Measures a plan: every rank calls `measure`."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Iterator

import torch

from fedplat.backends.ranks import Layout, Ranks, vectors
from fedplat.backends.ranks.bench import links
from fedplat.backends.ranks.bench.area import Area
from fedplat.backends.ranks.bench.records import Link, Measurement, Plan, Progress, Report, bandwidths
from fedplat.backends.ranks.bench.ways import SHARED, SHARED_WAYS, WAYS
from fedplat.backends.ranks.shared import SharedVectors

LEAST, MOST = 3, 25
"""Repetitions that are timed."""
_IN_A_ROW_S = 0.005
"""Short operations are timed several in a row, for about so long: else what is seen is when ranks begin."""


@dataclasses.dataclass(frozen=True)
class _Trial:
    """One operation on its vectors."""

    collective: str
    way: str
    area: Area
    run: Callable[[], object]


def measure(ranks: Ranks, plan: Plan, note: Callable[[Progress], None]) -> Report:
    """All that is in the plan; every rank gets the report, and `note` is told what comes next."""
    load = os.getloadavg()[0]
    has_shared = _has_shared(ranks)
    pairs = links.pairs(ranks)
    total = 2 + len(pairs) + len(plan.sizes) * _num_ways(plan, has_shared)
    note(Progress(0, total, "the memory of all ranks"))
    copies = links.copies(ranks, plan.probe)
    note(Progress(1, total, "TCP"))
    tcp = links.tcp(ranks, plan.probe)
    found_links: list[Link] = []
    for pair in pairs:
        note(Progress(2 + len(found_links), total, f"the link from rank {pair[0]} to rank {pair[1]}"))
        found_links.append(links.link(ranks, pair, plan.probe))
    found: list[Measurement] = []
    for trial in _trials(ranks, plan, has_shared):
        doing = f"{trial.collective} ({trial.way}), {4 * trial.area.count} bytes"
        note(Progress(2 + len(pairs) + len(found), total, doing))
        found.append(_measured(ranks, plan, trial))
    return Report(
        ranks=ranks.size,
        device=torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu",
        library="nccl" if ranks.device.type == "cuda" else "gloo",
        cores=len(os.sched_getaffinity(0)),
        load=load,
        copies=copies,
        links=found_links,
        tcp=tcp,
        measurements=found,
    )


def _has_shared(ranks: Ranks) -> bool:
    with vectors(ranks, Layout.even(ranks.size, ranks.size, ranks.size)) as found:
        return isinstance(found, SharedVectors)


def _num_ways(plan: Plan, has_shared: bool) -> int:
    return sum(len(WAYS[each]) + (has_shared and each in SHARED_WAYS) for each in plan.collectives)


def _trials(ranks: Ranks, plan: Plan, has_shared: bool) -> Iterator[_Trial]:
    for size in plan.sizes:
        yield from _trials_of(ranks, plan, size // 4 // ranks.size * ranks.size, has_shared)


def _trials_of(ranks: Ranks, plan: Plan, count: int, has_shared: bool) -> Iterator[_Trial]:
    area = Area(ranks, *(torch.empty(count, dtype=torch.float32, device=ranks.device) for _ in range(3)))
    area.fill()
    layout = Layout.even(ranks.size, ranks.size, count, multiple=1)
    with vectors(ranks, layout, "shared" if has_shared else "sent") as shared:
        for collective in plan.collectives:
            for way, operation in WAYS[collective].items():
                yield _Trial(collective, way, area, lambda operation=operation: operation(area))
            if has_shared and collective in SHARED_WAYS:
                in_common = dataclasses.replace(area, take=shared.whole)
                yield _Trial(
                    collective, SHARED, in_common, lambda collective=collective: SHARED_WAYS[collective](shared)
                )


def _measured(ranks: Ranks, plan: Plan, trial: _Trial) -> Measurement:
    trial.area.prepare(trial.collective)
    estimate = links.timed(ranks, trial.run)  # warms up
    is_correct = all(each == b"1" for each in ranks.gather(b"%d" % trial.area.is_correct(trial.collective)))
    in_a_row = max(1, min(50, int(min(_IN_A_ROW_S, plan.seconds) / estimate)))
    repetitions = max(LEAST, min(MOST, int(plan.seconds / (estimate * in_a_row))))
    seconds = statistics.median(links.timed(ranks, trial.run, in_a_row) for _ in range(repetitions))
    size = 4 * trial.area.count
    algbw, busbw = bandwidths(trial.collective, size, seconds, ranks.size)
    return Measurement(
        collective=trial.collective,
        way=trial.way,
        size=size,
        seconds=seconds,
        repetitions=repetitions,
        algbw=algbw,
        busbw=busbw,
        is_correct=is_correct,
    )
