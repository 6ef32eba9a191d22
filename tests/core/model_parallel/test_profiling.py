"""What the time of a step is spent on, from traces with times of a fake clock and from those of real ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fedplat.errors import MissingExtraError

pytest.importorskip("torch")
from fedplat.pytorch.parallel import profiling
from fedplat.pytorch.parallel.profiling import INPUT, RankTimeline, TimelineSpan, make_profile, read_trace
from fedplat.pytorch.server.profiling import trace_steps
from support.model_parallel import piped

if TYPE_CHECKING:
    from support.ranks.group import Zygote

PNG = b"\x89PNG\r\n\x1a\n"
LAYOUTS = ["shard=2", "pipeline=2,schedule=zero-bubble", "pipeline=2,schedule=pipedream"]


def timeline(*parts: tuple[profiling.Activity, float], begin_s: float = 0.0, steps: int = 1) -> RankTimeline:
    """A timeline of activities with their durations, one after the other."""
    ends = begin_s + np.cumsum([seconds for _, seconds in parts])
    begins = [begin_s, *ends[:-1]]
    spans = [TimelineSpan(each[0], *times) for each, *times in zip(parts, begins, ends, strict=True)]
    return RankTimeline(steps, tuple(spans))


def shares(*timelines: RankTimeline) -> list[tuple[float, ...]]:
    """Compute, communication, bubble and input of each rank."""
    ranks = make_profile(timelines).ranks
    return [(each.compute, each.communication, each.bubble, each.input) for each in ranks]


def test_the_input_that_a_rank_waits_for_is_the_bottleneck() -> None:
    slow = timeline(("input", 6.0), ("forward", 1.0), ("backward", 2.0), ("communication", 1.0), steps=2)
    fast = timeline(("input", 4.0), ("forward", 1.0), ("backward", 2.0), ("communication", 3.0), steps=2)
    profile = make_profile([fast, slow])
    assert profile.describe() == (
        "the bottleneck is input: 50 % of 5 s for a step (compute 30 %, communication 20 %, bubble 0 %); slowest rank 1"
    )
    assert profile.step_s == 5.0


def test_a_collective_that_waits_for_another_rank_names_that_rank() -> None:
    slow = timeline(("forward", 3.0), ("backward", 1.0))
    fast = timeline(("forward", 0.5), ("communication", 2.5), ("backward", 1.0))
    alone = make_profile([slow])
    assert (alone.bottleneck, alone.mean.compute) == ("compute", 1.0)
    assert alone.describe() == (
        "the bottleneck is compute: 100 % of 4 s for a step (communication 0 %, bubble 0 %, input 0 %)"
    )
    three = make_profile([fast, fast, slow])
    assert three.slowest_rank == 2
    assert make_profile([timeline(("forward", 1.0), ("communication", 3.0))] * 2).bottleneck == "communication"


def test_waiting_is_the_bubble_while_another_rank_works_and_communication_otherwise() -> None:
    first = timeline(("forward", 2.0), ("waiting", 5.0), ("backward", 3.0))
    last = timeline(("waiting", 4.0), ("forward", 1.0), ("backward", 1.0), ("waiting", 4.0))
    # The first rank waits from 2 to 7, and the last one works from 4 to 6; the last one waits from 0 to 4 and from 6 to
    # 10, and the first one works from 0 to 2 and from 7 to 10.
    assert shares(first, last) == [(0.5, 0.3, 0.2, 0.0), (0.2, 0.3, 0.5, 0.0)]


def test_a_pipeline_of_equal_stages_has_the_bubble_of_the_formula() -> None:
    stages, micro_batches = 4, 8
    ranks = [
        timeline(
            ("waiting", float(stage)),
            ("forward", float(micro_batches)),
            ("waiting", 3.0 * (stages - 1 - stage)),
            ("backward", 2.0 * micro_batches),
            ("waiting", 2.0 * stage),
        )
        for stage in range(stages)
    ]
    profile = make_profile(ranks)  # GPipe, whose backward passes take twice as long
    assert profile.mean.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert profile.mean.communication == 0.0


def test_what_overlaps_is_counted_once() -> None:
    spans = [
        TimelineSpan("communication", 1.0, 6.0),  # half of it is hidden by the backward pass
        TimelineSpan("backward", 2.0, 4.0),
        TimelineSpan("forward", 0.0, 1.0),
        TimelineSpan("backward", 3.0, 3.5),  # an operator within another one
        TimelineSpan("input", 7.0, 9.0),
        TimelineSpan("waiting", 8.5, 11.0),  # continues after the last step
    ]
    assert [(each.activity, each.begin_s, each.end_s) for each in profiling.flatten(spans, 0.0, 10.0)] == [
        ("forward", 0.0, 1.0),
        ("communication", 1.0, 2.0),
        ("backward", 2.0, 4.0),
        ("communication", 4.0, 6.0),
        ("backward", 6.0, 7.0),  # the code after an operator
        ("input", 7.0, 9.0),
        ("waiting", 9.0, 10.0),
    ]


def event(name: str, begin: float, end: float, cat: str = "cpu_op", **arguments: int) -> dict[str, Any]:
    """An event of a trace; its times are in microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "tid": 7, "ts": begin, "dur": end - begin, "args": arguments}


def read(tmp_path: Path, events: Sequence[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """The timeline of a trace, in microseconds after its beginning."""
    path = tmp_path / "rank0.1.pt.trace.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": 10**9, "traceEvents": [{"ph": "M"}, *events]}))
    spans = read_trace(path).spans
    return [(each.activity, round(1e6 * (each.begin_s - 1)), round(1e6 * (each.end_s - 1))) for each in spans]


def test_a_trace_of_a_cpu_is_read(tmp_path: Path) -> None:
    events = [
        event("ProfilerStep#2", 0, 100, "user_annotation"),
        event("ProfilerStep#3", 100, 200, "user_annotation"),
        event(INPUT, 0, 20, "user_annotation"),
        event("aten::index", 5, 10),
        event("aten::linear", 20, 50),
        event("autograd::engine::evaluate_function: AddmmBackward0", 50, 120),
        event("aten::mm", 50, 80),
        event("gloo:all_reduce", 70, 110, "user_annotation"),
        event("aten::mm", 110, 120),
        event("Optimizer.step#SGD.step", 120, 150, "user_annotation"),
        event("aten::add_", 120, 150),
        event("gloo:recv", 150, 200, "user_annotation"),
        event("aten::add_", 160, 170) | {"tid": 8},  # Gloo's own thread
    ]
    assert read(tmp_path, events) == [
        ("input", 0, 20),
        ("forward", 20, 50),
        ("backward", 50, 80),
        ("communication", 80, 110),
        ("backward", 110, 120),
        ("update", 120, 150),
        ("waiting", 150, 200),
    ]


def test_a_trace_of_a_gpu_is_read_from_its_kernels(tmp_path: Path) -> None:
    events = [
        event("ProfilerStep#2", 0, 100, "user_annotation"),
        event("aten::linear", 0, 5),  # only starts a kernel
        event("cudaLaunchKernel", 2, 3, "cuda_runtime", correlation=1),
        event("autograd::engine::evaluate_function: AddmmBackward0", 5, 15),
        event("cudaLaunchKernel", 10, 11, "cuda_runtime", correlation=2),
        event("gemm", 10, 40, "kernel", correlation=1),
        event("gemm", 40, 70, "kernel", correlation=2),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 60, 90, "kernel", correlation=3),
        event("ncclDevKernel_SendRecv", 90, 100, "kernel", correlation=4),
    ]
    assert read(tmp_path, events) == [
        ("forward", 0, 40),
        ("backward", 40, 70),
        ("communication", 70, 90),
        ("waiting", 90, 100),
    ]


def test_a_trace_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no step; expected a trace"):
        read(tmp_path, [event("aten::linear", 0, 1)])


def test_the_picture_has_a_row_for_each_rank(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    ranks = [timeline(("forward", 1.0 + rank), ("waiting", 1.0)) for rank in range(3)]
    profiling.draw_timeline(figure, ranks, "three ranks")
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert len(axis.collections) == 6  # two activities of each
    profiling.save_timeline(tmp_path / "timeline.png", ranks)
    assert (tmp_path / "timeline.png").read_bytes().startswith(PNG)


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'matplotlib>="):
        profiling.save_timeline(tmp_path / "timeline.png", [timeline(("forward", 1.0))])


@pytest.mark.slow
def test_the_ranks_of_each_layout_write_their_bottleneck_only_if_asked(zygote: Zygote, tmp_path: Path) -> None:
    call = "support.model_parallel.profiled:train"
    with zygote.group(2) as group:
        group.call(call, layouts=LAYOUTS, folder=str(tmp_path / "on"), profile=True)
        group.call(call, layouts=["shard=2", "pipeline=2"], folder=str(tmp_path / "off"))
    assert not (tmp_path / "off").exists()
    for layout in LAYOUTS:
        folder = tmp_path / "on" / layout
        assert sorted(path.name.split(".")[0] for path in folder.iterdir()) == [
            "bottleneck",
            "rank0",
            "rank1",
            "timeline",
        ]
        assert (folder / "timeline.png").read_bytes().startswith(PNG)
        content = json.loads((folder / "bottleneck.json").read_text())
        assert content["text"].startswith(f"the bottleneck is {content['bottleneck']}: ")
        assert [sum(each.values()) for each in content["ranks"]] == pytest.approx([1.0, 1.0])
        own = [read_trace(path) for path in sorted(folder.glob("rank*.json"))]
        assert [each.num_steps for each in own] == [3, 3]
        seen = [{span.activity for span in each.spans} for each in own]
        assert all({"forward", "backward", "update"} <= each for each in seen)
        if layout.startswith("pipeline"):
            assert all("waiting" in each for each in seen)
            assert "input" in seen[0]
        else:
            assert all({"input", "communication"} <= each for each in seen)
            assert all(
                "waiting" not in each and share["bubble"] == 0.0
                for each, share in zip(seen, content["ranks"], strict=True)
            )


@pytest.mark.slow
@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_of_one_rank_ends_the_profile_and_not_the_training(
    zygote: Zygote, tmp_path: Path, full: int
) -> None:
    with zygote.group(2) as group:
        call = "support.model_parallel.profiled:train_without_space"
        (texts, losses), (others, _) = group.call(call, folder=str(tmp_path), full=full)
    assert len(losses) == 6
    assert others == []
    assert len(texts) == 1
    assert texts[0].startswith(
        f"The profile of the steps is incomplete, and has no bottleneck; rank {full}: its trace was not written as a"
    )
    assert not (tmp_path / "bottleneck.json").exists()


def test_a_profile_without_a_folder_or_a_file_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with piped.alone() as ranks:
        with trace_steps(blocked / "traces", ranks, 3) as trace:
            for _ in range(3):
                trace()
        assert "rank 0: [Errno 20] Not a directory" in caplog.text
        (tmp_path / "bottleneck.json").mkdir()
        with trace_steps(tmp_path, ranks, 3) as trace:
            for _ in range(3):
                trace()
    assert "The profile of the steps cannot be written: [Errno 21] Is a directory" in caplog.text
