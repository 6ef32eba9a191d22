"""The main job, for real: one server daemon, ten client processes, handwritten digits. `make demo` runs it.

Everything goes through what operators and clients use: the `fedplat-server` command, the client SDK and the
operators' API, with TLS. Two clients are stragglers, and one is killed in the middle of a training and started again.

When the server dies, the demo waits for it to come back: start it again with the line that is printed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

import picture
from fedplat.admin import AdminClient, profile
from fedplat.cli import formats, submission, watch
from fedplat.cli.board import AttemptTable
from fedplat.errors import FedplatError
from fedplat.job import parse_job
from fedplat.wire.v1 import admin_pb2

HERE = Path(__file__).resolve().parent
NUM_CLIENTS = 10
SLOW = frozenset({8, 9})
VICTIM = 3
KILL_IN_ROUND = 4
NEEDED_ACCURACY = 0.95
BIN = Path(sys.executable).parent


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


class Processes:
    """The processes that the demo started; all of them end with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        # Many processes share this machine: one thread each, or they only get in each other's way.
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}

    def start(self, name: str, command: Sequence[str]) -> None:
        """Starts a process; what it prints goes to a file of its name."""
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for the demo, which then stops them in order
            )

    def kill(self, name: str) -> None:
        """SIGKILL: what a crash is."""
        self._running[name].kill()
        self._running[name].wait()

    def stop(self, name: str) -> None:
        """SIGTERM; returns when it has ended."""
        self._running[name].terminate()
        self._running[name].wait()

    def has_ended(self, name: str, patience_s: float = 0.0) -> bool:
        """Whether it has ended; its connections break a moment before."""
        try:
            self._running[name].wait(patience_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop_all(self) -> None:
        """SIGTERM for all, clients first; SIGKILL for who does not listen."""
        for process in reversed(self._running.values()):
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 10.0
        for process in reversed(self._running.values()):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()


@dataclasses.dataclass
class Demo:
    """One run: where its files lie, its server and what was seen."""

    folder: Path
    port: int
    console: Console
    processes: Processes
    board: AttemptTable = dataclasses.field(default_factory=AttemptTable)
    victim_id: str = ""
    killed_in_round: int = 0
    victim_reported_again: bool = False
    server_is_dead: bool = False

    @property
    def address(self) -> str:
        """Where the server listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def server_command(self) -> list[str]:
        """The line that starts the server, now or again."""
        evaluator = f"digits={HERE / 'evaluate.py'}:evaluate"
        command = [str(BIN / "fedplat-server"), "run", "--listen", self.address]
        return [*command, "--data-dir", str(self.folder), "--evaluator", evaluator]

    def admin(self, timeout_s: float = 30.0) -> AdminClient:
        """The operator that `fedplat-server init` made."""
        return AdminClient(profile.load(self.folder / "admin.toml"), timeout_s=timeout_s)

    def start_server(self) -> None:
        """Makes certificates, the database and an operator, and starts the daemon."""
        init = [str(BIN / "fedplat-server"), "init", "--data-dir", str(self.folder), "--port", str(self.port)]
        done = subprocess.run(init, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DemoError(f"the server could not be set up: {done.stderr.strip()}")
        self.processes.start("server", self.server_command)
        with self.admin() as admin:
            try:
                admin.wait_until_ready(30.0)
            except FedplatError as exc:
                raise DemoError(f"the server did not start; see {self.folder / 'server.log'}") from exc
            made = admin.create_enrollment("demo", NUM_CLIENTS, 3600.0, self.address)
        (self.folder / "ticket").write_text(made.ticket)
        self.console.print(f"server: {shlex.join(self.server_command)}")
        self.console.print(f"operator: fedplat --profile {self.folder}/admin.toml")

    def server_died(self) -> bool:
        """Whether our server process has ended since this was last asked."""
        ended = not self.server_is_dead and self.processes.has_ended("server", 1.0)
        self.server_is_dead |= ended
        return ended

    def start_client(self, index: int) -> None:
        """Starts a client process; its identity lies in its folder, so that it comes back as the same client."""
        command = [sys.executable, str(HERE / "client.py"), "--index", str(index)]
        command += ["--ticket-file", str(self.folder / "ticket"), "--data-dir", str(self.folder / f"client-{index}")]
        self.processes.start(f"client-{index}", command + (["--slow"] if index in SLOW else []))

    def wait_for_clients(self, admin: AdminClient) -> None:
        """Returns when every client has enrolled and waits for work."""
        deadline = time.monotonic() + 120.0
        while admin.status().num_waiting < NUM_CLIENTS:
            for index in range(NUM_CLIENTS):
                if self.processes.has_ended(f"client-{index}"):
                    raise DemoError(f"client {index} ended; see {self.folder / f'client-{index}.log'}")
            if time.monotonic() > deadline:
                raise DemoError("not all clients checked in within two minutes")
            time.sleep(0.1)
        by_index = {client.labels["index"]: client.client_id for client in admin.list_clients("demo")}
        self.victim_id = by_index[str(VICTIM)]

    def run_job(self, admin: AdminClient, wanted: submission.Submission) -> admin_pb2.Job:
        """Submits the job and follows it to its end."""
        job = submission.submit(admin, wanted)
        with Live(self._table(job), console=self.console, refresh_per_second=8) as live:

            def show(event: admin_pb2.JobEvent) -> None:
                self.board.add(event)
                self._strike(event)
                live.update(self._table(job))

            def tell(sentence: str) -> None:
                live.console.print(sentence, markup=False)
                if self.server_died():
                    live.console.print(f"start it again with: {shlex.join(self.server_command)}", markup=False)

            ended = watch.follow(admin, job.job_id, watch.View(show, tell))
        if not self.console.is_terminal:
            self.console.print()  # rich leaves the last line of a table open there
        return ended

    def _strike(self, event: admin_pb2.JobEvent) -> None:
        """Kills the victim soon after it got its work, and starts it again."""
        if event.entity != "assignment" or event.client_id != self.victim_id:
            return
        if self.killed_in_round and event.round > self.killed_in_round and event.to_state == "MERGED":
            self.victim_reported_again = True
        if not self.killed_in_round and event.round >= KILL_IN_ROUND and event.to_state == "TRAINING":
            self.killed_in_round = event.round
            self.processes.kill(f"client-{VICTIM}")
            self.console.print(f"client {VICTIM} was killed in round {event.round}, and is started again")
            self.start_client(VICTIM)

    def _table(self, job: admin_pb2.Job) -> Table:
        table = Table(title=f"{job.name}: round {self.board.committed_rounds} of {job.num_rounds}")
        for column in ("round", "assigned", "reported", "late", "failed", "received", "accuracy", "seconds"):
            table.add_column(column, justify="right")
        for attempt in self.board.latest(job.num_rounds + 5):
            accuracy = attempt.server_metrics.get("accuracy")
            table.add_row(
                str(attempt.round) + (f" (try {attempt.attempt})" if attempt.attempt > 1 else ""),
                *(str(n) for n in (attempt.assigned, attempt.reported, attempt.late, attempt.failed)),
                formats.size(attempt.update_bytes),
                f"{accuracy:.4f}" if accuracy is not None else "…",
                f"{attempt.seconds:.1f}",
            )
        return table


class PeakMemory:
    """Asks the server now and then for its peak memory; a server that was started again begins anew."""

    def __init__(self, demo: Demo) -> None:
        self.peak_mb = 0.0
        self._demo = demo
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with self._demo.admin(timeout_s=2.0) as admin:
            over = False
            while not over:
                over = self._stop.wait(1.0)  # asks once more at the end
                with contextlib.suppress(FedplatError):
                    self.peak_mb = max(self.peak_mb, admin.status().peak_rss_bytes / 2**20)


def summarize(demo: Demo, admin: AdminClient, job: admin_pb2.Job, seconds: float, peak_mb: float) -> dict[str, Any]:
    """What the run came to, from the server's own records."""
    rounds = [
        {
            "round": attempt.round,
            "assigned": attempt.assigned,
            "reported": attempt.reported,
            "late": attempt.late,
            "failed": attempt.failed,
            "seconds": round(attempt.seconds, 3),
            "update_bytes": attempt.update_bytes,
            "accuracy": attempt.server_metrics.get("accuracy"),
        }
        for attempt in admin.list_rounds(job.job_id)
    ]
    scored = [entry["accuracy"] for entry in rounds if entry["accuracy"] is not None]
    return {
        "job_id": job.job_id,
        "status": admin_pb2.JobStatus.Name(job.status).removeprefix("JOB_STATUS_"),
        "final_accuracy": rounds[-1]["accuracy"] if scored and rounds else None,
        "rounds": rounds,
        "training_seconds": round(seconds, 1),
        "killed_client_in_round": demo.killed_in_round,
        "killed_client_came_back": demo.victim_reported_again,
        "server_peak_rss_mb": round(peak_mb, 1),
    }


def failings(summary: dict[str, Any], num_rounds: int) -> list[str]:
    """What the run should have shown, and did not."""
    rounds: list[dict[str, Any]] = summary["rounds"]
    accuracy = summary["final_accuracy"]
    checks = {
        f"the job is {summary['status']}, not COMPLETED": summary["status"] == "COMPLETED",
        f"{len(rounds)} rounds were committed, not {num_rounds}": len(rounds) == num_rounds,
        f"the accuracy is {accuracy}, below {NEEDED_ACCURACY}": accuracy is not None and accuracy >= NEEDED_ACCURACY,
        "no client was late": any(entry["late"] for entry in rounds),
        "the killed client did not come back": summary["killed_client_came_back"],
    }
    return [what for what, fine in checks.items() if not fine]


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def ended_by_sigterm() -> Generator[None]:
    """SIGTERM ends the demo as Ctrl-C does: with everything that it started."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def make_empty(folder: Path) -> None:
    """Throws away what an earlier demo left, and nothing else."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "fedplat.sqlite").exists():
        raise DemoError(f"{folder} holds something else than a demo's files; choose an empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def load(uplink: str, downlink: str) -> submission.Submission:
    """The job, whose updates and versions are encoded: by a codec's name each, or a table of TOML with its options."""
    loaded = submission.load(HERE / "job.toml")
    named = {name: codec for name, codec in (("uplink", uplink), ("downlink", downlink)) if codec}
    if not named:
        return loaded
    tables = {name: codec if codec.startswith("{") else f'{{ codec = "{codec}" }}' for name, codec in named.items()}
    lines = "".join(f"{name} = {table}\n" for name, table in tables.items())
    text = f"{loaded.text}\n[compression]\n{lines}"
    return dataclasses.replace(loaded, text=text, spec=parse_job(text))


def run(folder: Path, port: int, wanted: submission.Submission, console: Console) -> int:
    """Runs the demo; returns its exit status."""
    make_empty(folder)
    processes = Processes(folder)
    demo = Demo(folder, port or free_port(), console, processes)
    try:
        with ended_by_sigterm(), console.status("starting one server and ten clients …"):
            demo.start_server()
            for index in range(NUM_CLIENTS):
                demo.start_client(index)
            with demo.admin() as admin:
                demo.wait_for_clients(admin)
        with ended_by_sigterm(), demo.admin() as admin:
            began = time.monotonic()
            with PeakMemory(demo) as memory:
                job = demo.run_job(admin, wanted)
            summary = summarize(demo, admin, job, time.monotonic() - began, memory.peak_mb)
            if job.round:
                admin.export_model(job.job_id, None, folder / "model.safetensors")
    finally:
        processes.stop_all()
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if any(entry["accuracy"] is not None for entry in summary["rounds"]):
        picture.plot(summary, folder / "accuracy.png", NUM_CLIENTS, NEEDED_ACCURACY)
    return report(summary, job.num_rounds, console)


def report(summary: dict[str, Any], num_rounds: int, console: Console) -> int:
    """Prints the last line; returns the exit status."""
    missing = failings(summary, num_rounds)
    for what in missing:
        console.print(f"missing: {what}")
    rounds: list[dict[str, Any]] = summary["rounds"]
    accuracy, late = summary["final_accuracy"], sum(entry["late"] for entry in rounds)
    shown = "none" if accuracy is None else f"{accuracy:.4f}"
    words = f"accuracy={shown} rounds={len(rounds)} late={late} seconds={summary['training_seconds']}"
    print(f"DEMO {'FAILED' if missing else 'OK'} {words}", flush=True)
    return 1 if missing else 0


def main(folder: Path = Path("runs/demo"), port: int = 0, uplink: str = "", downlink: str = "") -> None:
    """Run the demo; results go to FOLDER, and PORT 0 takes any free port.

    UPLINK names a codec for the updates, such as bf16, or '{ codec = "eden", bits = 1 }'; DOWNLINK one for what
    leads from a version to the next.
    """
    console = Console()
    try:
        status = run(folder.resolve(), port, load(uplink, downlink), console)
    except KeyboardInterrupt:
        console.print("interrupted; every process was stopped")
        status = 130
    except (DemoError, FedplatError, OSError) as exc:
        console.print(f"DEMO FAILED {exc}", markup=False, highlight=False)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    typer.run(main)
