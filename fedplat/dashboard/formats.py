"""Values as text and as safe HTML, for the templates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from markupsafe import Markup

from fedplat import texts
from fedplat.admin import descriptions
from fedplat.admin.descriptions import count_settling

NOTHING = "-"
printable = texts.printable
job_status, attempt_phase = descriptions.job_status, descriptions.attempt_phase
attempt_kind, severity = descriptions.attempt_kind, descriptions.severity
SMALLEST_SLICE = 5
"""In a private job, groups of fewer clients are shown as "<5"."""


def moment(unix_s: float) -> Markup | str:
    """Return a point in time as an element in UTC, to which the page's script adds the local time; `-` for 0."""
    if not unix_s:
        return NOTHING
    try:
        when = datetime.fromtimestamp(unix_s, UTC)
    except (ValueError, OverflowError, OSError):  # NaN, or a year beyond the calendar's range
        return NOTHING
    return Markup('<time datetime="{}">{} UTC</time>').format(
        when.strftime("%Y-%m-%dT%H:%M:%SZ"), when.strftime("%Y-%m-%d %H:%M:%S")
    )


def clock(unix_s: float) -> str:
    """Return a point in time as text in UTC, such as `2026-11-27 20:11:43 UTC`."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def virtual_moment(seconds: float) -> str:
    """Return a moment of a simulation, in virtual time since its start."""
    return f"{texts.duration(seconds)} after the start" if seconds else "at the start"


def duration(seconds: float) -> str:
    """Return a duration; `-` for 0."""
    return texts.duration(seconds) if seconds else NOTHING


def size(num_bytes: float) -> str:
    """Return a size in bytes, such as `36.1 KiB`; `-` for 0."""
    return texts.size(num_bytes) if num_bytes else NOTHING


def count(number: float) -> str:
    """Return an integer with thousands separators."""
    return f"{number:,.0f}"


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
    "size": size,
    "count": count,
    "count_settling": count_settling,
    "number": number,
    "metrics": metrics,
    "printable": printable,
    "short_id": short_id,
    "job_status": job_status,
    "attempt_phase": attempt_phase,
    "attempt_kind": attempt_kind,
    "severity": severity,
}
