"""Decisions of an owner, made of what a person has typed: for the commands and for the page."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from typing import Literal

from fedplat import texts
from fedplat_client._state.approvals import MAX_TEXT, Decision


def now() -> str:
    """Return the time of a decision, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def approve(at: str, today: datetime.date, *, max_rounds: str = "", until: str = "", max_epsilon: str = "") -> Decision:
    """Return an approval with its limits, which are those of the job where a text is empty. Raises `ValueError`."""
    if until:
        check_day(until, today)
    return Decision(
        "approved",
        at,
        max_rounds=_parse_rounds(max_rounds) if max_rounds else None,
        until=until or None,
        max_epsilon=_parse_epsilon(max_epsilon) if max_epsilon else None,
    )


def refuse(verdict: Literal["rejected", "revoked"], at: str, reason: str) -> Decision:
    """Return a rejection or a revocation. Raises `ValueError`."""
    check_reason(reason)
    return Decision(verdict, at, reason=reason)


def check_day(text: str, today: datetime.date) -> None:
    """Check the last day of an approval. Raises `ValueError`."""
    try:
        day = datetime.datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError as exc:
        raise ValueError(f"{texts.quote(text[:40])} is no day; expected one such as 2027-03-01") from exc
    if day < today:
        raise ValueError(f"{text} has passed; expected today or a later day")


def check_reason(text: str) -> None:
    """Check a reason for the operator of a job. Raises `ValueError`."""
    if len(text.encode(errors="surrogatepass")) > MAX_TEXT or not text.isprintable():
        raise ValueError(f"the reason cannot be sent: expected printable text of at most {MAX_TEXT} bytes, on one line")


def _parse_rounds(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= 1):
        raise ValueError(f"{texts.quote(text[:40])} is no number of rounds; expected one from 1, such as 40")
    return int(text)


def _parse_epsilon(text: str) -> float:
    try:
        value = float(text) if len(text) < 40 else math.nan
    except ValueError:
        value = math.nan
    if not (value > 0.0 and math.isfinite(value)):
        raise ValueError(f"{texts.quote(text[:40])} is no epsilon; expected a number above 0, such as 1.5")
    return value


def list_limits(decision: Decision) -> Iterator[str]:
    """Yield the limits of an approval in words."""
    if decision.max_rounds is not None:
        yield f"at most {decision.max_rounds} rounds"
    if decision.until is not None:
        yield f"until {decision.until}"
    if decision.max_epsilon is not None:
        yield f"epsilon at most {decision.max_epsilon:g}"


def mark(decision: Decision | None) -> str:
    """Return a text by which a page recognises that another decision was made since."""
    return f"{decision.verdict} {decision.at}" if decision is not None else ""
