"""PyTorch's profiler for a few steps of a training: traces, which TensorBoard can read, and the steps' bottleneck."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from torch import profiler

from fedplat.decoding import prepare_type
from fedplat.errors import MissingExtraError
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel import profiling

SUMMARY, PICTURE = "bottleneck.json", "timeline.png"
"""The files beside the traces, which rank 0 writes: the shares of the steps' time, and what each rank did."""
_ACTIVE = 3
_logger = logging.getLogger(__name__)


@contextmanager
def trace_steps(folder: Path | None, ranks: Ranks, num_steps: int) -> Generator[Callable[[], None]]:
    """Trace steps into `folder`, a file for each rank; yield a function to call after each step.

    Records three steps, after one skipped step and one for the profiler's warm-up. A training with fewer steps records
    the last ones, and one with a single step none. All ranks call the function after the same steps; after the last
    traced one they exchange what they did, and rank 0 logs the bottleneck and writes `SUMMARY` and `PICTURE`.
    """
    if folder is None or num_steps < 2:
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    active = min(_ACTIVE, num_steps - 1)
    schedule = profiler.schedule(wait=min(1, num_steps - active - 1), warmup=1, active=active, repeat=1)
    write = profiler.tensorboard_trace_handler(os.fspath(folder), worker_name=f"rank{ranks.rank}")
    is_written = False

    def note_trace(running: profiler.profile) -> None:
        nonlocal is_written
        write(running)
        is_written = True

    def step() -> None:
        nonlocal is_written
        running.step()
        if is_written:
            is_written = False
            report(folder, ranks)

    with profiler.profile(schedule=schedule, on_trace_ready=note_trace, record_shapes=True) as running:
        yield step


def report(folder: Path, ranks: Ranks) -> None:
    """Log the bottleneck of the steps that the ranks have just traced into `folder`, and write it there, on rank 0.

    All ranks call it.
    """
    newest = max(folder.glob(f"rank{ranks.rank}.*.pt.trace.json"), key=lambda path: path.stat().st_mtime_ns)
    own = msgspec.msgpack.encode(profiling.read_trace(newest))
    timelines = [
        msgspec.msgpack.decode(each, type=prepare_type(profiling.RankTimeline)) for each in ranks.all_gather(own)
    ]
    if not ranks.is_first:
        return
    found = profiling.make_profile(timelines)
    text = found.describe()
    _logger.info("%s; the traces are in %s", text[0].upper() + text[1:], folder)
    summary = {"bottleneck": found.bottleneck, "text": text, "slowest_rank": found.slowest_rank}
    content = summary | msgspec.to_builtins(found)
    (folder / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    try:
        profiling.save_timeline(folder / PICTURE, timelines, text)
    except MissingExtraError as exc:
        _logger.info("There is no picture of the steps: %s", exc)
