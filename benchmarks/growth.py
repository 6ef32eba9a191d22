"""Measure how a round's time and the server's memory grow with the model, the cohort and the number of tensors.

    python benchmarks/growth.py [--only cohort] [--only "2 GB"] [--minutes 5] [--json] [--save]

A real server process with default settings (TLS, updates on the disk) serves clients that make real calls, but train
nothing and store no model, many in a process (`light_clients.py`). Otherwise the clients of a large model would need
more memory than the server. So the time is that of the server and the network; `whole_rounds.py` includes the SDK.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from deployment import deploy_light, measure
from models import alike, parameters
from processes import FailedError
from report import Cell, JsonOption, Report, SaveOption, finish

KB, MB, GB = 10**3, 10**6, 10**9
COLUMNS = ("grows", "model MB", "clients", "tensors", "s a round", "rounds", "server MiB", "server / model")
DISK_VERSIONS = 4
"""Models on the server's disk, besides the updates, in the few rounds of a large model."""
_console = Console(stderr=True, soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Point:
    """Rounds of one size. At least `least` of them are measured; the first is omitted if there are more."""

    series: str
    model_bytes: int
    clients: int
    tensors: int = 1
    least: int = 2

    def __str__(self) -> str:
        return f"{self.series}: {self.model_bytes / MB:g} MB, {self.clients} clients, {self.tensors} tensors"

    @property
    def disk_bytes(self) -> int:
        """The bytes on the server's disk: the updates of a round, and versions."""
        return (self.clients + DISK_VERSIONS) * self.model_bytes


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The measurements of a point."""

    point: Point
    seconds: list[float]
    server_rss: int

    @property
    def median(self) -> float:
        """The median of a round, in seconds."""
        return statistics.median(self.seconds)


POINTS = (
    *(Point("tensors", 16 * MB, 4, tensors) for tensors in (1, 10, 100, 1000)),
    *(Point("cohort", MB, clients) for clients in (10, 100, 1000)),
    *(Point("model", size, 4) for size in (MB, 10 * MB, 100 * MB, 500 * MB)),
    Point("2 GB", 2 * GB, 4, least=1),
    Point("100 clients", 100 * MB, 100, 25, least=1),
)
"""The points in the order of measurement. The goals are for the last two."""
NOT_BY_DEFAULT = ("100 clients",)
"""It writes 10 GB of updates to the disk, and takes minutes."""
SERIES = tuple(dict.fromkeys(point.series for point in POINTS))


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SERIES)}; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds at each point, at most.")] = 5,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds for the rounds of each point; at least one round is measured.")
    ] = 15.0,
    minutes: Annotated[float, typer.Option(help="Time limit; no measurement starts after it.")] = 5.0,
    as_json: JsonOption = False,
    save: SaveOption = False,
) -> None:
    """Measure how rounds grow."""
    for name in only or ():
        if name not in SERIES:
            raise typer.BadParameter(f"{name!r} is unknown; expected one of {', '.join(SERIES)}", param_hint="--only")
    chosen = only or [name for name in SERIES if name not in NOT_BY_DEFAULT]
    end = time.monotonic() + 60.0 * minutes
    found: list[Measurement] = []
    failures: list[str] = []
    for point in POINTS:
        if point.series not in chosen:
            continue
        try:
            if time.monotonic() > end:
                raise FailedError("no time was left (--minutes)")
            found.append(run(point, rounds, seconds))
            _console.print(f"{point}: {found[-1].median:.3f} s a round", markup=False)
        except FailedError as exc:
            failures.append(f"Not measured: {point}: {exc}")
            _console.print(failures[-1], style="red", markup=False)
    finish(report(found, failures), as_json, save)


def run(point: Point, rounds: int, seconds: float) -> Measurement:
    """Measure a point. Raises `FailedError`."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < 1.2 * point.disk_bytes:
        text = f"it needs {point.disk_bytes / GB:.0f} GB in {tempfile.gettempdir()}, which has {free / GB:.0f} GB"
        raise FailedError(f"{text}; set TMPDIR to a folder with more space")
    tensors = alike(point.model_bytes, point.tensors)
    with (
        tempfile.TemporaryDirectory(prefix="fedplat-bench-") as folder,
        deploy_light(Path(folder), point.clients) as deployment,
    ):
        taken = measure(deployment, point.clients, rounds + 1, parameters(tensors), seconds, point.least)
        return Measurement(point, taken[1:] or taken, deployment.server_rss)


def report(found: Sequence[Measurement], failures: Sequence[str]) -> Report:
    """Return the report: a row for each point, and notes on the growth."""
    rows = [row(each) for each in found]
    notes = [*fits(found), *failures]
    return Report(name="growth", title="Growth of rounds", columns=COLUMNS, rows=tuple(rows), notes=tuple(notes))


def row(found: Measurement) -> tuple[Cell, ...]:
    """Return the row of a point."""
    point = found.point
    relative = found.server_rss / point.model_bytes
    sizes = (point.model_bytes / MB, point.clients, point.tensors)
    return point.series, *sizes, found.median, len(found.seconds), round(found.server_rss / 2**20), relative


def fits(found: Sequence[Measurement]) -> Iterator[str]:
    """Return a sentence for each series with enough points. The 2 GB point belongs to the series of the model size."""
    models = [each for each in found if each.point.series in ("model", "2 GB")]
    sizes = [each.point.model_bytes / GB for each in models]
    yield from _fit("Model size", sizes, models, "s a GB", 1.0)
    if len(models) > 1:
        slope = linear(sizes, [each.server_rss / GB for each in models])
        yield f"Model size: the server uses {slope:.2f} bytes of memory per byte of the model."
    cohorts = [each for each in found if each.point.series == "cohort"]
    yield from _fit("Cohort", [each.point.clients for each in cohorts], cohorts, "ms a client", 1e3)
    tensors = [each for each in found if each.point.series == "tensors"]
    yield from _fit("Tensors", [each.point.tensors for each in tensors], tensors, "µs a tensor", 1e6)


def _fit(name: str, sizes: Sequence[float], found: Sequence[Measurement], unit: str, scale: float) -> Iterator[str]:
    if len(found) < 2:
        return
    times = [each.median for each in found]
    yield f"{name}: time ~ size^{exponent(sizes, times):.2f}, {scale * linear(sizes, times):.3g} {unit}."


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through the logarithms: 1 for proportional growth, 0 for none."""
    return linear([math.log(size) for size in sizes], [math.log(value) for value in values])


def linear(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of the least-squares line."""
    return float(np.polyfit(sizes, values, 1)[0])


if __name__ == "__main__":
    typer.run(main)
