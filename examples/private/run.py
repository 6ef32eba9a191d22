"""Run a private job: one server, sixty clients, a stated (epsilon, delta). `make private` runs it.

The demo uses the public interfaces, with TLS: the command `fedplat-server`, the client SDK, the operator API and
`fedplat privacy show`. Two clients miss a deadline, and one is killed while it trains. This makes the model a little
worse, and does not weaken the guarantee.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import typer
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "digits"))

from demo import DemoServer, Processes, ended_by_sigterm, exit_after, free_port, make_empty  # noqa: E402
from digits import NUM_CLIENTS  # noqa: E402
from fedplat import AdminClient  # noqa: E402
from fedplat.admin import submission  # noqa: E402
from fedplat.cli import job_files, watch  # noqa: E402
from fedplat.wire.v1 import admin_pb2  # noqa: E402

SEPARATE = range(NUM_CLIENTS - 4, NUM_CLIENTS)
"""Clients with their own process. The first that trains is killed, and the next two miss their deadlines."""
NUM_STALLS = 3
NEEDED_ACCURACY = 0.6
"""Far above chance, which is 0.1, and below the accuracy of a run with unlucky noise."""


@dataclasses.dataclass
class Run(DemoServer):
    """One run of the demo: also the events so far."""

    names: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    killed: str = ""
    late: int = 0

    def start_server(self) -> None:
        """Create certificates, the database and an operator, start the daemon, and write a ticket."""
        self.initialize()
        self.start_daemon("--evaluator", f"digits={HERE / 'digits.py'}:evaluate")
        self.write_ticket(NUM_CLIENTS)

    def start_clients(self) -> None:
        """Start the clients. Most share a process; those that may be killed or stall have their own."""
        self._start("clients", 0, SEPARATE.start)
        for index in SEPARATE:
            self._start(f"client-{index}", index, 1, "--stalls", str(NUM_STALLS))
        with self.admin() as admin:
            self.names = self.wait_for_clients(admin, NUM_CLIENTS, ["clients", *(f"client-{i}" for i in SEPARATE)])

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
                job = demo.follow(admin, submission.submit(admin, job_files.load(HERE / "job.toml")))
                rounds = list(admin.list_rounds(job.job_id))
            cost = demo.show_privacy(job.job_id)
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
    exit_after("PRIVATE", lambda: run(folder.resolve(), port, console))


if __name__ == "__main__":
    typer.run(main)
