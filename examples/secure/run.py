"""Run a job with secure aggregation: one server, forty clients, noise that the clients add. `make secure` runs it.

The demo uses the public interfaces, with TLS. Every client is a process. Three are killed in different steps of the
protocol, and so is the server, which is started again. To kill a client in a certain step, the demo lets the others
wait before the end of their training, or stops another client (SIGSTOP), without which the step cannot end. The demo
ends with what the server has stored of the clients' updates.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "digits"))

import recording  # noqa: E402

import shares  # noqa: E402
from demo import DemoServer, Processes, ended_by_sigterm, exit_after, free_port, make_empty  # noqa: E402
from fedplat import AdminClient, Parameters, parse_job  # noqa: E402
from fedplat.admin import submission  # noqa: E402
from fedplat.cli import job_files, watch  # noqa: E402
from fedplat.job import calibrate  # noqa: E402
from fedplat.job.secure import build_setup  # noqa: E402
from fedplat.rounds import AssignmentId, AttemptKey  # noqa: E402
from fedplat.wire.v1 import admin_pb2  # noqa: E402

SPARE = 4
"""Clients beyond the goal of a round: as many as are killed, and one."""
MAX_SINGLE = 0.4
"""Bound on the correlation of a stored update with the client's own; chance gives 0.04 on average, and 0.15 at most."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """What is killed in a round: a client, or the server, when a client reaches `state`.

    Before that, the first client that reaches each of `stops` is stopped, so that the step of `state` cannot end; the
    one that was stopped before then continues.
    """

    what: str
    stops: tuple[str, ...]
    state: str
    when: str


KILLS = {
    2: Kill("client", (), "ADVERTISED", "after it sent its keys"),
    3: Kill("client", ("ADVERTISED",), "SHARED", "after it sent its shares, before its update"),
    4: Kill("client", ("ADVERTISED", "SHARED"), "REPORTED", "after its update, before the masks were removed"),
    5: Kill("server", ("ADVERTISED", "SHARED"), "REPORTED", "while it collected updates"),
}
"""By the round."""


@dataclasses.dataclass
class Run(DemoServer):
    """One run of the demo: also its clients and the events so far."""

    num_clients: int
    names: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    stopped: list[str] = dataclasses.field(default_factory=list[str])
    killed: dict[int, str] = dataclasses.field(default_factory=dict[int, str])

    @property
    def turns(self) -> Path:
        """The folder in which clients wait."""
        return self.folder / "turns"

    def start_server(self) -> None:
        """Start the daemon, also after a crash."""
        self.start_daemon("--evaluator", f"digits={HERE / 'shares.py'}:evaluate")

    def start_clients(self) -> None:
        """Start a process for each client, with its share of the digits, and wait until all have checked in."""
        self.write_ticket(self.num_clients)
        self.turns.mkdir()
        for index in range(self.num_clients):
            self._start_client(index)
        with self.admin() as admin:
            processes = [f"client-{index}" for index in range(self.num_clients)]
            self.names = self.wait_for_clients(admin, self.num_clients, processes)

    def folder_of(self, client_id: str) -> Path:
        """Return the folder of a client."""
        return self.folder / "clients" / str(self.names[client_id])

    def _start_client(self, index: int) -> None:
        folder = self.folder / "clients" / str(index)
        folder.mkdir(parents=True)
        images, labels = shares.client_data(index, self.num_clients)
        np.savez(folder / "data.npz", images=images, labels=labels)
        command = [sys.executable, str(HERE / "client.py"), "--ticket-file", str(self.folder / "ticket")]
        command += ["--folder", str(folder), "--turns", str(self.turns), "--index", str(index)]
        self.processes.start(f"client-{index}", command)

    def follow(self, admin: AdminClient, job: admin_pb2.Job) -> admin_pb2.Job:
        """Follow the job to its end, and kill what `KILLS` names."""
        for number in set(range(1, job.num_rounds + 1)) - KILLS.keys():
            self._let_go(number)

        def show(event: admin_pb2.JobEvent) -> None:
            if event.entity == "attempt" and event.to_state == "COMMITTED":
                self.console.print(f"round {event.round} of {job.num_rounds} is released")
            if event.entity == "attempt" and event.to_state == "ABANDONED":
                self.console.print(f"attempt {event.attempt} of round {event.round} is abandoned: {event.reason}")
                self._let_go(event.round)
            if event.entity == "assignment" and event.round in KILLS and event.round not in self.killed:
                self._stop_or_kill(event, KILLS[event.round])

        return watch.follow(admin, job.job_id, watch.View(show, self.console.print))

    def _stop_or_kill(self, event: admin_pb2.JobEvent, kill: Kill) -> None:
        client, number = event.client_id, len(self.stopped)
        if client in self.stopped:
            return
        if number < len(kill.stops) and event.to_state == kill.stops[number]:
            self.processes.send(self._process_of(client), signal.SIGSTOP)
            self._let_go(event.round)
            self.stopped.append(client)
        elif number == len(kill.stops) and event.to_state == kill.state:
            if kill.what == "server":
                self.processes.kill("server")
                self.start_server()
            else:
                self.processes.kill(self._process_of(client))
            self.killed[event.round] = kill.what
            what = "the server" if kill.what == "server" else f"client {self.names[client]}"
            self.console.print(f"{what} was killed in round {event.round}, {kill.when}")
            self._let_go(event.round)
            self.stopped.clear()

    def _let_go(self, number: int) -> None:
        """Let the clients that wait in a round continue, and the one that was stopped last."""
        (self.turns / f"go-{number}").touch()
        for client in self.stopped[-1:]:
            self.processes.send(self._process_of(client), signal.SIGCONT)

    def _process_of(self, client_id: str) -> str:
        return f"client-{self.names[client_id]}"


def read_single(demo: Run, admin: AdminClient, job: admin_pb2.Job, wanted: submission.Submission) -> dict[str, float]:
    """Compare each stored update, and each released step, with the updates that the clients computed."""
    digests = {each.model.version: each.model.digest for each in admin.list_versions(job.job_id)}
    single, released = list[float](), list[float]()
    kept = recording.Recording(demo.folder)
    for attempt in admin.list_rounds(job.job_id):
        key = AttemptKey(job.job_id, attempt.round, attempt.attempt)
        assignments = list(admin.iter_assignments(job=job.job_id, round_=attempt.round, attempt=attempt.attempt))
        merged = [AssignmentId(key, each.client_id) for each in assignments if each.state == "MERGED"]
        updates = {each: np.load(demo.folder_of(each.client_id) / f"update-{attempt.round}.npy") for each in merged}
        setup = build_setup(wanted.spec, *key, digests[attempt.round - 1], wanted.parameters.schema.num_floating)
        for each, file in kept.updates(updates).items():
            single.append(recording.correlate_single(setup, file, updates[each]))
        after, before = (export(demo, admin, job, number) for number in (attempt.round, attempt.round - 1))
        released.append(recording.correlate(after - before, sum(updates.values(), start=np.zeros_like(after))))
    return {
        "masked_updates": len(single),
        "correlation_of_one": float(np.abs(single).max(initial=0.0)),
        "correlation_of_the_sum": float(np.median(released)) if released else 0.0,
    }


def export(demo: Run, admin: AdminClient, job: admin_pb2.Job, version: int) -> recording.Vector:
    """Return the entries of a version."""
    path = demo.folder / f"version-{version}.safetensors"
    if not path.exists():
        admin.export_model(job.job_id, version, path)
    return Parameters.open(path).to_vector()


def load(num_clients: int, rounds: int) -> submission.Submission:
    """Load the job, for other numbers of clients and rounds than those of its file."""
    loaded = job_files.load(HERE / "job.toml")
    text = loaded.text.replace(f"\ngoal = {loaded.spec.selection.goal} ", f"\ngoal = {num_clients - SPARE} ")
    text = text.replace(f"\nrounds = {loaded.spec.rounds}\n", f"\nrounds = {rounds or loaded.spec.rounds}\n")
    return dataclasses.replace(loaded, text=text, spec=calibrate(parse_job(text)))


def run(demo: Run, wanted: submission.Submission, needed_accuracy: float) -> int:
    """Run the job and return the exit status."""
    make_empty(demo.folder)
    began = time.monotonic()
    kept = recording.Recording(demo.folder)
    try:
        with ended_by_sigterm():
            demo.console.print(f"starting one server and {demo.num_clients} clients …")
            demo.initialize()
            demo.start_server()
            kept.add_trigger()
            demo.start_clients()
            with demo.admin() as admin:
                with kept.running():
                    job = demo.follow(admin, submission.submit(admin, wanted))
                rounds = list(admin.list_rounds(job.job_id))
                seen: dict[str, Any] = recording.count(kept) | read_single(demo, admin, job, wanted)
            cost = demo.show_privacy(job.job_id)
    finally:
        demo.processes.stop_all()
    accuracy = rounds[-1].server_metrics.get("accuracy", 0.0) if rounds else 0.0
    numbers: dict[str, float] = {
        "accuracy": accuracy,
        "epsilon": float(cost["released"]["epsilon"]),
        "delta": float(cost["delta"]),
        "rounds": len(rounds),
        "killed": Counter(demo.killed.values())["client"],
        "server_killed": Counter(demo.killed.values())["server"],
        "seconds": round(time.monotonic() - began, 1),
    }
    status = admin_pb2.JobStatus.Name(job.status).removeprefix("JOB_STATUS_")
    summary = {"status": status, **numbers, "seen": seen, "privacy": cost}
    (demo.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return report(demo, summary, numbers, needed_accuracy)


def report(demo: Run, summary: dict[str, Any], numbers: dict[str, float], needed_accuracy: float) -> int:
    """Print what the server has seen and the last line, and return the exit status."""
    seen = summary["seen"]
    demo.console.print("the server has stored of its clients, in all rounds:")
    for kind, each in seen["messages"].items():
        demo.console.print(f"  {each['number']:5} x {kind:12} {each['bytes']:10,} bytes")
    fewest, most = seen["shares_of_a_secret"]
    demo.console.print(
        f"  {seen['masked_updates']:5} masked updates; correlation of one with its client's own: at most "
        f"{seen['correlation_of_one']:.2f}, of a released step with their sum: {seen['correlation_of_the_sum']:.2f}\n"
        f"  shares of the seeds of {seen['clients_with_seed_shares']} clients and of the keys of "
        f"{seen['clients_with_key_shares']}, {fewest} to {most} of a secret; of both: {seen['clients_with_both']}"
    )
    checks = {
        f"the job is {summary['status']}, not COMPLETED": summary["status"] == "COMPLETED",
        f"the accuracy is below {needed_accuracy}": numbers["accuracy"] >= needed_accuracy,
        "not everything was killed": demo.killed.keys() == KILLS.keys(),
        "no masked update was recorded": seen["masked_updates"] > 0,
        "a stored update resembles that of its client": seen["correlation_of_one"] < MAX_SINGLE,
        "the sum does not resemble the updates": seen["correlation_of_the_sum"] > seen["correlation_of_one"],
        "the server has both secrets of a client": seen["clients_with_both"] == 0,
        "no masks of a lost client were removed": seen["clients_with_key_shares"] > 0,
    }
    failures = [failure for failure, is_met in checks.items() if not is_met]
    for failure in failures:
        demo.console.print(f"missing: {failure}")
    words = " ".join(f"{name}={value:.4g}" for name, value in numbers.items())
    print(f"SECURE {'FAILED' if failures else 'OK'} {words}", flush=True)
    return 1 if failures else 0


def main(
    folder: Path = Path("runs/secure"),
    port: int = 0,
    clients: Annotated[int, typer.Option(min=2 * SPARE, max=200)] = 40,
    rounds: Annotated[int, typer.Option(min=0)] = 0,
    needed_accuracy: float = 0.7,
) -> None:
    """Run the job. It writes its results to FOLDER; PORT 0 selects a free port, ROUNDS 0 those of the job file."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    folder = folder.resolve()
    demo = Run(folder, port or free_port(), console, Processes(folder), clients)
    exit_after("SECURE", lambda: run(demo, load(clients, rounds), needed_accuracy))


if __name__ == "__main__":
    typer.run(main)
