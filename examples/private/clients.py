"""Clients of the private digits job, many in one process: each has its identity, its data and its connection.

    python examples/private/clients.py --ticket-file ticket --first 0 --count 57 --folder clients

With `--hapless N`, the first N times that any of them trains, it does nothing until its deadline is over: time enough
for whoever wants to kill it.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from pathlib import Path

import click

import digits
from fedplat_client import Cancelled, Client, Task, TrainResult

SLOW_S = 30.0


@click.command()
@click.option("--ticket-file", required=True, help="What the operator gave.")
@click.option("--first", type=int, required=True, help="The share of the digits that the first client holds.")
@click.option("--count", type=int, default=1, help="How many clients.")
@click.option("--folder", type=Path, required=True, help="Where their identities and caches lie.")
@click.option("--hapless", type=int, default=0, help="How many trainings, of all clients of the folder, go wrong.")
def main(ticket_file: str, first: int, count: int, folder: Path, hapless: int) -> None:
    """Run clients until SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    ticket = Path(ticket_file).read_text()
    clients = [make(ticket, folder, index, hapless) for index in range(first, first + count)]
    threads = [threading.Thread(target=client.run, name=f"client {index}") for index, client in enumerate(clients)]
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: over.set())
    for thread in threads:
        thread.start()
    over.wait()
    for client in clients:
        client.stop()
    for thread in threads:
        thread.join()


def make(ticket: str, folder: Path, index: int, hapless: int) -> Client:
    """A client with its share of the digits."""
    client = Client.from_ticket(ticket, labels={"index": str(index)}, data_dir=folder / str(index))
    images, labels = digits.client_data(index)
    first = True

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        nonlocal first
        if first and any(claimed(folder / f"hapless-{number}") for number in range(hapless)):
            first = False
            dawdle(task)
        rate, steps = float(task.config["learning_rate"]), int(task.config["steps"])
        digits.train(task.parameters, images, labels, rate, steps)
        return TrainResult(parameters=task.parameters, num_examples=len(labels))

    return client


def claimed(path: Path) -> bool:
    """Whether nobody had this file before."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def dawdle(task: Task) -> None:
    """Does nothing for longer than the deadline allows."""
    try:
        for step in range(int(SLOW_S * 10)):
            time.sleep(0.1)
            task.progress(step / (SLOW_S * 10))
    except Cancelled:
        time.sleep(0.2)  # still busy: the server must not draw it meanwhile
        raise


if __name__ == "__main__":
    main()
