"""Honest clients of the soak with attackers, as threads of one process; see `soak_attackers.py`.

    python tests/faults/honest_fleet.py --ticket-file FILE --folder FOLDER --first 0 --count 10 --work-s 3

Each is a whole `fedplat_client.Client` that trains a least-squares model. The first of them starts anew after each
task, so that it opens a session each time. How long calls took goes to FOLDER/latency-FIRST.txt: a line with the time
of day, what was done and the seconds, for each.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import least_squares
from fedplat_client import Client, ClientOptions, Task, TrainResult
from fedplat_client._auth.authenticator import Connection, SignedAccess

POPULATION = "honest"
TRAINER = "least-squares"


class Times:
    """Writes down how long calls took."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self._lock = threading.Lock()
        self._local = threading.local()

    def note(self, what: str, seconds: float) -> None:
        with self._lock:
            self._file.write(f"{time.time()} {what} {seconds}\n")
            self._file.flush()

    def begin(self) -> None:
        """A client of this thread begins to look for its server."""
        self._local.begun = time.monotonic()

    def in_session(self) -> None:
        """It is in a session."""
        begun = getattr(self._local, "begun", None)
        self._local.begun = None
        if begun is not None:
            self.note("session", time.monotonic() - begun)


def main(
    ticket_file: Annotated[Path, typer.Option()],
    folder: Annotated[Path, typer.Option()],
    first: Annotated[int, typer.Option()],
    count: Annotated[int, typer.Option()],
    work_s: Annotated[float, typer.Option(help="How long a training takes at most: clients are many on one host.")],
    transport: Annotated[str, typer.Option()] = "grpc",
) -> None:
    """Run clients until SIGTERM."""
    times, over = Times(folder / f"latency-{first}.txt"), threading.Event()
    measure(times)
    ticket = ticket_file.read_text()
    clients = [make(ticket, folder, number, work_s, transport) for number in range(first, first + count)]

    def come_again() -> None:
        while not over.is_set():
            times.begin()
            clients[0].run(max_tasks=1)
            if not over.is_set():
                clients[0] = make(ticket, folder, first, work_s, transport)

    threads = [threading.Thread(target=come_again), *(threading.Thread(target=client.run) for client in clients[1:])]
    for thread in threads:
        thread.start()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    over.set()
    for client in clients:
        client.stop()
    for thread in threads:
        thread.join()


def make(ticket: str, folder: Path, number: int, work_s: float, transport: str) -> Client:
    """A client that answers with the model of its own data."""
    options = ClientOptions(
        transport=transport,
        first_backoff_s=0.2,
        max_backoff_s=3.0,
        check_in_wait_s=20.0,
        inline_limit_bytes=0 if number % 2 else ClientOptions().inline_limit_bytes,  # half of them upload as a stream
    )
    client = Client.from_ticket(
        ticket, labels={"kind": "honest"}, data_dir=folder / "clients" / str(number), options=options
    )
    solution, dice = least_squares.solution(number), random.Random(number)

    @client.trainer(TRAINER)
    def train(task: Task) -> TrainResult:
        task.control.wait(dice.uniform(0.2, 1.0) * work_s)
        error = float(np.linalg.norm(task.parameters["weight"] - solution))
        task.parameters["weight"][:] = solution
        metrics = {"distance": error} if np.isfinite(error) else {}
        return TrainResult(
            parameters=task.parameters, num_examples=least_squares.NUM_EXAMPLES + number % 7, metrics=metrics
        )

    return client


def measure(times: Times) -> None:
    """Notes what check-ins that bring work, uploads, reports and new sessions take."""
    check_in, report, upload, prove = Connection.check_in, Connection.report, Connection.upload, SignedAccess.prove

    def timed(name: str, call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            result = call(*args, **kwargs)
            times.note(name, time.monotonic() - started)
            return result

        return wrapped

    def check_in_timed(*args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        response = check_in(*args, **kwargs)
        if response.HasField("assignment"):
            times.note("assignment", time.monotonic() - started)
        return response

    def prove_noted(*args: Any, **kwargs: Any) -> Any:
        answer = prove(*args, **kwargs)
        times.in_session()
        return answer

    Connection.check_in = check_in_timed
    Connection.report = timed("report", report)
    Connection.upload = timed("upload", upload)
    SignedAccess.prove = prove_noted  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    # Blocked in all threads, so that sigwait gets them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    typer.run(main)
