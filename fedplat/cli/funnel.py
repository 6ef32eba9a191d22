"""The funnel of an attempt as a table: how many clients came to each step of a round, and how many were lost."""

from __future__ import annotations

from fedplat.admin import funnel
from fedplat.cli import formats
from fedplat.wire.v1 import admin_pb2

COLUMNS = ("STEP", "#CLIENTS", "#LOST", "")
_BAR_WIDTH = 30


def rows(attempt: admin_pb2.Round) -> list[tuple[str, ...]]:
    """Return the cells of `COLUMNS` for each step."""
    found = funnel.steps(attempt)
    largest = max((step.count or 0 for step in found), default=0)
    cells: list[tuple[str, ...]] = []
    before: int | None = None
    for at, step in enumerate(found):
        lost = (
            before - step.count if before is not None and step.count is not None and at > funnel.FIRST_OF_COHORT else 0
        )
        bar = "#" * round(_BAR_WIDTH * (step.count or 0) / largest) if largest else ""
        shown = formats.NOTHING if step.count is None else f"{step.count:,}"
        cells.append((step.name, shown, f"-{lost:,}" if lost > 0 else "", bar))
        before = step.count if step.count is not None else before
    return cells
