"""Measure the time and the memory of simulating the schedule of large fleets.

    python benchmarks/simulation_scale.py [--clients 10000 --clients 1000000] [--rounds 100] [--once] [--json] [--save]

Each fleet is simulated in a separate process on one core: `examples/million.toml` with other numbers of clients, 100
rounds of 1,000 reports. The simulation includes every check-in, refusal, assignment, failure and deadline, with the
server's coordinator; no model is trained. Each fleet is simulated twice, and the results must be equal, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from fedplat.config.toml import read_record, read_toml
from fedplat.job import JobSpec
from fedplat.simulation.clients import FleetOptions, build_fleet
from fedplat.simulation.run import Simulation, run
from report import Cell, JsonOption, Report, SaveOption, finish

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "million.toml"
LIMIT_S = 1800
COLUMNS = (
    "clients",
    "CPU seconds",
    "peak memory, MiB",
    "events",
    "events/s",
    "virtual hours",
    "check-ins",
    "lost or failed",
)


class Measured(msgspec.Struct, frozen=True):
    """The result of one process: the row's cells, and a digest of the whole simulation result."""

    cells: tuple[int | float, ...]
    digest: str


def simulate(num_clients: int, rounds: int) -> Measured:
    """Simulate the fleet in this process. The time includes drawing the fleet, but no imports.

    It is that of the CPU, which work of other processes changes little; one core does everything.
    """
    raw = read_toml(EXAMPLE.read_text())
    table = raw.pop("simulation")
    start = time.process_time()
    spec = read_record(raw | {"rounds": rounds}, JobSpec)
    options = read_record(table["fleet"] | {"num_clients": num_clients}, FleetOptions)
    fleet = build_fleet(options, seed=1)
    result = run(Simulation(spec=spec, fleet=fleet, seed=1, model_bytes=table["model_bytes"]))
    took_s, totals = time.process_time() - start, result.totals
    cells = (
        num_clients,
        round(took_s, 1),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        totals.events,
        round(totals.events / took_s),
        round(totals.duration_s / 3600, 2),
        totals.check_ins,
        totals.lost + totals.counts.get("FAILED", 0),
    )
    return Measured(cells, hashlib.sha256(json.dumps(result.to_dict(clients=True)).encode()).hexdigest())


def measure(num_clients: int, rounds: int) -> Measured:
    """Simulate the fleet in a separate process on one core."""
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, __file__, "--inside", str(num_clients), "--rounds", str(rounds)]
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        timeout=LIMIT_S,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),  # safe, because the child has one thread
    )
    return msgspec.json.decode(done.stdout, type=Measured)


def main(
    clients: Annotated[list[int] | None, typer.Option(help="Number of clients of a fleet; may be repeated.")] = None,
    rounds: int = 100,
    once: Annotated[bool, typer.Option("--once", help="Do not simulate each fleet twice.")] = False,
    inside: Annotated[int, typer.Option(hidden=True)] = 0,
    as_json: JsonOption = False,
    save: SaveOption = False,
) -> None:
    """Simulate fleets of 10,000, 100,000 and 1,000,000 clients."""
    if inside:
        sys.stdout.buffer.write(msgspec.json.encode(simulate(inside, rounds)))
        return
    rows: list[tuple[Cell, ...]] = []
    for num_clients in clients or [10_000, 100_000, 1_000_000]:
        runs = [measure(num_clients, rounds) for _ in range(1 if once else 2)]
        assert len({each.digest for each in runs}) == 1, f"two runs with {num_clients} clients differ"
        rows.append(min((each.cells for each in runs), key=lambda cells: cells[1]))
    twice = "" if once else " Each fleet was simulated twice, with equal results; the faster time is shown."
    note = (
        "An event is an input of the server's coordinator: a check-in, a client that leaves, an upload, a report, a "
        f"failure, a deadline. Memory is the peak of the process, including Python and NumPy.{twice}"
    )
    report = Report(
        name="simulation-scale",
        title=f"Scheduling of {rounds} rounds of 1,000 reports on one core; nothing is trained",
        columns=COLUMNS,
        rows=tuple(rows),
        notes=(note,),
    )
    finish(report, as_json, save)


if __name__ == "__main__":
    typer.run(main)
