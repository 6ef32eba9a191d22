"""Measure what a round costs beside the limit: CPU, syncs, transactions, bytes of files and hashes, memory.

    python benchmarks/round_costs.py [--model 4KB] [--model 100MB] [--turns 3] [--check] [--json] [--save]

Real server and client processes run over loopback with TLS and default settings, without training, in turns with the
limit: the same bytes through raw gRPC streams with TLS (`limit.py`). CPU and wall time depend on the machine and its
other work, so they stand beside the limit of the same turns. Counts do not depend on it: `--check` compares them with
bounds, and measures nothing else. CPU is measured in processes without counters, counts in others (`metered.py`).

The clients of the `cohort` share a few processes (`light_clients.py`), so only its server is measured: the reports of a
thousand clients arrive as fast as it takes them. Each round has a report and a check-in of each client.

A cost of a round is the difference between a long and a short job, so that the start and the end of a job are not in
it.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console

import limit
import metered
from deployment import ENVIRONMENT, JOB, START_S, Deployment, deploy, deploy_light, intervals
from fedplat.admin import AdminClient, submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from models import MODELS, parameters, size_bytes
from processes import FailedError, Processes, free_port
from report import Cell, JsonOption, Report, SaveOption, finish
from systems import create_certificates

POLL_S = 0.2
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
Costs = dict[str, float]
"""By name: CPU seconds of `user` and `kernel`, bytes `read` and `written` in files, page `faults`, and counts."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Rounds of a model with some clients, in a long and a short job. Its name is that in `WORKS` and `BOUNDS`."""

    name: str
    model: str
    clients: int
    rounds: int
    short: int
    is_cohort: bool = False
    """Whether the clients share processes, so that only the server is measured."""

    def __str__(self) -> str:
        return f"{self.model} x {self.clients}"

    @property
    def size(self) -> int:
        """The size of the model in bytes."""
        return size_bytes(MODELS[self.model])

    @property
    def moved_gb(self) -> float:
        """The GB that a round moves: the model to each client, and an update from each."""
        return 2 * self.clients * self.size / 1e9


@dataclasses.dataclass(frozen=True)
class Round:
    """The cost of one round: of the server and of all clients, and its wall time in seconds."""

    server: Costs
    clients: Costs
    wall_s: float
    client_peak: int = 0
    """The most memory of Python and NumPy in a client from one task to the next, in bytes, if it was counted."""


WORKS = {
    work.name: work
    for work in (
        Work("4KB", "4KB", 4, 120, 20),
        Work("cohort", "4KB", 1000, 4, 1, is_cohort=True),
        Work("1MB-alone", "1MB", 1, 28, 4),
        Work("1MB", "1MB", 10, 28, 4),
        Work("100MB-alone", "100MB", 1, 4, 1),
        Work("100MB", "100MB", 10, 4, 1),
    )
}
SMALL_BYTES = 10**5
"""Up to this size, CPU is in milliseconds for each round, above it in seconds for each GB."""
PASSES = ("hashed", "read", "written")
_LARGE = {
    "update syncs": 1.05,
    "server hashed": 1.25,
    "server read": 1.4,
    "server read back": 1.1,
    "client hashed": 2.2,
    "client peak": 0.5,
}
BOUNDS: Mapping[str, Mapping[str, float]] = {
    "4KB": {
        "update syncs": 0.1,
        "server syncs": 3.5,
        "server transactions": 3.5,
        "empty transactions": 0.1,
        "unlinks": 0.5,
        "hand-overs": 4.0,
    },
    "cohort": {
        "update syncs": 0.01,
        "server syncs": 30.0,
        "server transactions": 30.0,
        "empty transactions": 1.0,
        "hand-overs": 0.3,
    },
    "1MB-alone": {
        "update syncs": 1.05,
        "server syncs": 6.5,
        "server transactions": 2.5,
        "server hashed": 3.2,
        "server read": 3.2,
        "server read back": 1.1,
    },
    "1MB": {
        "update syncs": 1.05,
        "server syncs": 10.0,
        "server transactions": 7.0,
        "server hashed": 1.25,
        "server read": 1.4,
        "server read back": 1.1,
        "client hashed": 2.2,
        "client peak": 4.0,
    },
    "100MB-alone": _LARGE | {"server hashed": 3.2, "server read": 3.4},
    "100MB": _LARGE,
}
"""The most that a round may cost, by the names of `counts_of`. The server syncs the file of an update once, or less
often if others arrive with it, so a client that is alone shows a second sync of a report. It hashes an update once, and
a new version twice if it has BLAKE3; it reads an update back once, to fold it. A `client peak` of 0.5 leaves room for
no full-size copy of a large model or update; a client's Python alone needs a few MB, more than a model of 1 MB."""
_console = Console(stderr=True, soft_wrap=True)


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(WORKS)}; repeatable.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Measurements of CPU and wall time, in turns with the limit.")] = 3,
    check: Annotated[
        bool, typer.Option("--check", help="Only count, and exit with status 1 if a count is above its bound.")
    ] = False,
    as_json: JsonOption = False,
    save: SaveOption = False,
) -> None:
    """Measure what a round costs beside the limit.

    With --json the object has one more key: counts, the second table.
    """
    for name in model or ():
        if name not in WORKS:
            raise typer.BadParameter(f"{name!r} is unknown; expected one of {', '.join(WORKS)}", param_hint="--model")
    chosen = [WORKS[name] for name in model or WORKS]
    counts = {work: count(work) for work in chosen}
    if check:
        finish(counts_report(counts), as_json, save)
        exceeded = [line for work, found in counts.items() for line in exceeded_bounds(work, found)]
        for line in exceeded:
            _console.print(line, style="red", markup=False)
        raise typer.Exit(1 if exceeded else 0)
    measured = {work: measure(work, turns) for work in chosen}
    finish(cpu_report(measured, turns), as_json, save, parts={"counts": counts_report(counts)})


def count(work: Work) -> Costs:
    """Count what a round does, see `counts_of`."""
    with tempfile.TemporaryDirectory(prefix="fedplat-bench-") as folder:
        found = run_rounds(work, Path(folder) / "counts", counted=True)
        return counts_of(work, found)


def measure(work: Work, turns: int) -> list[tuple[Round, Round]]:
    """Measure a round of fedplat and of the limit, in turns."""
    pairs: list[tuple[Round, Round]] = []
    for turn in range(turns):
        with tempfile.TemporaryDirectory(prefix="fedplat-bench-") as folder:
            ours = run_rounds(work, Path(folder) / "fedplat")
            least = Round({}, {}, 0.0) if work.is_cohort else run_limit(work, Path(folder) / "limit")
        pairs.append((ours, least))
        _console.print(
            f"{work}, turn {turn + 1}: {ours.wall_s:.4f} s a round, limit {least.wall_s:.4f} s", markup=False
        )
    return pairs


def run_rounds(work: Work, folder: Path, *, counted: bool = False) -> Round:
    """Run a short and a long job, and return the cost of a round."""
    start = deploy_light if work.is_cohort else deploy
    with start(folder, work.clients, counted=counted) as deployment, deployment.admin() as admin:
        model = parameters(MODELS[work.model])
        short = run_job(deployment, admin, work, work.short, model)
        long = run_job(deployment, admin, work, work.rounds, model)
        peaks = [metered.read_counts(path)["peak"] for path in folder.glob("client-*.counts")]
    rounds = work.rounds - work.short
    return Round(
        {name: (value - short.server[name]) / rounds for name, value in long.server.items()},
        {name: (value - short.clients[name]) / rounds for name, value in long.clients.items()},
        long.wall_s,
        max(peaks, default=0),
    )


def run_job(deployment: Deployment, admin: AdminClient, work: Work, rounds: int, model: Parameters) -> Round:
    """Run a job to its end. Returns what all of it cost, and the median wall time of its rounds after the first."""
    before = costs_of(deployment)
    text = JOB.format(rounds=rounds, clients=work.clients)
    job = submission.submit(admin, submission.Submission(text, parse_job(text), model))
    while (status := admin.show_job(job.job_id).status) == admin_pb2.JOB_STATUS_RUNNING:
        time.sleep(POLL_S)
    if status != admin_pb2.JOB_STATUS_COMPLETED:
        raise FailedError(f"the job ended as {admin_pb2.JobStatus.Name(status)}")
    after = costs_of(deployment)
    moments = [event.unix_s for event in admin.watch_job(job.job_id) if event.entity == "version"]
    walls = intervals(moments)
    server, clients = (
        {name: late[name] - early.get(name, 0.0) for name in late} for early, late in zip(before, after, strict=True)
    )
    return Round(server, clients, statistics.median(walls[1:] or walls or [0.0]))


def costs_of(deployment: Deployment) -> tuple[Costs, Costs]:
    """Return the costs of a server and of its clients so far, with the counts of `metered.py` if there are any."""

    def costs(names: Sequence[str], processes: Sequence[psutil.Process]) -> Costs:
        total = Costs()
        for name, process in zip(names, processes, strict=True):
            path = deployment.folder / f"{name}.counts"
            found = of_process(process) | (metered.read_counts(path) if path.exists() else {})
            for key, value in found.items():
                total[key] = total.get(key, 0.0) + value
        return total

    names = [f"client-{index}" for index in range(len(deployment.clients))]
    return costs(["server"], [deployment.server]), costs(names, deployment.clients)


def of_process(process: psutil.Process) -> Costs:
    """Return the costs of a process that the system counts."""
    # After the name, which may contain spaces: the state is field 3 of proc(5), minor faults 10, CPU ticks 14 and 15.
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    found = process.io_counters()
    return {
        "user": int(fields[11]) * TICK_S,
        "kernel": int(fields[12]) * TICK_S,
        "faults": int(fields[7]),
        "read": found.read_chars,  # of files: gRPC receives by other calls, which the system does not count here
        "written": found.write_chars,
    }


def counts_of(work: Work, found: Round) -> Costs:
    """Return counts of a round by name.

    Hand-overs to threads, and syncs of files of updates, are those of the server for one client. Bytes are those of one
    client, or at the server for one client, in multiples of the model; so is `client peak`.
    """
    server, updates = found.server, work.clients * work.size
    of_client = {} if work.is_cohort else _counts_of_clients(work, found)
    return {
        "update syncs": server["update syncs"] / work.clients,
        "server syncs": server["syncs"] + server["database syncs"],
        "server transactions": server["writes"],
        "empty transactions": server["empty writes"],
        "unlinks": server["unlinks"],
        "renames": server["renames"],
        "hand-overs": server["hand-overs"] / work.clients,
        **{f"server {name}": server[name] / updates for name in (*PASSES, "read back")},
        **of_client,
    }


def _counts_of_clients(work: Work, found: Round) -> Costs:
    return {
        **{f"client {name}": found.clients[name] / (work.clients * work.size) for name in PASSES},
        "client syncs": found.clients["syncs"] / work.clients,
        "client peak": found.client_peak / work.size,
    }


def exceeded_bounds(work: Work, counts: Mapping[str, float]) -> list[str]:
    """Return a line for each count that is above its bound."""
    return [
        f"{work}: {name} is {counts[name]:.2f} in a round; expected at most {bound:g}"
        for name, bound in BOUNDS[work.name].items()
        if counts[name] > bound
    ]


def run_limit(work: Work, folder: Path) -> Round:
    """Run as many rounds as in the long job of a model's bytes without any processing, and return the cost of one."""
    folder.mkdir()
    with Processes(folder, {**os.environ, **ENVIRONMENT}) as processes:
        pki = str(create_certificates(processes, folder))
        names = ["server", *(f"client-{index}" for index in range(work.clients))]
        common = [str(free_port()), str(work.size)]
        program = [sys.executable, limit.__file__]
        serve = ["serve", *common, str(work.clients), str(work.rounds), "inf", pki]
        roles = [serve, *([["work", *common, pki]] * work.clients)]
        for process in [processes.start(name, [*program, *role]) for name, role in zip(names, roles, strict=True)]:
            process.wait(START_S)
    server, *clients = [cost_of_lines((folder / f"{name}.log").read_text()) for name in names]
    total = {name: sum(cost[name] for cost in clients) for name in ("user", "kernel")}
    return Round(server, total, server["wall"])


def cost_of_lines(text: str) -> Costs:
    """Return the cost of a round after the first, from the lines of `limit.py`."""
    lines = [[float(field) for field in line.split()] for line in text.splitlines()]
    if len(lines) < 3:
        raise FailedError(f"the limit could not be measured: {text[-600:]}")
    (_, user, kernel), (_, last_user, last_kernel) = lines[1], lines[-1]
    rounds = len(lines) - 2
    walls = intervals([line[0] for line in lines])[1:]
    return {
        "user": (last_user - user) / rounds,
        "kernel": (last_kernel - kernel) / rounds,
        "wall": statistics.median(walls),
    }


def cpu_report(measured: Mapping[Work, Sequence[tuple[Round, Round]]], turns: int) -> Report:
    """Return the table of CPU and wall time beside the limit."""
    return Report(
        name="round_costs",
        title="What a round costs, beside the same bytes through raw gRPC with TLS",
        columns=("round", "cost of", "user", "kernel", "together", "limit", "x limit", "unit"),
        rows=tuple(row for work, pairs in measured.items() for row in _rows(work, pairs)),
        notes=(f"Medians of {turns} turns; a GB is one that is moved, down or up.",),
    )


def _rows(work: Work, pairs: Sequence[tuple[Round, Round]]) -> Iterator[tuple[Cell, ...]]:
    if work.is_cohort:
        servers, scale = [ours.server for ours, _ in pairs], 1e3 / work.clients
        user, kernel = (statistics.median(cost[kind] for cost in servers) * scale for kind in ("user", "kernel"))
        yield str(work), "CPU of the server", user, kernel, user + kernel, None, None, "ms a client"
        yield (
            str(work),
            "wall time",
            None,
            None,
            statistics.median(ours.wall_s for ours, _ in pairs),
            None,
            None,
            "s a round",
        )
        return
    is_small = work.size <= SMALL_BYTES
    scale, unit = (1e3, "ms a round") if is_small else (1.0 / work.moved_gb, "s a GB")
    for part, name in (("server", "CPU of the server"), ("clients", "CPU of the clients")):
        ours, least = ([getattr(pair[side], part) for pair in pairs] for side in (0, 1))
        user, kernel = (statistics.median(cost[kind] for cost in ours) * scale for kind in ("user", "kernel"))
        bound = statistics.median(cost["user"] + cost["kernel"] for cost in least) * scale
        ratio = statistics.median(
            (cost["user"] + cost["kernel"]) / (bare["user"] + bare["kernel"])
            for cost, bare in zip(ours, least, strict=True)
        )
        yield str(work), name, user, kernel, user + kernel, bound, ratio, unit
    walls, bounds = ([pair[side].wall_s for pair in pairs] for side in (0, 1))
    ratio = statistics.median(ours / least for ours, least in zip(walls, bounds, strict=True))
    yield str(work), "wall time", None, None, statistics.median(walls), statistics.median(bounds), ratio, "s a round"


def counts_report(counts: Mapping[Work, Mapping[str, float]]) -> Report:
    """Return the table of counts, with a column for each kind of round."""
    names = dict.fromkeys(name for found in counts.values() for name in found)
    return Report(
        name="round_counts",
        title="What a round does",
        columns=("count", *map(str, counts)),
        rows=tuple((name, *(found.get(name) for found in counts.values())) for name in names),
        notes=(
            "Counts of a whole round; hand-overs to threads at the server, and update syncs, of files of updates, for "
            "one client. Bytes hashed, read and written in files, of one client, and at the server for one client, in "
            "multiples of the model; server read back: of files of updates alone; client peak: the memory of Python "
            "and NumPy, likewise.",
        ),
    )


if __name__ == "__main__":
    typer.run(main)
