"""Many clients of one version in a process: `python -P fleet.py TICKET_FILE FOLDER COUNT GATE_FILE`, until SIGTERM.

Each is a whole `Client` in a thread. Every third client waits in a training until its round is at most the number in
the gate file, so that a round stays open until the test has acted in it. At the end, a line of JSON on standard output:
how many trainings were completed, how many of them repeated one, the errors with which clients ended, and the version.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import fedplat_client
from fedplat_client import Client, ClientOptions, Task, TrainResult

MOST_S = 0.3
"""The time that a training takes at most."""


class Fleet:
    """Clients that add 1 to every weight."""

    def __init__(self, ticket: str, folder: Path, count: int, gate: Path) -> None:
        self._gate = gate
        self.errors: list[str] = []
        self.trained: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._clients = [self._make(ticket, folder / str(number), number) for number in range(count)]
        self._threads = [threading.Thread(target=self._run, args=[client]) for client in self._clients]

    def _make(self, ticket: str, folder: Path, number: int) -> Client:
        options = ClientOptions(first_backoff_s=0.1, max_backoff_s=1.0)
        client = Client.from_ticket(ticket, data_dir=folder, options=options)
        dice = random.Random(number)

        def train(task: Task) -> TrainResult:
            task.control.wait(dice.uniform(0.0, MOST_S))
            while number % 3 == 0 and task.round > int(self._gate.read_text()):
                task.control.wait(0.05)
            task.parameters["weight"][:] += 1.0
            with self._lock:
                self.trained[f"{task.job_id} {task.round} {task.attempt} {number}"] += 1
            return TrainResult(parameters=task.parameters, num_examples=5)

        client.add_trainer("add", train)
        return client

    def _run(self, client: Client) -> None:
        try:
            client.run()
        except Exception as exc:
            self.errors.append(f"{type(exc).__name__}: {exc}")

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        for client in self._clients:
            client.stop()
        for thread in self._threads:
            thread.join()


def main() -> None:
    """Run the clients until SIGTERM."""
    ticket, folder, count = Path(sys.argv[1]).read_text(), Path(sys.argv[2]), int(sys.argv[3])
    fleet = Fleet(ticket, folder, count, Path(sys.argv[4]))
    fleet.start()
    signal.sigwait({signal.SIGTERM})
    fleet.stop()
    found = {
        "version": fedplat_client.__version__,
        "errors": fleet.errors,
        "trained": len(fleet.trained),
        "repeated": sum(fleet.trained.values()) - len(fleet.trained),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    # Blocked in all threads, so that sigwait gets it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
