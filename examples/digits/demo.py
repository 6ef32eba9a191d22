"""Run a complete job: one server daemon, ten client processes, handwritten digits. `make demo` runs it.

The demo uses the public interfaces: the `fedplat-server` command, the client SDK and the operator API, with TLS. Two
clients are stragglers, and one is killed during a training and started again.

If the server dies, the demo waits for its return: start it again with the command that the demo prints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

import picture
from fedplat import AdminClient, parse_job
from fedplat.admin import profile, submission
from fedplat.cli import formats, job_files, watch
from fedplat.cli.watch import AttemptTable
from fedplat.errors import FedplatError
from fedplat.wire.v1 import admin_pb2

HERE = Path(__file__).resolve().parent
NUM_CLIENTS = 10
SLOW = frozenset({8, 9})
VICTIM = 3
KILL_IN_ROUND = 4
NEEDED_ACCURACY = 0.95
BIN = Path(sys.executable).parent
PATIENCE_S = 300.0
"""Time limit of a start or an end: minutes on a busy machine. A process that ends instead is noticed at once."""


class DemoError(Exception):
    """The demo cannot continue; the message has the reason."""


class Processes:
    """The processes that the demo has started. It stops all of them at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        # Many processes share this machine: with more than one thread each, they would slow each other down.
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a process; its output goes to a log file with its name."""
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._environment, **(environment or {})},
                start_new_session=True,  # Ctrl-C reaches only the demo, which then stops them in order
            )

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL, to simulate a crash."""
        self._running[name].kill()
        self._running[name].wait()

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process."""
        self._running[name].send_signal(number)

    def stop(self, name: str) -> None:
        """Send SIGTERM to a process, and wait until it has ended. Raises `DemoError` after `PATIENCE_S`."""
        self._running[name].terminate()
        if not self.has_ended(name, PATIENCE_S):
            raise DemoError(f"the {name} did not stop; see {self._folder / name}.log")

    def has_ended(self, name: str, patience_s: float = 0.0) -> bool:
        """Return whether a process ends within `patience_s`. Its connections break before it ends."""
        try:
            self._running[name].wait(patience_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop_all(self) -> None:
        """Send SIGTERM to all processes, clients first, and SIGKILL after 10 s."""
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
class DemoServer:
    """One run of a demo: its files, its processes and its server."""

    folder: Path
    port: int
    console: Console
    processes: Processes

    @property
    def address(self) -> str:
        """The address of the server."""
        return f"127.0.0.1:{self.port}"

    def command(self, *arguments: str) -> list[str]:
        """Return a command of the server for the data in the demo's folder."""
        return [str(BIN / "fedplat-server"), *arguments, "--data-dir", str(self.folder)]

    def admin(self, timeout_s: float = 30.0) -> AdminClient:
        """Connect as the operator that `fedplat-server init` created."""
        return AdminClient(profile.load(self.folder / "admin.toml"), timeout_s=timeout_s)

    def initialize(self) -> None:
        """Create certificates, the database and an operator."""
        init = self.command("init", "--port", str(self.port))
        done = subprocess.run(init, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DemoError(f"the server could not be set up: {done.stderr.strip()}")

    def start_daemon(self, *options: str) -> None:
        """Start the daemon, also after a crash, and wait until it serves."""
        self.processes.start("server", self.command("run", "--listen", self.address, *options))
        with self.admin() as admin:
            try:
                admin.wait_until_ready(PATIENCE_S)
            except FedplatError as exc:
                raise DemoError(f"the server did not start; see {self.folder / 'server.log'}") from exc

    def start_pool(self, num_ranks: int) -> None:
        """Start a pool of ranks; `wait_for_pool` waits until the daemon can use it."""
        self.processes.start("pool", self.command("pool", "run", "--ranks", str(num_ranks)))

    def wait_for_pool(self) -> None:
        """Wait until the ranks have formed a group. Raises `DemoError` after `PATIENCE_S`, or if they end."""
        deadline = time.monotonic() + PATIENCE_S
        while not (self.folder / "pool.sock").is_socket():
            if self.processes.has_ended("pool") or time.monotonic() > deadline:
                raise DemoError(f"the pool did not start; see {self.folder / 'pool.log'}")
            time.sleep(0.1)

    def write_ticket(self, num_clients: int) -> Path:
        """Write a ticket with which clients enroll, and return its path."""
        with self.admin() as admin:
            made = admin.create_enrollment("demo", num_clients, 3600.0, self.address)
        path = self.folder / "ticket"
        path.write_text(made.ticket)
        return path

    def wait_for_clients(self, admin: AdminClient, num_clients: int, names: Sequence[str]) -> dict[str, int]:
        """Wait until all clients have checked in; return the number of each, its label `index`, by its id.

        `names` are the processes that run them. Raises `DemoError` if one of them ends.
        """
        deadline = time.monotonic() + PATIENCE_S
        while admin.status().num_waiting < num_clients:
            for name in names:
                if self.processes.has_ended(name):
                    raise DemoError(f"{name} ended; see {self.folder / f'{name}.log'}")
            if time.monotonic() > deadline:
                raise DemoError(f"not all clients checked in; see {self.folder / names[0]}.log")
            time.sleep(0.1)
        return {client.client_id: int(client.labels["index"]) for client in admin.list_clients("demo")}

    def show_privacy(self, job_id: str) -> dict[str, Any]:
        """Return the output of `fedplat privacy show` for a job."""
        command = [str(BIN / "fedplat"), "--profile", str(self.folder / "admin.toml")]
        done = subprocess.run(
            [*command, "privacy", "show", job_id, "--json"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise DemoError(f"fedplat privacy show: {done.stderr.strip()}")
        return json.loads(done.stdout)["jobs"][0]


@dataclasses.dataclass
class Demo(DemoServer):
    """One run of the demo of digits: also the events so far."""

    board: AttemptTable = dataclasses.field(default_factory=AttemptTable)
    victim_id: str = ""
    killed_in_round: int = 0
    victim_reported_again: bool = False
    server_is_dead: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the daemon."""
        return "--evaluator", f"digits={HERE / 'evaluate.py'}:evaluate"

    @property
    def server_command(self) -> list[str]:
        """The command that starts the server, also after a crash."""
        return self.command("run", "--listen", self.address, *self.options)

    def start_server(self) -> None:
        """Create certificates, the database and an operator, start the daemon, and write a ticket."""
        self.initialize()
        self.start_daemon(*self.options)
        self.write_ticket(NUM_CLIENTS)
        self.console.print(f"server: {shlex.join(self.server_command)}")
        self.console.print(f"operator: fedplat --profile {self.folder}/admin.toml")
        self.console.print(f"dashboard: fedplat --profile {self.folder}/admin.toml dashboard")

    def server_died(self) -> bool:
        """Return whether the server process has ended since the last call."""
        ended = not self.server_is_dead and self.processes.has_ended("server", 1.0)
        self.server_is_dead |= ended
        return ended

    def start_client(self, index: int) -> None:
        """Start a client process. Its folder stores its identity, so a restart is the same client."""
        command = [sys.executable, str(HERE / "client.py"), "--index", str(index)]
        command += ["--ticket-file", str(self.folder / "ticket"), "--data-dir", str(self.folder / f"client-{index}")]
        self.processes.start(f"client-{index}", command + (["--slow"] if index in SLOW else []))

    def find_victim(self, admin: AdminClient) -> None:
        """Wait until every client has enrolled and checked in, and note the one that will be killed."""
        indices = self.wait_for_clients(admin, NUM_CLIENTS, [f"client-{index}" for index in range(NUM_CLIENTS)])
        self.victim_id = next(client for client, index in indices.items() if index == VICTIM)

    def run_job(self, admin: AdminClient, wanted: submission.Submission) -> admin_pb2.Job:
        """Submit the job and follow it to its end."""
        job = submission.submit(admin, wanted)
        with Live(self._table(job), console=self.console, refresh_per_second=8) as live:

            def show(event: admin_pb2.JobEvent) -> None:
                self.board.add(event)
                self._kill_victim(event)
                live.update(self._table(job))

            def warn(sentence: str) -> None:
                live.console.print(sentence, markup=False)
                if self.server_died():
                    live.console.print(f"start it again with: {shlex.join(self.server_command)}", markup=False)

            ended = watch.follow(admin, job.job_id, watch.View(show, warn))
        if not self.console.is_terminal:
            self.console.print()  # without a terminal, rich does not end the last line of a table
        return ended

    def _kill_victim(self, event: admin_pb2.JobEvent) -> None:
        """Kill the victim soon after it was assigned, and start it again."""
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
    """A thread that polls the server's peak memory. A restarted server starts from zero."""

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
                over = self._stop.wait(1.0)  # polls once more at the end
                with contextlib.suppress(FedplatError):
                    self.peak_mb = max(self.peak_mb, admin.status().peak_rss_bytes / 2**20)


def summarize(demo: Demo, admin: AdminClient, job: admin_pb2.Job, seconds: float, peak_mb: float) -> dict[str, Any]:
    """Summarize the run from the server's own records."""
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


def list_failures(summary: dict[str, Any], num_rounds: int) -> list[str]:
    """List the expectations that the run did not meet."""
    rounds: list[dict[str, Any]] = summary["rounds"]
    accuracy = summary["final_accuracy"]
    checks = {
        f"the job is {summary['status']}, not COMPLETED": summary["status"] == "COMPLETED",
        f"{len(rounds)} rounds were committed, not {num_rounds}": len(rounds) == num_rounds,
        f"the accuracy is {accuracy}, below {NEEDED_ACCURACY}": accuracy is not None and accuracy >= NEEDED_ACCURACY,
        "no client was late": any(entry["late"] for entry in rounds),
        "the killed client did not come back": summary["killed_client_came_back"],
    }
    return [failure for failure, is_met in checks.items() if not is_met]


def free_port() -> int:
    """Return a free loopback port, below those that connections get."""
    while True:
        port = secrets.choice(range(10_000, 30_000))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextlib.contextmanager
def ended_by_sigterm() -> Generator[None]:
    """Turn SIGTERM into `KeyboardInterrupt`, so that the demo stops its processes."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_after(name: str, work: Callable[[], int]) -> NoReturn:
    """Do the work of a demo, and exit with its status; an error is its last line, with the demo's name."""
    try:
        status = work()
    except KeyboardInterrupt:
        print("interrupted; every process was stopped", flush=True)
        status = 130
    except (DemoError, FedplatError, OSError) as exc:
        print(f"{name} FAILED {exc}", flush=True)
        status = 1
    sys.exit(status)


def make_empty(folder: Path) -> None:
    """Empty the folder. Raises `DemoError` if it contains other files than those of an earlier demo."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "fedplat.sqlite").exists():
        raise DemoError(f"{folder} contains other files than those of a demo; choose an empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def load(uplink: str, downlink: str) -> submission.Submission:
    """Load the job, with compression. `uplink`, `downlink`: a codec's name, or a TOML table with its options, or ""."""
    loaded = job_files.load(HERE / "job.toml")
    named = {name: codec for name, codec in (("uplink", uplink), ("downlink", downlink)) if codec}
    if not named:
        return loaded
    tables = {name: codec if codec.startswith("{") else f'{{ codec = "{codec}" }}' for name, codec in named.items()}
    lines = "".join(f"{name} = {table}\n" for name, table in tables.items())
    text = f"{loaded.text}\n[compression]\n{lines}"
    return dataclasses.replace(loaded, text=text, spec=parse_job(text))


def run(folder: Path, port: int, wanted: submission.Submission, console: Console) -> int:
    """Run the demo and return its exit status."""
    make_empty(folder)
    processes = Processes(folder)
    demo = Demo(folder, port or free_port(), console, processes)
    try:
        with ended_by_sigterm(), console.status("starting one server and ten clients …"):
            demo.start_server()
            for index in range(NUM_CLIENTS):
                demo.start_client(index)
            with demo.admin() as admin:
                demo.find_victim(admin)
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
    """Print the last line and return the exit status."""
    failures = list_failures(summary, num_rounds)
    for failure in failures:
        console.print(f"missing: {failure}")
    accuracy, late = summary["final_accuracy"], sum(entry["late"] for entry in summary["rounds"])
    shown = "none" if accuracy is None else f"{accuracy:.4f}"
    words = f"accuracy={shown} rounds={len(summary['rounds'])} late={late} seconds={summary['training_seconds']}"
    print(f"DEMO {'FAILED' if failures else 'OK'} {words}", flush=True)
    return 1 if failures else 0


def main(folder: Path = Path("runs/demo"), port: int = 0, uplink: str = "", downlink: str = "") -> None:
    """Run the demo. It writes its results to FOLDER; PORT 0 selects a free port.

    UPLINK is the codec of updates, such as bf16 or '{ codec = "eden", bits = 1 }'; DOWNLINK is the codec of versions.
    """
    console = Console()
    exit_after("DEMO", lambda: run(folder.resolve(), port, load(uplink, downlink), console))


if __name__ == "__main__":
    typer.run(main)
