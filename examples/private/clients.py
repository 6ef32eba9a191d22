"""Run many clients of the private digits job in one process, each with its own identity, data and connection.

    python examples/private/clients.py --ticket-file ticket --first 0 --count 57 --folder clients

With `--stalls N`, the first N trainings, of different clients of the folder, do nothing until their deadline has
passed. So the demo can kill a client while it trains.
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
@click.option("--ticket-file", required=True, help="File with the ticket.")
@click.option("--first", type=int, required=True, help="Number of the first client's share of the digits.")
@click.option("--count", type=int, default=1, help="Number of clients.")
@click.option("--folder", type=Path, required=True, help="Folder of their identities and caches.")
@click.option("--stalls", type=int, default=0, help="Number of trainings, of all clients of the folder, that stall.")
def main(ticket_file: str, first: int, count: int, folder: Path, stalls: int) -> None:
    """Run clients until SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    ticket = Path(ticket_file).read_text()
    clients = [make_client(ticket, folder, index, stalls) for index in range(first, first + count)]
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


def make_client(ticket: str, folder: Path, index: int, stalls: int) -> Client:
    """Create a client with its share of the digits."""
    client = Client.from_ticket(ticket, labels={"index": str(index)}, data_dir=folder / str(index))
    images, labels = digits.client_data(index)
    first = True

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        nonlocal first
        if first and any(claim(folder / f"stall-{number}") for number in range(stalls)):
            first = False
            stall(task)
        rate, steps = float(task.config["learning_rate"]), int(task.config["steps"])
        digits.train(task.parameters, images, labels, rate, steps)
        return TrainResult(parameters=task.parameters, num_examples=len(labels))

    return client


def claim(path: Path) -> bool:
    """Create a file, and return whether it is new."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def stall(task: Task) -> None:
    """Do nothing for longer than the deadline allows."""
    try:
        for step in range(int(SLOW_S * 10)):
            time.sleep(0.1)
            task.progress(step / (SLOW_S * 10))
    except Cancelled:
        time.sleep(0.2)  # still busy: the server must not draw this client meanwhile
        raise


if __name__ == "__main__":
    main()
