"""Run one client of the secure digits job: a process with its own identity, data and connection.

    python examples/secure/client.py --ticket-file ticket --folder client-3 --index 3

The folder contains `data.npz`, its share of the digits. For the demo, which compares them with the files of the server,
the client also writes each update there, before it is encoded. In a folder of all clients, `--turns`, the demo lets the
rounds continue: the first client that has trained returns its update, and the others wait for a file `go-ROUND`.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import click
import numpy as np

import shares
from fedplat_client import Client, Task, TrainResult


@click.command()
@click.option("--ticket-file", type=Path, required=True, help="File with the ticket.")
@click.option("--folder", type=Path, required=True, help="Folder of its data, its identity and its cache.")
@click.option("--turns", type=Path, required=True, help="Folder in which clients wait for the demo.")
@click.option("--index", type=int, required=True, help="Its number, a label that operators see.")
def main(ticket_file: Path, folder: Path, turns: Path, index: int) -> None:
    """Run one client until it is stopped."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with np.load(folder / "data.npz") as data:
        images, labels = data["images"], data["labels"]
    client = Client.from_ticket(ticket_file.read_text(), labels={"index": str(index)}, data_dir=folder)

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        base = task.parameters.to_vector().copy()
        rate, steps = float(task.config["learning_rate"]), int(task.config["steps"])
        shares.train(task.parameters, images, labels, rate, steps)
        np.save(folder / f"update-{task.round}.npy", task.parameters.to_vector() - base)
        wait_for_turn(task, turns)
        return TrainResult(parameters=task.parameters, num_examples=len(labels))

    client.run()


def wait_for_turn(task: Task, turns: Path) -> None:
    """Return at once for the first client of an attempt, and for the others when the demo lets the round continue."""
    try:
        (turns / f"first-{task.round}-{task.attempt}").touch(exist_ok=False)
    except FileExistsError:
        while not (turns / f"go-{task.round}").exists():
            task.progress(1.0)
            time.sleep(0.05)


if __name__ == "__main__":
    main()
