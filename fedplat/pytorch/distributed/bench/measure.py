"""The measurement of a plan: every rank calls `measure`."""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.distributed.bench import links
from fedplat.pytorch.distributed.bench.buffers import Buffers
from fedplat.pytorch.distributed.bench.library import COLLECTIVES
from fedplat.pytorch.distributed.bench.records import (
    LIBRARY,
    BenchPlan,
    BenchReport,
    BenchStep,
    Link,
    Measurement,
    bandwidths,
)

MIN_REPETITIONS, MAX_REPETITIONS = 3, 25
_BATCH_S = 0.005
"""Short operations are timed in batches of about this duration; otherwise the start times of the ranks dominate."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One implementation of a collective, and the buffers that it works on."""

    collective: str
    implementation: str
    buffers: Buffers
    run: Callable[[], object]


MakeTrials: TypeAlias = Callable[[Buffers, Sequence[str]], list[Trial]]
"""Returns the trials of one size, for collectives by their names; as many for each size, on all ranks."""


def make_library_trials(buffers: Buffers, collectives: Sequence[str]) -> list[Trial]:
    """Return a trial of Gloo or NCCL for each collective."""
    return [Trial(name, LIBRARY, buffers, functools.partial(COLLECTIVES[name], buffers)) for name in collectives]


def measure(
    ranks: Ranks, plan: BenchPlan, note: Callable[[BenchStep], None], make_trials: MakeTrials = make_library_trials
) -> BenchReport:
    """Measure everything in the plan, and return the report on every rank; `note` is called before each step."""
    load = os.getloadavg()[0]
    pairs = links.choose_pairs(ranks)
    num_trials = len(make_trials(Buffers.allocate(ranks, plan.sizes[0]), plan.collectives))
    total = 2 + len(pairs) + len(plan.sizes) * num_trials
    note(BenchStep(0, total, "the memory of all ranks"))
    copies = links.measure_copies(ranks, plan.probe)
    note(BenchStep(1, total, "TCP"))
    tcp = links.measure_tcp(ranks, plan.probe)
    measured_links: list[Link] = []
    for pair in pairs:
        note(BenchStep(2 + len(measured_links), total, f"the link from rank {pair[0]} to rank {pair[1]}"))
        measured_links.append(links.measure_link(ranks, pair, plan.probe))
    measurements: list[Measurement] = []
    for size in plan.sizes:
        for trial in make_trials(Buffers.allocate(ranks, size), plan.collectives):
            doing = f"{trial.collective} ({trial.implementation}), {4 * trial.buffers.count} bytes"
            note(BenchStep(2 + len(pairs) + len(measurements), total, doing))
            measurements.append(_measure_trial(ranks, plan, trial))
    return BenchReport(
        ranks=ranks.size,
        device=torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu",
        library="nccl" if ranks.device.type == "cuda" else "gloo",
        cores=len(os.sched_getaffinity(0)),
        load=load,
        copies=copies,
        links=measured_links,
        tcp=tcp,
        measurements=measurements,
    )


def _measure_trial(ranks: Ranks, plan: BenchPlan, trial: Trial) -> Measurement:
    trial.buffers.prepare(trial.collective)
    estimate = links.time_runs(ranks, trial.run)  # warms up
    is_correct = all(each == b"1" for each in ranks.all_gather(b"%d" % trial.buffers.is_correct(trial.collective)))
    batch = max(1, min(50, int(min(_BATCH_S, plan.seconds) / estimate)))
    repetitions = max(MIN_REPETITIONS, min(MAX_REPETITIONS, int(plan.seconds / (estimate * batch))))
    seconds = statistics.median(links.time_runs(ranks, trial.run, batch) for _ in range(repetitions))
    size = 4 * trial.buffers.count
    algbw, busbw = bandwidths(trial.collective, size, seconds, ranks.size)
    return Measurement(
        collective=trial.collective,
        implementation=trial.implementation,
        size=size,
        seconds=seconds,
        repetitions=repetitions,
        algbw=algbw,
        busbw=busbw,
        is_correct=is_correct,
    )
