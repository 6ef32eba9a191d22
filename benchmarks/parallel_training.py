"""Measure the training of one model by several ranks in every mode: memory, time, bytes sent, and pipelines' bubbles.

    python benchmarks/parallel_training.py [--steps 3] [--only NAME] [--picture PATH] [--json] [--save]
    python benchmarks/parallel_training.py --timelines PATH

Each mode has new processes, which train the same transformer on the same 16 rows, with AdamW. The bubble is that of
stages that sleep for a fixed time, four ranks of them, since ranks that share cores also wait for those. `--picture`
draws one step of these pipelines. `--timelines` only draws what two ranks do in three steps of some modes. The key
`bubbles` of the JSON object is the table of bubbles.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

import parallel_models
import report
from fedplat.parallel import Parallel
from fedplat.pytorch.parallel.profiling import COLOURS, RankTimeline, draw_rows, make_profile, read_trace
from parallel_ranks import ROWS, TRANSFORMER, RankOperation, RankResult, run
from report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODES = {
    "one process": "",
    "data": "data=2",
    "shard": "shard=2",
    "shard, reshard = false": "shard=2,reshard=false",
    "shard, offload": "shard=2,offload=cpu",
    "shard, recompute": "shard=2,recompute=blocks",
    "tensor": "tensor=2",
    "tensor, sequence": "tensor=2,sequence=true",
    "pipeline, GPipe": "pipeline=2,micro_batches=8,schedule=gpipe",
    "pipeline, 1F1B": "pipeline=2,micro_batches=8",
    "pipeline, interleaved": "pipeline=2,micro_batches=8,schedule=interleaved-1f1b",
    "pipeline, zero-bubble": "pipeline=2,micro_batches=8,schedule=zero-bubble",
    "pipeline, PipeDream": "pipeline=2,schedule=pipedream",
    "pipeline of 4, 1F1B": "pipeline=4,micro_batches=8",
    "shard × tensor": "shard=2,tensor=2",
    "pipeline × shard": "pipeline=2,shard=2,micro_batches=8",
}
COLUMNS = (
    "mode",
    "ranks",
    "state of a rank, MB",
    "peak of memory of a rank, MB",
    "s a step",
    "MB sent by a rank",
    "bubble, sleeping stages",
    "bubble, formula",
    "loss - that of one process",
)
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved-1f1b": "interleaved 1F1B", "zero-bubble": "zero-bubble"}
SLEEPING_RANKS, SLEEP_S = 4, 0.04
MICRO_BATCHES = (8, 16)
"""At least one for each stage; two of the schedules have eight stages."""
TRACED = ("shard", "tensor", "pipeline, GPipe", "pipeline, 1F1B", "pipeline, PipeDream")
_console = Console(stderr=True, soft_wrap=True)


def main(
    steps: Annotated[int, typer.Option(help="Timed steps of each mode.")] = 3,
    only: Annotated[str, typer.Option(help="Measure the modes whose name contains this.")] = "",
    picture: Annotated[Path | None, typer.Option(help="Draw a step of each schedule into this PNG file.")] = None,
    timelines: Annotated[Path | None, typer.Option(help="Only draw what ranks do in some modes.")] = None,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure every mode, then the bubbles of every schedule."""
    if timelines is not None:
        return draw_timelines({name: trace(MODES[name]) for name in TRACED}, timelines)
    modes = {name: layout for name, layout in MODES.items() if only in name}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.safetensors"
        model.write_bytes(TRANSFORMER.initial(3).to_bytes())
        found = {
            name: run(count_ranks(layout), "measure", layout=layout, model=str(model), num_steps=steps)
            for name, layout in track(modes.items(), "modes", console=_console)
        }
    bubbles = {
        (schedule, count): sleep(SLEEPING_RANKS, schedule, count)
        for schedule, count in track(list(itertools.product(SCHEDULES, MICRO_BATCHES)), "bubbles", console=_console)
    }
    own = {
        name: measure_bubble(sleep(parallel.pipeline, parallel.schedule, parallel.num_micro_batches))
        for name, parallel in ((name, Parallel.from_text(layout)) for name, layout in modes.items() if layout)
        if parallel.pipeline > 1 and parallel.schedule != "pipedream"
    }
    if picture is not None:
        draw({name: bubbles[schedule, 8] for schedule, name in SCHEDULES.items()}, picture)
    report.finish(modes_report(found, own), as_json, save, parts={"bubbles": bubbles_report(bubbles)})


def count_ranks(layout: str) -> int:
    """Return the number of ranks of a layout."""
    return Parallel.from_text(layout).num_ranks if layout else 1


def sleep(ranks: int, schedule: str, micro_batches: int, seconds: float = SLEEP_S) -> list[RankResult]:
    """Run pipelines of stages that sleep, `seconds` in a rank's forward pass and twice as long in its backward pass."""
    layout = f"pipeline={ranks},schedule={schedule},micro_batches={micro_batches}"
    return run(ranks, "measure_sleeping", layout=layout, seconds=seconds)


def trace(layout: str) -> list[RankTimeline]:
    """Return what each rank of a mode did in three steps."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.safetensors"
        model.write_bytes(TRANSFORMER.initial(3).to_bytes())
        run(count_ranks(layout), "trace", layout=layout, model=str(model), folder=folder)
        return [read_trace(path) for path in sorted(Path(folder).glob("rank*.pt.trace.json"))]


def measure_bubble(results: Sequence[RankResult]) -> float:
    """Return the mean of the steps' bubbles."""
    bubbles = measure_bubbles(results)
    return sum(bubbles) / len(bubbles)


def measure_bubbles(results: Sequence[RankResult]) -> list[float]:
    """Return for each step the idle part of a rank's time, from its first operation to its last one.

    That is the time of the rank for which it is longest.
    """
    bubbles: list[float] = []
    for ranks in zip(*(each.steps for each in results), strict=True):
        longest = max(operations[-1].end_s - operations[0].begin_s for operations in ranks)
        work = sum(each.end_s - each.begin_s for operations in ranks for each in operations) / len(ranks)
        bubbles.append(1 - work / longest)
    return bubbles


def formula(schedule: str, ranks: int, micro_batches: int) -> float:
    """Return the bubble of equal stages whose backward pass takes twice as long as the forward pass.

    (p - 1) / (m + p - 1) with one stage on each rank (arXiv 1811.06965); with v of them, (p - 1) / v (arXiv 2104.04473)
    in place of p - 1; 0 for zero-bubble, where a rank begins its next step as soon as it has ended one (arXiv
    2401.10241).
    """
    idle = {"zero-bubble": 0.0, "interleaved-1f1b": (ranks - 1) / 2}.get(schedule, ranks - 1.0)
    return idle / (micro_batches + idle)


def modes_report(found: dict[str, list[RankResult]], bubbles: dict[str, float]) -> Report:
    """Return the table of the modes."""
    expected = found["one process"][0].loss if "one process" in found else None
    rows: list[tuple[report.Cell, ...]] = []
    for name, ranks in found.items():
        parallel = Parallel.from_text(MODES[name]) if MODES[name] else Parallel()
        has_bubble = name in bubbles
        rows.append(
            (
                name,
                len(ranks),
                max(each.state for each in ranks) / 1e6,
                max(each.peak for each in ranks) / 1e6,
                max(each.step_s for each in ranks),
                max(each.sent for each in ranks) / 1e6,
                bubbles[name] if has_bubble else "",
                formula(parallel.schedule, parallel.pipeline, parallel.num_micro_batches) if has_bubble else "",
                "" if expected is None else abs(ranks[0].loss - expected),
            )
        )
    cores = len(os.sched_getaffinity(0))
    parameters = sum(each.numel() for each in parallel_models.Transformer().parameters())
    notes = (
        f"A transformer with {parameters / 1e6:.1f} M parameters, AdamW, float32, {ROWS} rows of "
        f"{parallel_models.LENGTH} tokens a step; one thread for each rank.",
        f"All ranks share {cores} cores and their memory's bandwidth, so the times are not speed-ups: 4 ranks compute "
        "as much as 2, on the same cores, and exchange more. Gloo's messages go through the loopback.",
        "State: parameters, gradients and moments, counted; on the rank with the most. Peak: the resident memory of a "
        "rank during the steps, above that before the model; with activations and buffers. Offload moves state from a "
        "GPU to the host, so on a CPU it has no effect.",
        "Sent: counted from the sizes of a step's collectives, for rings (2(n-1)/n of the bytes for an all-reduce, "
        "(n-1)/n for a reduce-scatter or an all-gather), and messages between stages. Gloo sends more: its "
        "reduce-scatter is an all-reduce for each rank.",
        "Bubble: of stages that sleep instead of computing, with as many ranks and micro-batches. PipeDream has a "
        "bubble only when it drains; each of its steps is one batch, and its weights are older.",
    )
    return Report(
        name="parallel_training", title="Training in every mode", columns=COLUMNS, rows=tuple(rows), notes=notes
    )


def bubbles_report(found: dict[tuple[str, int], list[RankResult]]) -> Report:
    """Return the table of the bubbles of sleeping stages."""
    rows = tuple(
        (SCHEDULES[schedule], count, measure_bubble(results), formula(schedule, SLEEPING_RANKS, count))
        for (schedule, count), results in found.items()
    )
    notes = (
        f"{SLEEPING_RANKS} ranks, each of which sleeps {1e3 * SLEEP_S:.0f} ms for the forward pass of a micro-batch "
        "and twice as long for its backward pass; interleaved and zero-bubble pipelines have two stages of half the "
        "time on each rank.",
        "The bubble is the idle part of the longest time of a rank from its first to its last operation of a step.",
    )
    columns = ("schedule", "micro-batches", "bubble, measured", "bubble, formula")
    return Report(name="parallel_bubbles", title="Bubbles of pipelines", columns=columns, rows=rows, notes=notes)


def draw(found: dict[str, list[RankResult]], path: Path) -> None:
    """Draw the last step of pipelines of sleeping stages, with the numbers of the micro-batches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((11, 1.6 * len(found) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Sequence[Axes] = figure.subplots(len(found), 1, sharex=True)
    for axis, (name, results) in zip(axes, found.items(), strict=True):
        ranks = [each.steps[-1] for each in results]
        _draw_schedule(axis, ranks)
        axis.set_title(f"{name}: bubble {measure_bubble(results):.0%}", fontsize="medium", loc="left")
    axes[-1].set_xlabel("seconds")
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def draw_timelines(found: dict[str, list[RankTimeline]], path: Path) -> None:
    """Draw what the ranks of some modes did, each mode with a scale of its own, and with its bottleneck."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((11, 1.2 * len(found) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Sequence[Axes] = figure.subplots(len(found), 1)
    for axis, (name, ranks) in zip(axes, found.items(), strict=True):
        draw_rows(axis, ranks)
        axis.set_title(f"{name}: {make_profile(ranks).describe()}", fontsize="small", loc="left")
    axes[-1].set_xlabel("seconds")
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


_KINDS = {
    "forward": ("forward", COLOURS["forward"], "white"),
    "backward": ("backward", COLOURS["backward"], "black"),
    "backward_input": ("backward, inputs", "#5fa8a8", "black"),
    "backward_weight": ("backward, weights", "#d3c08a", "black"),
}


def _draw_schedule(axis: Axes, ranks: Sequence[Sequence[RankOperation]]) -> None:
    origin = min(operations[0].begin_s for operations in ranks)
    for rank, operations in enumerate(ranks):
        for each in operations:
            _, colour, text = _KINDS[each.kind]
            begin, width = each.begin_s - origin, each.end_s - each.begin_s
            second = each.stage >= len(ranks)
            hatch = "...." if second else ""
            axis.barh(rank, width, 0.84, begin, color=colour, edgecolor="white", linewidth=0.6, hatch=hatch)
            if width > SLEEP_S / 8:  # the first stage has no gradient of its inputs to compute
                axis.text(
                    begin + width / 2, rank, str(each.micro_batch + 1), ha="center", va="center", fontsize=6, color=text
                )
    for label, colour, _ in _KINDS.values():
        axis.barh(0, 0, color=colour, label=label)
    axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))], fontsize="small")
    axis.set_ylim(len(ranks) - 0.5, -0.5)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    typer.run(main)
