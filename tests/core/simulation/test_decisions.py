"""A fixed seed has the same decisions as before, bit by bit: `support.simulation.kinds` describes and writes them.

Simulations have many clients and rounds; schedules have what no simulation has, such as crashes and operators.

Each process orders its sets in its own way, so a decision that depends on such an order does not pass for long.
"""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from support.simulation import kinds

KEPT: Final[dict[str, Any]] = json.loads(kinds.FILE.read_text())
SOME: Final = ("small", "schedule")
HINT: Final = (
    "If it is meant to: PYTHONPATH=tests python -m support.simulation.kinds --write, and say why in the commit."
)


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        pytest.param(size, kind, marks=[pytest.mark.slow] if size == "large" else [])
        for size, found in kinds.CASES.items()
        for kind in found
    ],
)
def test_the_coordinator_decides_as_before(size: str, kind: str) -> None:
    assert kinds.summarize(kind, size) == KEPT[size][kind], f"The coordinator decides something else. {HINT}"


def test_each_kept_digest_is_compared() -> None:
    assert {size: tuple(kept) for size, kept in KEPT.items()} == kinds.CASES


@pytest.mark.slow
def test_the_order_of_sets_decides_nothing() -> None:
    assert kinds.summarize_in_process("1", *SOME) == kinds.summarize_in_process("2", *SOME)
