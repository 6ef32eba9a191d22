"""What the time of a step is spent on, in any layout: compute, communication, the pipeline's bubble, or input.

The source is the trace that PyTorch's profiler writes for each rank. Every moment of a rank is one of these, the first
that applies:

- *input*: the next batch is read (`INPUT`, an annotation of `TracedExamples`);
- *forward*, *backward*, *update*: an operator computes, on the GPU if there is one;
- *communication*: a collective is under way and nothing is computed, so overlapped communication costs nothing;
- *waiting*: messages between stages are under way and nothing is computed. While another rank has work, that is the
  *bubble* of the pipeline, otherwise communication;
- the code between two operators, which belongs to the operator before it.

So the shares of a rank add up to 1. The ranks' clocks are compared: on several hosts they have to be synchronised.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
from torch import profiler
from typing_extensions import override

from fedplat import step_profile
from fedplat.config.decoding import prepare_type
from fedplat.errors import MissingExtraError
from fedplat.extras import install_command
from fedplat.pytorch.training import Examples
from fedplat.pytorch.training.examples import Batch, Indices

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Activity: TypeAlias = Literal["input", "forward", "backward", "update", "communication", "waiting"]
INPUT = "fedplat::input"
"""The annotation of the time in which a rank waits for its next batch."""
COLOURS: dict[Activity, str] = {
    "forward": "#1f5f8b",
    "backward": "#9db8cc",
    "update": "#7b5ea7",
    "communication": "#d9822b",
    "waiting": "#e8e8e8",
    "input": "#a8324a",
}
_BACKWARD, _UPDATE = "autograd::engine::evaluate_function", "Optimizer.step"
_COMMUNICATES = ("gloo:", "c10d::", "_c10d_functional::")
_WORK = ("input", "forward", "backward", "update")
_PRIORITY: tuple[Activity, ...] = ("input", "backward", "forward", "update", "communication", "waiting")


class TimelineSpan(msgspec.Struct, frozen=True, array_like=True):
    """A time in which a rank did one thing, in seconds of the host's clock."""

    activity: Activity
    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """The length in seconds."""
        return self.end_s - self.begin_s


class RankTimeline(msgspec.Struct, frozen=True, array_like=True):
    """What a rank did in the traced steps, in the order of time and without gaps."""

    num_steps: int
    spans: tuple[TimelineSpan, ...]


class TimeShares(msgspec.Struct, frozen=True):
    """The shares of a step's time; they add up to 1."""

    compute: float
    communication: float
    bubble: float
    input: float


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a step, and what each rank spends it on."""

    step_s: float
    ranks: tuple[TimeShares, ...]

    @property
    def mean(self) -> TimeShares:
        """The mean over the ranks."""
        count = len(self.ranks)
        return TimeShares(*(sum(each) / count for each in zip(*map(msgspec.structs.astuple, self.ranks), strict=True)))

    @property
    def bottleneck(self) -> str:
        """The name of the largest share."""
        shares = msgspec.structs.asdict(self.mean)
        return max(shares, key=lambda name: shares[name])

    @property
    def slowest_rank(self) -> int:
        """The rank with the most work of its own, which the others wait for."""
        work = [each.compute + each.input for each in self.ranks]
        return work.index(max(work))

    def to_metrics(self) -> dict[str, float]:
        """Return the step's time, the shares and the slowest rank as metrics of a training."""
        slowest = self.slowest_rank if len(self.ranks) > 1 else None
        return step_profile.to_metrics(self.step_s, msgspec.structs.asdict(self.mean), slowest)

    def describe(self) -> str:
        """Return the bottleneck in one line."""
        return step_profile.describe(self.to_metrics())


class TracedExamples(Examples):
    """Examples whose batches are annotated in a trace; only for trainings that are traced."""

    def __init__(self, examples: Examples) -> None:
        self._examples = examples

    @override
    def __len__(self) -> int:
        return len(self._examples)

    @override
    def batches(self, order: Iterable[Indices]) -> Iterator[Batch]:
        batches = self._examples.batches(order)
        while True:
            with profiler.record_function(INPUT):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


class _Arguments(msgspec.Struct, frozen=True):
    correlation: int = -1


class _Event(msgspec.Struct, frozen=True):
    """One event of a Chrome trace; times are in microseconds after the trace's `baseTimeNanoseconds`."""

    name: str = ""
    cat: str = ""
    ph: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: _Arguments = _Arguments()

    @property
    def end(self) -> float:
        return self.ts + self.dur


class _Trace(msgspec.Struct, frozen=True):
    traceEvents: list[_Event]
    baseTimeNanoseconds: int = 0


def read_trace(path: Path) -> RankTimeline:
    """Return the timeline of a rank from its Chrome trace. Raises `ValueError` if no step was traced."""
    trace = msgspec.json.decode(path.read_bytes(), type=prepare_type(_Trace))
    events = [event for event in trace.traceEvents if event.ph == "X"]
    steps = [event for event in events if event.cat == "user_annotation" and event.name.startswith("ProfilerStep#")]
    if not steps:
        raise ValueError(f"{path} has no step; expected a trace of PyTorch's profiler with a schedule")
    begin, end = min(event.ts for event in steps), max(event.end for event in steps)
    kernels = [event for event in events if event.cat in ("kernel", "gpu_memcpy", "gpu_memset")]
    found = _classify_kernels(events, kernels) if kernels else _classify_operators(events, steps[0].tid)
    inputs = [TimelineSpan("input", event.ts, event.end) for event in events if event.name == INPUT]
    origin = trace.baseTimeNanoseconds / 1e9
    spans = tuple(
        TimelineSpan(span.activity, origin + span.begin_s / 1e6, origin + span.end_s / 1e6)
        for span in flatten([*inputs, *found], begin, end)
    )
    return RankTimeline(len(steps), spans)


def flatten(spans: Iterable[TimelineSpan], begin: float, end: float) -> list[TimelineSpan]:
    """Return what happens at each moment from `begin` to `end`, if `spans` overlap and have gaps."""
    changes = [(begin, 0, 0), (end, 0, 0)]
    for span in spans:
        first, last = max(begin, span.begin_s), min(end, span.end_s)
        if first < last:
            number = _PRIORITY.index(span.activity)
            changes += [(first, number, 1), (last, number, -1)]
    changes.sort()
    active = [0] * len(_PRIORITY)
    result: list[TimelineSpan] = []
    last_work: Activity = "forward"
    for (at, number, change), (until, _, _) in itertools.pairwise(changes):
        active[number] += change
        if at == until:
            continue
        activity = _first_of(active) or last_work
        if activity in ("forward", "backward", "update"):
            last_work = activity
        if result and result[-1].activity == activity:
            at = result.pop().begin_s
        result.append(TimelineSpan(activity, at, until))
    return result


def _first_of(active: Sequence[int]) -> Activity | None:
    for activity, count in zip(_PRIORITY, active, strict=True):
        if count:
            return activity
    return None


def make_profile(timelines: Sequence[RankTimeline]) -> StepProfile:
    """Return the shares of each rank, from the timelines of all of them."""
    longest = max(each.spans[-1].end_s - each.spans[0].begin_s for each in timelines)
    shares = [_share(own, [other for other in timelines if other is not own]) for own in timelines]
    return StepProfile(step_s=longest / timelines[0].num_steps, ranks=tuple(shares))


def draw_timeline(figure: Figure, timelines: Sequence[RankTimeline], title: str = "") -> None:
    """Draw a row for each rank, with time from left to right."""
    figure.set_size_inches(10, 1.4 + 0.45 * len(timelines))
    axis = figure.subplots()
    draw_rows(axis, timelines)
    axis.set_xlabel("seconds")
    figure.legend(loc="outside upper center", ncols=len(COLOURS), frameon=False, fontsize="small")
    if title:
        axis.set_title(title, fontsize="medium")


def draw_rows(axis: Axes, timelines: Sequence[RankTimeline]) -> None:
    """Draw a row for each rank into a part of a picture, whose legend has the activities."""
    origin = min(each.spans[0].begin_s for each in timelines)
    for activity, colour in COLOURS.items():
        for rank, timeline in enumerate(timelines):
            spans = [(each.begin_s - origin, each.duration_s) for each in timeline.spans if each.activity == activity]
            if spans:
                axis.broken_barh(spans, (rank - 0.4, 0.8), facecolors=colour, linewidth=0)
        axis.barh(0, 0, color=colour, label=activity)  # for the legend
    axis.set_yticks(range(len(timelines)), [f"rank {rank}" for rank in range(len(timelines))])
    axis.set_ylim(len(timelines) - 0.5, -0.5)
    axis.set_xlim(0, max(each.spans[-1].end_s for each in timelines) - origin)
    axis.spines[["top", "right"]].set_visible(False)


def save_timeline(path: Path, timelines: Sequence[RankTimeline], title: str = "") -> None:
    """Write the picture to a PNG file. Raises `MissingExtraError` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as exc:
        raise MissingExtraError(f"pictures need matplotlib; install it with: {install_command('plots')}") from exc
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    draw_timeline(figure, timelines, title)
    figure.savefig(path, dpi=110)


def _classify_operators(events: Sequence[_Event], thread: int | str) -> Iterator[TimelineSpan]:
    """Yield the spans of a training on a CPU, where the operators of its thread compute."""
    passes = _Passes(events)
    for event in events:
        if event.name.startswith(_COMMUNICATES):
            yield TimelineSpan(_kind_of_exchange(event.name), event.ts, event.end)
        elif event.cat == "cpu_op" and event.tid == thread and _is_operator(event.name):
            yield TimelineSpan(passes.find(event.ts), event.ts, event.end)


def _classify_kernels(events: Sequence[_Event], kernels: Sequence[_Event]) -> Iterator[TimelineSpan]:
    """Yield the spans of a training on a GPU, where operators only start kernels."""
    passes = _Passes(events)
    starts = {
        event.args.correlation: event.ts
        for event in events
        if event.cat in ("cuda_runtime", "cuda_driver") and event.args.correlation >= 0
    }
    for event in kernels:
        if event.name.startswith("nccl"):
            yield TimelineSpan(_kind_of_exchange(event.name), event.ts, event.end)
        else:
            yield TimelineSpan(passes.find(starts.get(event.args.correlation, event.ts)), event.ts, event.end)
    for event in events:
        if event.name.startswith("gloo:"):  # small values between the hosts' processes
            yield TimelineSpan(_kind_of_exchange(event.name), event.ts, event.end)


def _is_operator(name: str) -> bool:
    """Return whether an event is one operator, and not a part of the backward pass, which contains communication."""
    return "::" in name and not name.startswith("autograd::")


def _kind_of_exchange(name: str) -> Activity:
    """Return the activity of an exchange: messages have one receiver, unlike collectives."""
    lower = name.lower()
    return "waiting" if any(word in lower for word in ("send", "recv", "coalesced")) else "communication"


class _Passes:
    """The times in which a process computes backward passes and updates, or starts their kernels."""

    def __init__(self, events: Sequence[_Event]) -> None:
        self._backward = _merge((event.ts, event.end) for event in events if event.name.startswith(_BACKWARD))
        self._update = _merge((event.ts, event.end) for event in events if event.name.startswith(_UPDATE))

    def find(self, at: float) -> Activity:
        """Return the pass at a time."""
        if _contains(self._update, at):
            return "update"
        return "backward" if _contains(self._backward, at) else "forward"


def _merge(times: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return times that may overlap as separate ones, in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(times):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _contains(times: Sequence[tuple[float, float]], at: float) -> bool:
    place = bisect.bisect_right(times, at, key=lambda each: each[0]) - 1
    return place >= 0 and at < times[place][1]


def _overlap(span: TimelineSpan, times: Sequence[tuple[float, float]]) -> float:
    """Return for how long any of `times`, which are in order, overlap a span."""
    first = max(0, bisect.bisect_right(times, span.begin_s, key=lambda each: each[0]) - 1)
    total = 0.0
    for begin, end in times[first:]:
        if begin >= span.end_s:
            break
        total += max(0.0, min(end, span.end_s) - max(begin, span.begin_s))
    return total


def _share(own: RankTimeline, others: Sequence[RankTimeline]) -> TimeShares:
    """Return the shares of one rank; it waits in the pipeline's bubble while any other rank has work."""
    begin, end = own.spans[0].begin_s, own.spans[-1].end_s
    work = (span for other in others for span in other.spans if span.activity in _WORK)
    busy = _merge((span.begin_s, span.end_s) for span in work)
    bubble = sum(_overlap(span, busy) for span in own.spans if span.activity == "waiting")
    seconds = dict.fromkeys((*COLOURS,), 0.0)
    for span in own.spans:
        seconds[span.activity] += span.duration_s
    total = end - begin
    return TimeShares(
        compute=(seconds["forward"] + seconds["backward"] + seconds["update"]) / total,
        communication=(seconds["communication"] + seconds["waiting"] - bubble) / total,
        bubble=bubble / total,
        input=seconds["input"] / total,
    )
