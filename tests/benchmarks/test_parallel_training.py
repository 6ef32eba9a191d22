"""The bubbles of pipelines whose stages sleep instead of computing, in real time."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import msgspec

import parallel_training
from parallel_ranks import RankResult
from support.ranks.group import Zygote

RANKS, SLEEP_S = 4, 0.1
CASES = [("gpipe", 8), ("1f1b", 4), ("1f1b", 8), ("interleaved-1f1b", 8), ("zero-bubble", 8)]


@pytest.mark.slow
def test_bubbles_of_sleeping_stages_are_those_of_the_formula() -> None:
    layouts = [f"pipeline={RANKS},schedule={schedule},micro_batches={count}" for schedule, count in CASES]
    zygote = Zygote()
    try:
        with zygote.group(RANKS) as group:
            replies = group.call("support.model_parallel.sleeping:measure", layouts=layouts, seconds=SLEEP_S)
    finally:
        zygote.close()
    found = [msgspec.convert(ranks, list[RankResult]) for ranks in zip(*replies, strict=True)]
    # Other programs on the same cores only add to a bubble.
    bubbles = {case: min(parallel_training.measure_bubbles(ranks)) for case, ranks in zip(CASES, found, strict=True)}
    print("bubbles:", {case: round(bubble, 4) for case, bubble in bubbles.items()})
    for (schedule, count), bubble in bubbles.items():
        expected = parallel_training.formula(schedule, RANKS, count)
        # With two stages on each rank there are twice as many messages, and each pass takes half the time.
        assert bubble == pytest.approx(expected, abs=0.03 if schedule in ("gpipe", "1f1b") else 0.04)
