"""One client of the digits job, which trains on its share of the digits.

    fedplat enrollment create --population demo --uses 10 > ticket
    python examples/digits/client.py --ticket-file ticket --index 0

`--slow` makes it a straggler: in some rounds it is far slower than the deadline allows, and it reacts late to a
cancellation.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from pathlib import Path

import click
import torch

import model
from fedplat_client import Cancelled, Client, Task, TrainResult
from fedplat_client.trainers.torch import TorchTrainer

SLOW_SHARE = 0.5
SLOW_S = 30.0
CANCEL_DELAY_S = 1.5


@click.command()
@click.option("--ticket-file", help="File with the ticket (default: FEDPLAT_TICKET). Only needed to enroll.")
@click.option(
    "--index", type=click.IntRange(0, model.NUM_CLIENTS - 1), required=True, help="Number of its share of the data."
)
@click.option("--data-dir", default=None, help="Folder of its identity and its cache.")
@click.option("--slow", is_flag=True, help="Be a straggler in about half of the rounds.")
def main(ticket_file: str | None, index: int, data_dir: str | None, slow: bool) -> None:
    """Run one client until it is stopped."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    torch.set_num_threads(1)  # many clients share this machine
    trainer = TorchTrainer(model=model.build, data=model.client_data(index), seed=index)
    dice, tasks = random.Random(index), itertools.count()
    ticket = Path(ticket_file).read_text() if ticket_file is not None else None
    client = Client.from_ticket(ticket, labels={"index": str(index)}, data_dir=data_dir)

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        if slow and next(tasks) and dice.random() < SLOW_SHARE:
            stall(task)
        return trainer(task)

    client.run()


def stall(task: Task) -> None:
    """Do nothing for longer than the deadline allows."""
    try:
        for step in range(int(SLOW_S * 10)):
            time.sleep(0.1)
            task.progress(step / (SLOW_S * 10))
    except Cancelled:
        time.sleep(CANCEL_DELAY_S)  # still busy: the server must not select this client meanwhile
        raise


if __name__ == "__main__":
    main()
