"""Four clients in one process, which report in a fixed order.

    python examples/warm_start/clients.py --ticket-file ticket --folder clients

Sums of floating-point numbers depend on their order, and updates are added up in the order in which they are accepted.
So that two runs can be compared bit by bit, client k begins to train in a round when the server has answered the report
of client k - 1. Nothing else is unusual: each client has its identity, its connection and its data.
"""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path

import click

import shares
from fedplat_client import Client, Task, TrainResult

PATIENCE_S = 300.0


class Turns:
    """Whose turn it is: client k's when k reports of the round were answered."""

    def __init__(self, count: int) -> None:
        self.answered = [threading.Event() for _ in range(count)]

    def wait(self, client: int) -> None:
        """Returns when it is the turn of a client."""
        if client and not self.answered[client - 1].wait(PATIENCE_S):
            raise TimeoutError(f"client {client - 1} has not reported")


class Crew:
    """The clients; one task of each makes a round."""

    def __init__(self, ticket: str, folder: Path) -> None:
        self.over = threading.Event()
        self._clients = [self._client(ticket, folder, index) for index in range(shares.CLIENTS)]
        self._turns = Turns(len(self._clients))

    def run(self) -> None:
        """Plays rounds until it is over."""
        while not self.over.is_set():
            self._turns = Turns(len(self._clients))
            threads = [threading.Thread(target=self._play, args=(index,)) for index in range(len(self._clients))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def stop(self) -> None:
        """Ends the round and all others."""
        self.over.set()
        for client in self._clients:
            client.stop()

    def _play(self, index: int) -> None:
        self._clients[index].run(max_tasks=1)  # returns when the report was answered
        self._turns.answered[index].set()

    def _client(self, ticket: str, folder: Path, index: int) -> Client:
        client = Client.from_ticket(ticket, labels={"index": str(index)}, data_dir=folder / str(index))
        images, labels = shares.client_data(index)

        @client.trainer("digits")
        def train(task: Task) -> TrainResult:
            self._turns.wait(index)
            rate, steps = float(task.config["learning_rate"]), int(task.config["steps"])
            shares.train(task.parameters, images, labels, rate, steps)
            return TrainResult(parameters=task.parameters, num_examples=len(labels))

        return client


@click.command()
@click.option("--ticket-file", required=True, help="What the operator gave.")
@click.option("--folder", type=Path, required=True, help="Where their identities and caches lie.")
def main(ticket_file: str, folder: Path) -> None:
    """Run the clients until SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    crew = Crew(Path(ticket_file).read_text(), folder)
    playing = threading.Thread(target=crew.run, name="crew")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: crew.stop())
    playing.start()
    playing.join()


if __name__ == "__main__":
    main()
