"""Durations and points in time on the command line: `90d`, `2026-11-01`, `2026-11-01T14:30`."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Annotated

import typer

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

SinceOption = Annotated[
    str,
    typer.Option(
        "--since",
        metavar="TIME",
        help="Only what is not older: 30m, 12h, 7d, 2026-11-01 or 2026-11-01T14:30 (local time).",
        show_default=False,
    ),
]


def seconds(text: str, option: str) -> float:
    """Parse a duration such as 30m, 24h or 7d into seconds. Raises `typer.BadParameter`."""
    match = re.fullmatch(r"([0-9]{1,6})([smhdw])", text)
    if match is None or int(match[1]) == 0:
        raise typer.BadParameter(f"{option} {text!r}: expected a number and s, m, h, d or w, such as 24h or 90d")
    return float(int(match[1]) * _UNITS_S[match[2]])


def since(text: str, now_s: float | None = None) -> float:
    """Parse the start of a period into a Unix time: a duration before now, or a local date or time; 0 if it is empty.

    Raises `typer.BadParameter`.
    """
    if not text:
        return 0.0
    if re.fullmatch(r"[0-9]+[a-z]", text):
        return max(1.0, (time.time() if now_s is None else now_s) - seconds(text, "--since"))
    try:
        return max(1.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError) as exc:
        raise typer.BadParameter(
            f"--since {text!r}: expected a duration such as 7d, or a time such as 2026-11-01 or 2026-11-01T14:30"
        ) from exc
