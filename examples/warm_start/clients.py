"""Run four clients in one process, which report in a fixed order.

    python examples/warm_start/clients.py --ticket-file ticket --folder clients

Sums of floating-point numbers depend on their order, and updates are added up in the order in which they are accepted.
To make two runs comparable bit by bit, client k starts to train in a round when the server has answered the report of
client k - 1. Apart from that the clients are normal: each has its own identity, connection and data.
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
    """The order of the clients in one round: client k waits until client k - 1 has been answered."""

    def __init__(self, count: int) -> None:
        self.answered = [threading.Event() for _ in range(count)]

    def wait(self, client: int) -> None:
        """Wait until the previous client's report was answered. Raises `TimeoutError` after `PATIENCE_S`."""
        if client and not self.answered[client - 1].wait(PATIENCE_S):
            raise TimeoutError(f"client {client - 1} has not reported")


class ClientGroup:
    """The clients of the example. In each round every client completes one task."""

    def __init__(self, ticket: str, folder: Path) -> None:
        self.over = threading.Event()
        self._clients = [self._client(ticket, folder, index) for index in range(shares.CLIENTS)]
        self._turns = Turns(len(self._clients))

    def run(self) -> None:
        """Run rounds until `stop` is called."""
        while not self.over.is_set():
            self._turns = Turns(len(self._clients))
            threads = [threading.Thread(target=self._run_client, args=(index,)) for index in range(len(self._clients))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def stop(self) -> None:
        """Stop the current round, and start no others."""
        self.over.set()
        for client in self._clients:
            client.stop()

    def _run_client(self, index: int) -> None:
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
@click.option("--ticket-file", required=True, help="File with the ticket.")
@click.option("--folder", type=Path, required=True, help="Folder of their identities and caches.")
def main(ticket_file: str, folder: Path) -> None:
    """Run the clients until SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    group = ClientGroup(Path(ticket_file).read_text(), folder)
    thread = threading.Thread(target=group.run, name="clients")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: group.stop())
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
