"""Human-readable sizes, durations, times and numbers, to print and to read, and text that is safe to print."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated

import typer

from fedplat import step_profile, texts
from fedplat.admin import descriptions
from fedplat.config.loaded_plugins import PluginVersion
from fedplat.wire.v1 import admin_pb2

NOTHING = "-"
duration, size, printable = texts.duration, texts.size, texts.printable
name_of, job_status = descriptions.enum_name, descriptions.job_status
attempt_phase, attempt_kind = descriptions.attempt_phase, descriptions.attempt_kind


def moment(unix_s: float) -> str:
    """Format a time as local time, `2026-07-23 14:03:05`; `-` for 0, which means never."""
    if not unix_s:
        return NOTHING
    try:
        return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # NaN, or a year beyond the calendar's range
        return NOTHING


def clock(unix_s: float) -> str:
    """Format the time of a day as local time, `14:03:05`, with the date if it is not today."""
    text, today = moment(unix_s), moment(time.time())
    return text.removeprefix(today.partition(" ")[0] + " ")


def metrics(client: Mapping[str, float], server: Mapping[str, float]) -> str:
    """Format metrics: `loss 0.312` of clients only; `server: accuracy 0.91; clients: loss 0.312` of both.

    The profile of a warm start's steps is a sentence at the end: `the bottleneck is input: 50 % of 0.1 s for a step`.
    """
    bottleneck, client = step_profile.describe(client), step_profile.without_profile(client)
    text = _format_list(client)
    if server:
        text = f"server: {_format_list(server)}" + (f"; clients: {text}" if client else "")
    return "; ".join(part for part in (text, bottleneck) if part)


def _format_list(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in sorted(values.items()))


def labels(found: Mapping[str, str]) -> str:
    """Format labels: `memory_mb=4096 region=eu`."""
    return " ".join(f"{name}={value}" for name, value in sorted(found.items()))


def ago(unix_s: float, now_s: float) -> str:
    """Format how long ago a time was: `3 min 5 s ago`; `never` for 0."""
    return f"{duration(max(0.0, now_s - unix_s))} ago" if unix_s else "never"


def rounds(number: int, job: admin_pb2.Job) -> str:
    """Format the number of a round: `3/10`; `3` if a Flower app decides how many there are.

    `10+2/10` are two rounds without training after the last one of a decentralised job.
    """
    settling = descriptions.count_settling(number, job.num_rounds)
    text = f"{number - settling}+{settling}" if settling else str(number)
    return f"{text}/{job.num_rounds}" if job.num_rounds else text


def server_round(attempt: admin_pb2.Round) -> str:
    """Format the round of a Flower app that an exchange belongs to: ` (server-round 3)`; empty if it is not known."""
    number = attempt.client_metrics.get("server-round")
    return "" if number is None else f" (server-round {number:g})"


def progress(progress: admin_pb2.AttemptProgress) -> str:
    """Format progress: `12 at work (median 40%, slowest 10%: c-0123456789abcdef), 2 uploading`; empty if all is 0.

    That of a secure aggregation continues with its step: `8 of 10 clients have sent the shares of their secrets`.
    """
    parts: list[str] = []
    if progress.num_training:
        parts.append(f"{progress.num_training} at work ({_fractions(progress)})")
    if progress.num_uploading:
        parts.append(f"{progress.num_uploading} uploading")
    if step := descriptions.describe_step(progress):
        parts.append(step)
    return ", ".join(parts)


def _fractions(progress: admin_pb2.AttemptProgress) -> str:
    if not progress.num_known:
        return "progress not known yet"
    known = f"{progress.num_known} known: " if progress.num_known < progress.num_training else ""
    return f"{known}median {progress.median:.0%}, slowest {progress.minimum:.0%}: {progress.slowest_client_id}"


def alert(found: admin_pb2.Alert) -> str:
    """Format an alert: `critical: the certificate has expired. Renew it.`."""
    return f"{descriptions.severity(found.severity)}: {found.text} {found.remedy}".rstrip()


def plugins(found: Iterable[admin_pb2.Plugin]) -> str:
    """Return the plugins of a server or a job, with their versions and the beginning of their digests."""
    return ", ".join(
        f"{plugin.kind}.{plugin.name} ({PluginVersion(plugin.kind, plugin.name, plugin.version, plugin.digest).short})"
        for plugin in found
    )


SinceOption = Annotated[
    str,
    typer.Option(
        "--since",
        metavar="TIME",
        help="Only what is not older: 30m, 12h, 7d, 2026-11-01 or 2026-11-01T14:30 (local time).",
        show_default=False,
    ),
]


def parse_seconds(text: str, option: str) -> float:
    """Parse a duration such as 30m, 24h or 7d into seconds. Raises `typer.BadParameter`."""
    try:
        return texts.parse_period(text)
    except ValueError as exc:
        raise typer.BadParameter(f"{option} {exc}") from exc


def parse_since(text: str, now_s: float | None = None) -> float:
    """Parse the start of a period into a Unix time: a duration before now, or a local date or time; 0 if it is empty.

    Raises `typer.BadParameter`.
    """
    if not text:
        return 0.0
    if re.fullmatch(r"[0-9.]+ ?[a-z]+", text):
        return max(1.0, (time.time() if now_s is None else now_s) - parse_seconds(text, "--since"))
    try:
        return max(1.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError) as exc:
        raise typer.BadParameter(
            f"--since {text!r}: expected a duration such as 7d, or a time such as 2026-11-01 or 2026-11-01T14:30"
        ) from exc
