"""PyTorch's profiler for a few steps of a training: traces, which TensorBoard can read, and the steps' bottleneck."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from torch import profiler

from fedplat.config.decoding import prepare_type
from fedplat.errors import MissingExtraError
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel import profiling

SUMMARY, PICTURE = "bottleneck.json", "timeline.png"
"""The files beside the traces, which rank 0 writes: the shares of the steps' time, and what each rank did."""
_ACTIVE = 3
_logger = logging.getLogger(__name__)


@contextmanager
def trace_steps(
    folder: Path | None, ranks: Ranks, num_steps: int
) -> Generator[Callable[[], profiling.StepProfile | None]]:
    """Trace steps into `folder`, a file for each rank; yield a function to call after each step.

    Records three steps, after one skipped step and one for the profiler's warm-up. A training with fewer steps records
    the last ones, and one with a single step none. All ranks call the function after the same steps; after the last
    traced one they exchange what they did, and rank 0 logs the bottleneck, writes `SUMMARY` and `PICTURE`, and returns
    the profile. If a rank cannot write its trace, rank 0 logs the reason, and the training continues.
    """
    if folder is None or num_steps < 2:
        yield lambda: None
        return
    active = min(_ACTIVE, num_steps - 1)
    schedule = profiler.schedule(wait=min(1, num_steps - active - 1), warmup=1, active=active, repeat=1)
    write = profiler.tensorboard_trace_handler(os.fspath(folder), worker_name=f"rank{ranks.rank}")
    is_recorded, error = False, ""

    def note_trace(running: profiler.profile) -> None:
        nonlocal is_recorded, error
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write(running)
        except (OSError, RuntimeError) as exc:
            error = str(exc)
        is_recorded = True

    def step() -> profiling.StepProfile | None:
        nonlocal is_recorded
        running.step()
        if not is_recorded:
            return None
        is_recorded = False
        return report(folder, ranks, error)

    with profiler.profile(schedule=schedule, on_trace_ready=note_trace, record_shapes=True) as running:
        yield step


class _RankReport(msgspec.Struct, frozen=True):
    """What a rank has traced, or why there is no trace."""

    timeline: profiling.RankTimeline | None = None
    error: str = ""


def report(folder: Path, ranks: Ranks, error: str = "") -> profiling.StepProfile | None:
    """Log the bottleneck of the steps that the ranks have just traced into `folder`, and write it there, on rank 0.

    All ranks call it, with an `error` if they have no trace. Then the reason is logged instead, and so it is if a file
    cannot be read or written. Returns the profile on rank 0, if there is one.
    """
    mine = msgspec.msgpack.encode(_RankReport(error=error) if error else _read_own(folder, ranks.rank))
    found = [msgspec.msgpack.decode(each, type=prepare_type(_RankReport)) for each in ranks.all_gather(mine)]
    if not ranks.is_first:
        return None
    timelines = [each.timeline for each in found if each.timeline is not None]
    if len(timelines) < len(found):
        errors = (f"rank {rank}: {each.error}" for rank, each in enumerate(found) if each.timeline is None)
        _logger.warning("The profile of the steps is incomplete, and has no bottleneck; %s", "; ".join(errors))
        return None
    profile = profiling.make_profile(timelines)
    text = profile.describe()
    _logger.info("%s; the traces are in %s", text[0].upper() + text[1:], folder)
    try:
        _write_profile(folder, profile, timelines)
    except OSError as exc:
        _logger.warning("The profile of the steps cannot be written: %s", exc)
    return profile


def _read_own(folder: Path, rank: int) -> _RankReport:
    """Read this rank's newest trace. PyTorch reports no error if the end of the file is missing."""
    try:
        newest = max(folder.glob(f"rank{rank}.*.pt.trace.json"), key=lambda path: path.stat().st_mtime_ns)
        return _RankReport(profiling.read_trace(newest))
    except (OSError, ValueError, msgspec.MsgspecError) as exc:
        return _RankReport(error=f"its trace was not written as a whole ({exc})")


def _write_profile(folder: Path, found: profiling.StepProfile, timelines: list[profiling.RankTimeline]) -> None:
    """Write the bottleneck, and draw the picture."""
    text = found.describe()
    summary = {"bottleneck": found.bottleneck, "text": text, "slowest_rank": found.slowest_rank}
    content = summary | msgspec.to_builtins(found)
    (folder / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    try:
        profiling.save_timeline(folder / PICTURE, timelines, text)
    except MissingExtraError as exc:
        _logger.info("There is no picture of the steps: %s", exc)
