"""Compare gRPC with HTTP/1.1: transfers of models and updates, and calls that move nothing.

    python benchmarks/transports.py [--clients 2] [--model-bytes 50000000] [--repeat 5]

One real server with both ports, and clients of either transport with the same parts as in `transfer.py`: they are
measured in turns, so that what else the machine does meets both. CPU seconds include all threads; those of a row are
the medians of its turns.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import report
from deployment import serve
from processes import free_port
from transfer import GB, Side, working
from transfer_ends import NUM_CALLS

TRANSPORTS = ("grpc", "http")
NAMES = {"grpc": "gRPC", "http": "HTTP/1.1"}


def measure(tls: bool, clients: int, size: int, repeat: int) -> list[tuple[report.Cell, ...]]:
    """Return one row for each direction and transport."""
    http = f"127.0.0.1:{free_port()}"
    options = ("--http-listen", http, "--http-address", http)
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(Path(folder), insecure=not tls, options=options) as deployment,
        working(deployment, clients, size, transports=TRANSPORTS) as started,
    ):
        pid = deployment.server.pid
        parts = (started[:clients], started[clients:])
        found = [Side(name, pid, part) for name, part in zip(TRANSPORTS, parts, strict=True)]
        rows: list[tuple[report.Cell, ...]] = []
        for direction in ("down", "up", "calls"):
            for side in found:
                side.move(direction, clients)
            runs = [[side.move(direction, clients) for side in found] for _ in range(repeat)]
            rows += _rows(direction, "TLS" if tls else "plain", runs, clients, size)
        return rows


def _rows(
    direction: str, security: str, runs: Sequence[Sequence[tuple[float, float, float]]], clients: int, size: int
) -> list[tuple[report.Cell, ...]]:
    volume, unit = (clients * NUM_CALLS / 1e3, "1,000 calls") if direction == "calls" else (clients * size / GB, "GB")
    rows: list[tuple[report.Cell, ...]] = []
    grpc_s = 0.0
    for name, run in zip(TRANSPORTS, zip(*runs, strict=True), strict=True):
        wall_s, server_s, client_s = (statistics.median(values) for values in zip(*run, strict=True))
        spread = f"{min(each[1] for each in run) / volume:.2f} to {max(each[1] for each in run) / volume:.2f}"
        grpc_s = grpc_s or server_s
        rates = (volume / wall_s, server_s / volume, spread, client_s / volume, server_s / grpc_s)
        rows.append((direction, security, NAMES[name], unit, *rates))
    return rows


def main(
    clients: Annotated[int, typer.Option(min=1, help="Number of client processes of each transport.")] = 2,
    model_bytes: Annotated[int, typer.Option(min=4, help="Size of the model, float32.")] = 50_000_000,
    repeat: Annotated[int, typer.Option(min=1, help="Number of turns; the median is shown.")] = 5,
    as_json: report.JsonOption = False,
    save: report.SaveOption = False,
) -> None:
    """Measure both transports of one server in turns."""
    rows = [row for tls in (False, True) for row in measure(tls, clients, model_bytes, repeat)]
    columns = (
        *("what", "security", "by", "unit", "units/s", "server CPU s/unit", "least to most", "client CPU s/unit"),
        "server, x gRPC",
    )
    title = f"gRPC and HTTP/1.1: models of {model_bytes / 1e6:g} MB, {clients} clients of each, {repeat} turns"
    answer = report.Report(name="transports", title=title, columns=columns, rows=tuple(rows))
    report.finish(answer, as_json, save)


if __name__ == "__main__":
    typer.run(main)
