"""Human-readable sizes, durations, times and numbers, and text that is safe to print."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime

from google.protobuf.descriptor import EnumDescriptor

from fedplat import texts
from fedplat.loaded_plugins import PluginVersion
from fedplat.wire.v1 import admin_pb2

NOTHING = "-"
duration = texts.duration


def size(num_bytes: float) -> str:
    """Format a size in bytes: `36.1 KiB`."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.95 or unit == "TiB":
            return f"{value:.1f} {unit}"
    raise AssertionError("the last unit has no upper end")


def moment(unix_s: float) -> str:
    """Format a time as local time, `2026-07-23 14:03:05`; `-` for 0, which means never."""
    if not unix_s:
        return NOTHING
    try:
        return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # NaN, or a year beyond the calendar's range
        return NOTHING


def metrics(client: Mapping[str, float], server: Mapping[str, float]) -> str:
    """Format metrics: `loss 0.312` of clients only; `server: accuracy 0.91; clients: loss 0.312` of both."""
    if not server:
        return _format_list(client)
    return f"server: {_format_list(server)}" + (f"; clients: {_format_list(client)}" if client else "")


def _format_list(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in sorted(values.items()))


def rounds(number: int, job: admin_pb2.Job) -> str:
    """Format the number of a round: `3/10`, or `3` if a Flower app decides how many there are."""
    return f"{number}/{job.num_rounds}" if job.num_rounds else str(number)


def progress(progress: admin_pb2.AttemptProgress) -> str:
    """Format progress: `12 at work (median 40%, slowest 10%: c-0123456789abcdef), 2 uploading`; empty if all is 0."""
    parts: list[str] = []
    if progress.num_training:
        parts.append(f"{progress.num_training} at work ({_fractions(progress)})")
    if progress.num_uploading:
        parts.append(f"{progress.num_uploading} uploading")
    return ", ".join(parts)


def _fractions(progress: admin_pb2.AttemptProgress) -> str:
    if not progress.num_known:
        return "progress not known yet"
    known = f"{progress.num_known} known: " if progress.num_known < progress.num_training else ""
    return f"{known}median {progress.median:.0%}, slowest {progress.minimum:.0%}: {progress.slowest_client_id}"


def name_of(enum: EnumDescriptor, number: int) -> str:
    """Return the name of an enum value without the enum's own name: `RUNNING` for `JOB_STATUS_RUNNING`."""
    value = enum.values_by_number.get(number)
    if value is None:  # from a newer server
        return str(number)
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
    return str(value.name).removeprefix(f"{prefix}_")


def job_status(status: int) -> str:
    """Return the name of a job status: `RUNNING`."""
    return name_of(admin_pb2.JobStatus.DESCRIPTOR, status)


def attempt_phase(phase: int) -> str:
    """Return the name of an attempt phase: `COLLECTING`."""
    return name_of(admin_pb2.AttemptPhase.DESCRIPTOR, phase)


def attempt_kind(kind: int) -> str:
    """Return the name of an attempt kind in lower case: `train`, `warm start`."""
    return name_of(admin_pb2.AttemptKind.DESCRIPTOR, kind).lower().replace("_", " ")


def printable(text: str) -> str:
    """Escape every control character of a text: labels and reasons are received from devices."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def plugins(found: Iterable[admin_pb2.Plugin]) -> str:
    """Return the plugins of a server or a job, with their versions and the beginning of their digests."""
    return ", ".join(
        f"{plugin.kind}.{plugin.name} ({PluginVersion(plugin.kind, plugin.name, plugin.version, plugin.digest).short})"
        for plugin in found
    )
