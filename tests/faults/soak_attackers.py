"""Do the defaults protect honest clients while one attacker of each kind is at work?

    python tests/faults/soak_attackers.py [--clients 100] [--minutes 10] [--database sqlite|postgres] [--attacker KIND]
        [--transport grpc|http]

One real server and `--clients` honest SDK clients, ten to a process, train a least-squares model; its job file says no
more than a job file must. A calm phase is measured first. Then the attackers of `attackers.py`, each in a process of
its own, work for `--minutes`. At last the honest clients work alone again.

Exit status 0 only if no attempt was abandoned and no honest assignment was lost; the model never was further from the
true one than the weight of one client allows, and is the true one in the end; memory, open files, database and audit
log keep within the bounds of `attack_verdict.py`; the log has no failure; operators can read every list; and
`fedplat-server verify` finds nothing. How long honest clients wait, calm and attacked, is printed and not judged: it
depends on the machine, which the attackers share. `runs/soak-attackers/` holds the logs and `soak.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated, Literal

import asyncpg
import msgspec
import numpy as np
import psutil
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import attack_verdict, attackers, honest_fleet, least_squares
from faults.attack_verdict import Plan
from faults.soak import quarters, verify
from fedplat.admin import AdminClient, submission
from fedplat.errors import FedplatError
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from hostile import flood, reading
from support import processes, transports
from support.transports import Transport

PER_PROCESS = 10
SAMPLE_S = 1.0
WARM_UP_ROUNDS = 3
PATIENCE_S = 120.0
"""How long rounds are waited for that no attacker should be able to stop."""
JOB = """
name = "honest"
population = "{population}"
trainer = "{trainer}"
rounds = 1000000
[model]
initial = "unused.safetensors"
[selection]
goal = {goal}
min_fraction = {min_fraction}
"""
MISFIT_JOB = """
name = "misfits"
population = "{population}"
trainer = "{trainer}"
rounds = 1000000
[model]
initial = "unused.safetensors"
[selection]
goal = 1
over_selection = 1.0
[retry]
base_s = 0.5
max_s = 0.5
"""
PRIVATE_JOB = """
name = "private-{number}"
population = "private"
trainer = "none"
rounds = 1000
[model]
initial = "unused.safetensors"
[selection]
goal = 20
close = "deadline"
wait_for = 200
sampling = {{ policy = "poisson", rate = 0.1{number} }}
[updates]
weighting = "uniform"
clip_norm = 1.0
[privacy]
participation = "poisson"
noise_multiplier = 1.{number}
delta = 1e-5
"""


class Sample(msgspec.Struct, frozen=True):
    """The server at one moment."""

    at_s: float
    rss_mb: float
    num_files: int
    database_mb: float
    round: int
    error: float


@dataclasses.dataclass
class Phase:
    """A time of the soak, on both clocks, and what was seen in it."""

    begun_unix_s: float = dataclasses.field(default_factory=time.time)
    ended_unix_s: float = math.inf
    samples: list[Sample] = dataclasses.field(default_factory=list[Sample])
    server_cpu_s: float = 0.0

    def rounds(self) -> int:
        return self.samples[-1].round - self.samples[0].round if self.samples else 0

    def minutes(self) -> float:
        return (self.ended_unix_s - self.begun_unix_s) / 60.0


class Observer:
    """Looks at the server and at the honest clients' job."""

    def __init__(self, server: processes.Server, admin: AdminClient, folder: Path, job: str, plan: Plan) -> None:
        self._server, self._admin, self._folder, self._job, self._plan = server, admin, folder, job, plan
        self._process = psutil.Process(server.pid)
        self.failures: list[str] = []

    @contextlib.contextmanager
    def phase(self) -> Generator[Phase]:
        phase, before = Phase(), cpu_s(self._process)
        yield phase
        phase.ended_unix_s, phase.server_cpu_s = time.time(), cpu_s(self._process) - before

    def sample(self, phase: Phase) -> None:
        """Adds a sample; a call that fails is remembered: operators must get through."""
        path = self._folder / "latest.safetensors"
        try:
            shown = self._admin.show_job(self._job)
            self._admin.export_model(self._job, None, path)
        except FedplatError as exc:
            self.failures.append(str(exc)[:200])
            return
        phase.samples.append(
            Sample(
                time.time() - phase.begun_unix_s,
                self._process.memory_info().rss / 2**20,
                self._process.num_fds(),
                self.database_mb(),
                shown.round,
                least_squares.error(np.asarray(Parameters.open(path)["weight"])),
            )
        )

    def database_mb(self) -> float:
        if self._plan.database is None:
            return sum(path.stat().st_size for path in self._server.folder.glob("fedplat.sqlite*")) / 2**20
        return asyncio.run(_postgres_size(self._plan.database)) / 2**20

    def until(self, phase: Phase, done: Callable[[], bool], patience_s: float = math.inf) -> bool:
        """Samples until something is so; False if it did not become so in time."""
        ends = time.monotonic() + patience_s
        while not done():
            if time.monotonic() > ends:
                return False
            self.sample(phase)
            time.sleep(SAMPLE_S)
        self.sample(phase)
        return True


def cpu_s(process: psutil.Process) -> float:
    """Seconds of CPU that a process has taken."""
    times = process.cpu_times()
    return times.user + times.system


async def _postgres_size(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval("SELECT pg_database_size(current_database())")
    finally:
        await connection.close()


class Attackers:
    """Their processes: one for each kind, or one for all of a short run."""

    def __init__(self, folder: Path, target: attackers.Target, plan: Plan) -> None:
        (folder / "target.json").write_bytes(msgspec.json.encode(target))
        self._folder, self._plan = folder, plan
        self.cpu_s = 0.0
        few = plan.attack_s is None
        groups = [plan.kinds] if few else [(kind,) for kind in plan.kinds]
        command = [sys.executable, str(Path(__file__).with_name("attackers.py"))]
        command += ["--target", str(folder / "target.json"), "--folder", str(folder), *(["--few"] if few else [])]
        with (folder / "attackers.log").open("ab") as log:
            self._processes = [
                subprocess.Popen(
                    [*command, *(part for kind in group for part in ("--kind", kind))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
                for group in groups
            ]

    def wait_until_ready(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"an attacker did not start; see {self._folder / 'attackers.log'}")

    def begin(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()

    def are_done(self) -> bool:
        return all(process.poll() is not None for process in self._processes)

    def stop(self) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.cpu_s += cpu_s(psutil.Process(process.pid))
            process.terminate()
        for process in self._processes:
            try:
                process.wait(60.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def results(self) -> dict[str, dict[str, object]]:
        """What each did; one that left nothing has failed."""
        found: dict[str, dict[str, object]] = {}
        for kind in self._plan.kinds:
            path = self._folder / f"{kind}.json"
            found[kind] = json.loads(path.read_text()) if path.exists() else {"calls": 0, "answers": {"CRASHED": 1}}
        return found


@contextlib.contextmanager
def fleet(folder: Path, ticket: str, plan: Plan) -> Generator[list[subprocess.Popen[bytes]]]:
    """The honest clients."""
    (folder / "ticket").write_text(ticket)
    program = str(Path(__file__).with_name("honest_fleet.py"))
    commands = [
        [
            *(sys.executable, program, "--ticket-file", str(folder / "ticket"), "--folder", str(folder)),
            *("--first", str(first), "--count", str(min(PER_PROCESS, plan.clients - first))),
            *("--work-s", str(plan.work_s), "--transport", plan.transport),
        ]
        for first in range(0, plan.clients, PER_PROCESS)
    ]
    with processes.processes(commands, folder / "clients.log") as running:
        yield running


def start_jobs(admin: AdminClient, plan: Plan) -> str:
    """Starts the honest clients' job and the one for misfits, and leaves private drafts; the first one's id."""

    def made(text: str, num_weights: int, *, start: bool = True) -> str:
        model = Parameters.from_arrays({"weight": np.zeros(num_weights, np.float32)})
        return submission.submit(admin, submission.Submission(text, parse_job(text), model), start=start).job_id

    trainer = honest_fleet.TRAINER
    for number in range(1, 5):
        made(PRIVATE_JOB.format(number=number), 8, start=False)
    made(MISFIT_JOB.format(population=attackers.MISFITS, trainer=trainer), 2**20)
    text = JOB.format(
        population=honest_fleet.POPULATION, trainer=trainer, goal=plan.goal, min_fraction=plan.min_fraction
    )
    return made(text, least_squares.NUM_WEIGHTS)


def run(folder: Path, plan: Plan) -> dict[str, object]:
    """The soak; what it found, with `problems`."""
    options = () if plan.database is None else ("--database", plan.database)
    transport = Transport.of(plan.transport)
    more = (*options, *transport.options)
    with processes.server(folder / "server", "--insecure", "--log-level", "warning", *more) as server:
        with server.admin() as admin:
            result = _soak(server, admin, folder, plan, transport.address(server.address))
        log = server.log_text()
    result["verify"] = verify(folder / "server", options)
    result["log_failures"] = [
        line[:300]
        for line in log.splitlines()
        if any(sign in line for sign in ("Traceback", "a call failed", "could not be aggregated"))
    ][:5]
    result["problems"] = attack_verdict.problems_of(result, plan)
    return result


def _soak(server: processes.Server, admin: AdminClient, folder: Path, plan: Plan, address: str) -> dict[str, object]:
    job = start_jobs(admin, plan)
    seen = Observer(server, admin, folder, job, plan)
    target = attackers.Target(
        address,
        server.ticket(honest_fleet.POPULATION, len(plan.kinds)),
        server.ticket(attackers.MISFITS, len(plan.kinds)),
        admin.add_operator("a-viewer", "viewer").token,
        plan.transport,
    )
    with fleet(folder, server.ticket(honest_fleet.POPULATION, plan.clients), plan) as running:

        def committed(count: int) -> Callable[[], bool]:
            first = admin.show_job(job).round
            return lambda: admin.show_job(job).round >= first + count

        with seen.phase() as warm_up:
            seen.until(warm_up, committed(WARM_UP_ROUNDS), PATIENCE_S)
        hosts = Attackers(folder, target, plan)
        try:
            hosts.wait_until_ready()
            with seen.phase() as calm:
                ends = time.monotonic() + plan.calm_s
                seen.until(calm, lambda: time.monotonic() > ends)
            rows = sum(1 for _ in admin.iter_audit())
            hosts.begin()
            with seen.phase() as attacked:
                ends = time.monotonic() + (plan.attack_s or PATIENCE_S)
                seen.until(attacked, lambda: hosts.are_done() or time.monotonic() > ends)
        finally:
            hosts.stop()
        rows = sum(1 for _ in admin.iter_audit()) - rows
        with seen.phase() as after:
            recovered = seen.until(after, committed(attack_verdict.ROUNDS_AFTER), PATIENCE_S)
        result = outcome(admin, job)
        ended = sum(process.poll() is not None for process in running)
    return {
        **result,
        **compared(calm, attacked, folder),
        "attackers": hosts.results(),
        "cores_of_attackers": round(hosts.cpu_s / (attacked.minutes() * 60.0), 2),
        "audit_rows": rows,
        "recovered": recovered,
        "final_error": after.samples[-1].error if after.samples else math.inf,
        "operator_failures": seen.failures[:5],
        "clients_ended": ended,
        "samples": msgspec.to_builtins({"calm": calm.samples, "attacked": attacked.samples, "after": after.samples}),
    }


def outcome(admin: AdminClient, job: str) -> dict[str, object]:
    """What became of attempts, and of the honest clients in them; ends the jobs to read them whole."""
    try:
        attempts = admin.list_rounds(job, all_attempts=True)
        counts = {
            "committed": sum(one.phase == admin_pb2.ATTEMPT_PHASE_COMMITTED for one in attempts),
            "abandoned": sum(one.phase == admin_pb2.ATTEMPT_PHASE_ABANDONED for one in attempts),
            "reasons": sorted({one.reason[:200] for one in attempts if one.reason})[:5],
        }
        honest = {one.client_id for one in admin.list_clients() if one.labels.get("kind") == "honest"}
    except FedplatError as exc:
        counts, honest = {"committed": 0, "abandoned": -1, "reasons": [str(exc)[:200]]}, set[str]()
    for one in admin.list_jobs():
        admin.cancel(one.job_id)
    unreadable = reading.unreadable(admin, job)
    lost: list[str] = []
    with contextlib.suppress(FedplatError):
        lost = [
            f"{event.round}.{event.attempt} {event.to_state} {event.reason[:100]}"
            for event in admin.watch_job(job)
            if event.client_id in honest and event.to_state in ("FAILED", "REJECTED", "LATE")
        ]
    return {**counts, "honest_lost": len(lost), "first_lost": lost[:3], "unreadable": unreadable}


def latencies(folder: Path, phase: Phase) -> dict[str, list[float]]:
    """What honest clients waited for in a phase, in seconds."""
    found: dict[str, list[float]] = {}
    for path in folder.glob("latency-*.txt"):
        for line in path.read_text().splitlines():
            at, what, seconds = line.split()
            if phase.begun_unix_s <= float(at) <= phase.ended_unix_s:
                found.setdefault(what, []).append(float(seconds))
    return found


def compared(calm: Phase, attacked: Phase, folder: Path) -> dict[str, object]:
    """The figures of the two phases, side by side."""
    before, then = latencies(folder, calm), latencies(folder, attacked)
    medians = {
        what: {
            "calm_s": round(statistics.median(before[what]), 4),
            "attacked_s": round(statistics.median(then.get(what) or [math.inf]), 4),
            "count": len(then.get(what, [])),
        }
        for what in sorted(before)
    }
    grown = calm.samples[-1].database_mb - calm.samples[0].database_mb
    per_round = min(grown / max(calm.rounds(), 1), attack_verdict.HONEST_ROUND_MB)
    more = attacked.samples[-1].database_mb - calm.samples[-1].database_mb
    rss, files = quarters_of([s.rss_mb for s in attacked.samples]), [float(s.num_files) for s in attacked.samples]
    return {
        "calm_rounds": calm.rounds(),
        "calm_minutes": round(calm.minutes(), 2),
        "attacked_rounds": attacked.rounds(),
        "attacked_minutes": round(attacked.minutes(), 2),
        "cores_of_server_calm": round(calm.server_cpu_s / (calm.minutes() * 60.0), 2),
        "cores_of_server_attacked": round(attacked.server_cpu_s / (attacked.minutes() * 60.0), 2),
        "latency": medians,
        "rss_calm_mb": round(calm.samples[-1].rss_mb, 1),
        "rss_most_mb": round(max(s.rss_mb for s in attacked.samples), 1),
        "rss_second_quarter_mb": round(rss[0], 1),
        "rss_last_quarter_mb": round(rss[1], 1),
        "files_second_quarter": quarters_of(files)[0],
        "files_last_quarter": quarters_of(files)[1],
        "database_mb_by_attackers": round(more - per_round * attacked.rounds(), 2),
        "max_error": max(s.error for s in attacked.samples),
    }


def quarters_of(values: list[float]) -> tuple[float, float]:
    """Medians of the second and of the last quarter; of all, if there are too few for quarters."""
    return quarters(values) if len(values) >= 8 else (statistics.median(values), statistics.median(values))


def main(
    clients: Annotated[int, typer.Option(min=20, help="Honest SDK clients, ten to a process.")] = 100,
    minutes: Annotated[float, typer.Option(min=0.2, help="How long attackers are at work.")] = 10.0,
    database: Annotated[Literal["sqlite", "postgres"], typer.Option(help="The daemon's database.")] = "sqlite",
    attacker: Annotated[list[str] | None, typer.Option(help="One of them, repeatable; default: all.")] = None,
    transport: Annotated[transports.Name, typer.Option(help="That of clients and attackers.")] = "grpc",
    folder: Annotated[Path, typer.Option(help="Where everything is kept; emptied first.")] = Path(
        "runs/soak-attackers"
    ),
) -> None:
    """Run honest clients beside attackers, then check everything."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kinds = tuple(attacker or attackers.kinds_over(transport))
    with flood.stores(database) as found:
        attack_s = minutes * 60.0
        plan = Plan(clients, kinds, attack_s, min(max(attack_s / 5.0, 15.0), 120.0), found[database], transport)
        result = run(folder.resolve(), plan)
    (folder / "soak.json").write_text(json.dumps(result, indent=2) + "\n")
    console, problems = Console(width=150), attack_verdict.texts(result["problems"])
    for table in attack_verdict.tables(result):
        console.print(table)
    console.print({name: value for name, value in result.items() if name not in ("samples", "attackers", "latency")})
    print("SOAK OK" if not problems else "SOAK FAILED:\n- " + "\n- ".join(problems))
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    typer.run(main)
