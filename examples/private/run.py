"""Run a private job: one server, sixty clients, a stated (epsilon, delta). `make private` runs it.

The demo uses the public interfaces, with TLS: the command `fedplat-server`, the client SDK, the operator API and
`fedplat privacy show`. Two clients miss a deadline, and one is killed while it trains. This makes the model a little
worse, and does not weaken the guarantee.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "digits"))

from demo import BIN, DemoError, Processes, ended_by_sigterm, free_port, make_empty  # noqa: E402
from digits import NUM_CLIENTS  # noqa: E402
from fedplat.admin import AdminClient, profile  # noqa: E402
from fedplat.cli import submission, watch  # noqa: E402
from fedplat.errors import FedplatError  # noqa: E402
from fedplat.wire.v1 import admin_pb2  # noqa: E402

SEPARATE = range(NUM_CLIENTS - 4, NUM_CLIENTS)
"""Clients with their own process. The first that trains is killed, and the next two miss their deadlines."""
NUM_STALLS = 3
NEEDED_ACCURACY = 0.6
"""Far above chance, which is 0.1, and below the accuracy of a run with unlucky noise."""


@dataclasses.dataclass
class Run:
    """One run of the demo: its files, its server and the events so far."""

    folder: Path
    port: int
    console: Console
    processes: Processes
    names: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    killed: str = ""
    late: int = 0

    @property
    def address(self) -> str:
        """The address of the server."""
        return f"127.0.0.1:{self.port}"

    def admin(self) -> AdminClient:
        """Connect as the operator that `fedplat-server init` created."""
        return AdminClient(profile.load(self.folder / "admin.toml"), timeout_s=30.0)

    def start_server(self) -> None:
        """Create certificates, the database and an operator, start the daemon, and write a ticket."""
        init = [str(BIN / "fedplat-server"), "init", "--data-dir", str(self.folder), "--port", str(self.port)]
        done = subprocess.run(init, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DemoError(f"the server could not be set up: {done.stderr.strip()}")
        evaluator = f"digits={HERE / 'digits.py'}:evaluate"
        command = [str(BIN / "fedplat-server"), "run", "--listen", self.address, "--data-dir", str(self.folder)]
        self.processes.start("server", [*command, "--evaluator", evaluator])
        with self.admin() as admin:
            try:
                admin.wait_until_ready(30.0)
            except FedplatError as exc:
                raise DemoError(f"the server did not start; see {self.folder / 'server.log'}") from exc
            made = admin.create_enrollment("demo", NUM_CLIENTS, 3600.0, self.address)
        (self.folder / "ticket").write_text(made.ticket)

    def start_clients(self) -> None:
        """Start the clients. Most share a process; those that may be killed or stall have their own."""
        self._start("clients", 0, SEPARATE.start)
        for index in SEPARATE:
            self._start(f"client-{index}", index, 1, "--stalls", str(NUM_STALLS))
        deadline = time.monotonic() + 120.0
        with self.admin() as admin:
            while admin.status().num_waiting < NUM_CLIENTS:
                if time.monotonic() > deadline:
                    raise DemoError(f"not all clients checked in within two minutes; see {self.folder / 'clients.log'}")
                time.sleep(0.1)
            self.names = {client.client_id: int(client.labels["index"]) for client in admin.list_clients("demo")}

    def _start(self, name: str, first: int, count: int, *options: str) -> None:
        command = [sys.executable, str(HERE / "clients.py"), "--ticket-file", str(self.folder / "ticket")]
        command += ["--first", str(first), "--count", str(count), "--folder", str(self.folder / "clients")]
        self.processes.start(name, [*command, *options])

    def follow(self, admin: AdminClient, job: admin_pb2.Job) -> admin_pb2.Job:
        """Follow the job to its end."""

        def show(event: admin_pb2.JobEvent) -> None:
            if event.entity == "attempt" and event.to_state == "COMMITTED":
                self.console.print(f"round {event.round} of {job.num_rounds} is released")
            if event.entity == "assignment":
                self._kill_or_count(event, self.names[event.client_id])

        return watch.follow(admin, job.job_id, watch.View(show, self.console.print))

    def _kill_or_count(self, event: admin_pb2.JobEvent, index: int) -> None:
        """Kill the first client that trains in its own process, and count the other late clients."""
        if event.to_state == "LATE" and event.client_id != self.killed:
            self.late += 1
            self.console.print(f"client {index} is late in round {event.round}")
        if event.to_state == "TRAINING" and index in SEPARATE and not self.killed:
            self.processes.kill(f"client-{index}")
            self.killed = event.client_id
            self.console.print(f"client {index} was killed in round {event.round}, and stays away")

    def cost(self, job_id: str) -> dict[str, Any]:
        """Return the output of `fedplat privacy show` for the job."""
        command = [str(BIN / "fedplat"), "--profile", str(self.folder / "admin.toml")]
        done = subprocess.run(
            [*command, "privacy", "show", job_id, "--json"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise DemoError(f"fedplat privacy show: {done.stderr.strip()}")
        return json.loads(done.stdout)["jobs"][0]


def run(folder: Path, port: int, console: Console) -> int:
    """Run the job and return the exit status."""
    make_empty(folder)
    began, processes = time.monotonic(), Processes(folder)
    demo = Run(folder, port or free_port(), console, processes)
    try:
        with ended_by_sigterm():
            console.print(f"starting one server and {NUM_CLIENTS} clients …")
            demo.start_server()
            demo.start_clients()
            with demo.admin() as admin:
                job = demo.follow(admin, submission.submit(admin, submission.load(HERE / "job.toml")))
                rounds = list(admin.list_rounds(job.job_id))
            cost = demo.cost(job.job_id)
    finally:
        processes.stop_all()
    status = admin_pb2.JobStatus.Name(job.status).removeprefix("JOB_STATUS_")
    accuracy = rounds[-1].server_metrics.get("accuracy", 0.0) if rounds else 0.0
    numbers: dict[str, float] = {
        "accuracy": accuracy,
        "epsilon": float(cost["released"]["epsilon"]),
        "delta": float(cost["delta"]),
        "rounds": len(rounds),
        "late": demo.late,
        "killed": int(bool(demo.killed)),
        "seconds": round(time.monotonic() - began, 1),
    }
    summary = {"status": status, **numbers, "privacy": cost}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    fine = status == "COMPLETED" and accuracy >= NEEDED_ACCURACY and demo.late >= 2 and demo.killed
    words = " ".join(f"{name}={value:.4g}" for name, value in numbers.items())
    print(f"PRIVATE {'OK' if fine else f'FAILED {status}'} {words}", flush=True)
    return 0 if fine else 1


def main(folder: Path = Path("runs/private"), port: int = 0) -> None:
    """Run the private job. It writes its results to FOLDER; PORT 0 selects a free port."""
    console = Console(highlight=False, markup=False)
    try:
        status = run(folder.resolve(), port, console)
    except KeyboardInterrupt:
        console.print("interrupted; every process was stopped")
        status = 130
    except (DemoError, FedplatError, OSError) as exc:
        console.print(f"PRIVATE FAILED {exc}")
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    typer.run(main)
