"""Values as text and as safe HTML, and charts: the data that the page's script draws, a sentence, and a table."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from markupsafe import Markup

from fedplat import texts
from fedplat.admin import descriptions
from fedplat.admin.descriptions import count_settling
from fedplat.web.rendering import NOTHING, count, moment, size

printable = texts.printable
job_status, attempt_phase = descriptions.job_status, descriptions.attempt_phase
attempt_kind, severity = descriptions.attempt_kind, descriptions.severity
SMALLEST_SLICE = 5
"""In a private job, groups of fewer clients are shown as "<5"."""


def clock(unix_s: float) -> str:
    """Return a point in time as text in UTC, such as `2026-11-27 20:11:43 UTC`."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def virtual_moment(seconds: float) -> str:
    """Return a moment of a simulation, in virtual time since its start."""
    return f"{texts.duration(seconds)} after the start" if seconds else "at the start"


def duration(seconds: float) -> str:
    """Return a duration; `-` for 0."""
    return texts.duration(seconds) if seconds else NOTHING


def number(value: float) -> str:
    """Return a number with four significant digits; `-` for one that is not finite."""
    return f"{value:.4g}" if math.isfinite(value) else NOTHING


def percent(part: float, whole: float) -> str:
    """Return a share such as `12 %`; `-` of nothing."""
    if not whole:
        return NOTHING
    share = 100.0 * part / whole
    return f"{share:.0f} %" if share >= 1.0 or not part else "<1 %"


def slice_count(number: int, is_private: bool) -> str:
    """Return the number of clients of a group; `<5` for a small group in a private job."""
    return f"<{SMALLEST_SLICE}" if is_private and 0 < number < SMALLEST_SLICE else count(number)


def metrics(values: Mapping[str, float]) -> str:
    """Return metrics as one text: `accuracy 0.91, loss 0.3`."""
    return ", ".join(f"{printable(name)} {number(value)}" for name, value in sorted(values.items())) or NOTHING


def short_id(identifier: str) -> str:
    """Return the beginning of a long id."""
    return identifier if len(identifier) <= 14 else identifier[:12] + "…"


FILTERS: dict[str, Callable[..., object]] = {
    "duration": duration,
    "count_settling": count_settling,
    "number": number,
    "metrics": metrics,
    "short_id": short_id,
    "job_status": job_status,
    "attempt_phase": attempt_phase,
    "attempt_kind": attempt_kind,
    "severity": severity,
}


MAX_POINTS = 400
"""Points of a line."""
TABLE_ROWS = 24
"""Rows of the table below a chart; the page of the chart's numbers has up to `MAX_ROWS`."""
MAX_ROWS = 200
Value = float | None
Unit = Literal["number", "bytes", "seconds", "count", "round", "time"]
_FORMATS: dict[str, Callable[[float], str]] = {
    "number": number,
    "bytes": size,
    "seconds": duration,
    "count": count,
    "round": count,
}


@dataclasses.dataclass(frozen=True)
class ChartSeries:
    """One line, or one layer of a stack; None where there is no value."""

    name: str
    values: Sequence[Value]


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart over `x`. `key` is its name in addresses; `sentence` is what it shows, for those who do not see it."""

    key: str
    title: str
    sentence: str
    x: Sequence[float]
    series: Sequence[ChartSeries]
    x_unit: Unit = "round"
    y_unit: Unit = "number"
    is_stack: bool = False

    @property
    def x_name(self) -> str:
        """The name of the horizontal axis."""
        return {"round": "Round", "time": "Time (UTC)", "seconds": "Time since the start"}[self.x_unit]

    @property
    def json(self) -> str:
        """The data for the script, at most `MAX_POINTS` points."""
        chosen = spread(len(self.x), MAX_POINTS)
        return json.dumps(
            {
                "x": [_round_value(self.x[at]) for at in chosen],
                "series": [
                    {"name": line.name, "values": [_round_value(line.values[at]) for at in chosen]}
                    for line in self.series
                ],
                "xUnit": self.x_unit,
                "yUnit": self.y_unit,
                "stack": self.is_stack,
            },
            separators=(",", ":"),
        )

    def rows(self, limit: int = TABLE_ROWS) -> list[list[str | Markup]]:
        """Return the rows of the table, evenly spaced, with the first and the last one."""
        return [
            [self._format_x(self.x[at]), *(self._format_y(line.values[at]) for line in self.series)]
            for at in spread(len(self.x), limit)
        ]

    def _format_x(self, value: float) -> str | Markup:
        return moment(value) if self.x_unit == "time" else _FORMATS[self.x_unit](value)

    def _format_y(self, value: Value) -> str:
        if value is None:
            return NOTHING
        return _FORMATS[self.y_unit](value)


def spread(length: int, limit: int) -> list[int]:
    """Return at most `limit` positions of `length`, evenly spaced, with the first and the last one."""
    if length <= limit:
        return list(range(length))
    return [at * (length - 1) // (limit - 1) for at in range(limit)]


def sparkline(values: Sequence[float], label: str) -> Markup:
    """Return a small line as SVG without axes; `label` is read to those who do not see it."""
    width, height = 120.0, 28.0
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return Markup("")
    low, high = min(finite), max(finite)
    scale = (height - 4.0) / (high - low) if high > low else 0.0
    points = " ".join(
        f"{at * width / (len(finite) - 1):.1f},{height - 2.0 - (value - low) * scale:.1f}"
        for at, value in enumerate(finite)
    )
    return Markup(
        '<svg class="spark" viewBox="0 0 {:.0f} {:.0f}" width="120" height="28" role="img" aria-label="{}">'
        '<polyline points="{}"/></svg>'
    ).format(width, height, label, points)


def _round_value(value: Value) -> Value:
    return float(f"{value:.6g}") if value is not None and abs(value) < 1e9 else value


def finite(value: float) -> Value:
    """Return a value, or None if it is not finite."""
    return value if math.isfinite(value) else None
