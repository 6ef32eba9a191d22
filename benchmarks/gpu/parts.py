"""The parts of `run.py`, and the program of one part: `python benchmarks/gpu/parts.py NAME cuda|cpu full|small`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `run.py` starts this file as a program

import torch

from gpu import cohort, device_tests, lora, privacy, sums
from gpu.lines import Line, Problem, Setting, encode
from processes import NotInstalledError


@dataclass(frozen=True)
class Part:
    """What yields the lines of a part, and the most seconds that it may take."""

    measure: Callable[[Setting], Iterator[Line]]
    limit_s: float


PARTS: Mapping[str, Part] = {
    cohort.NAME: Part(cohort.measure, 120.0),
    lora.NAME: Part(lora.measure, 90.0),
    privacy.NAME: Part(privacy.measure, 60.0),
    sums.NAME: Part(sums.measure, 45.0),
    device_tests.NAME: Part(device_tests.measure, 90.0),
}
"""In the order of their importance. Together they take less than seven minutes."""


def lines_of(name: str, setting: Setting) -> Iterator[Line]:
    """Run a part, and yield its lines; one line if what it needs is not installed."""
    try:
        yield from PARTS[name].measure(setting)
    except NotInstalledError as exc:
        yield Problem(part=name, text=str(exc), is_failure=False)


if __name__ == "__main__":
    for _line in lines_of(sys.argv[1], Setting(torch.device(sys.argv[2]), sys.argv[3] == "small")):
        print(encode(_line), flush=True)
