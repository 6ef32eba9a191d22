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


TOLERANCES = {"gpipe": 0.03, "1f1b": 0.03}
"""With two stages on each rank there are twice as many messages, and each pass takes half the time: 0.04."""
MAX_TRIES = 20


@pytest.mark.slow
def test_bubbles_of_sleeping_stages_are_those_of_the_formula() -> None:
    layouts = [f"pipeline={RANKS},schedule={schedule},micro_batches={count}" for schedule, count in CASES]
    zygote = Zygote()
    least = dict.fromkeys(CASES, 1.0)
    try:
        with zygote.group(RANKS) as group:
            # Other programs on the same cores only add to a bubble: what is too long is measured again.
            for _ in range(MAX_TRIES):
                replies = group.call("support.model_parallel.sleeping:measure", layouts=layouts, seconds=SLEEP_S)
                for case, ranks in zip(CASES, zip(*replies, strict=True), strict=True):
                    found = parallel_training.measure_bubbles(msgspec.convert(ranks, list[RankResult]))
                    least[case] = min(least[case], *found)
                if all(least[case] <= expected(*case) + tolerance(case[0]) for case in CASES):
                    break
    finally:
        zygote.close()
    print("bubbles:", {case: round(bubble, 4) for case, bubble in least.items()})
    for case, bubble in least.items():
        assert bubble == pytest.approx(expected(*case), abs=tolerance(case[0])), case


def expected(schedule: str, count: int) -> float:
    return parallel_training.formula(schedule, RANKS, count)


def tolerance(schedule: str) -> float:
    return TOLERANCES.get(schedule, 0.04)
