"""Run one silo of the gossip example: a process with its own identity, data and port.

    python examples/gossip/client.py --ticket-file ticket --data-dir silo-3 --silo 3 --listen 127.0.0.1:7453

Without `--listen` it opens no port: its models pass through the server, encrypted for each neighbour.
"""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

import click
import numpy as np
import silo_data

from fedplat_client import Client, ClientOptions, Task, TrainResult


@click.command()
@click.option("--ticket-file", type=Path, required=True, help="File with the ticket.")
@click.option("--data-dir", type=Path, required=True, help="Folder of its identity and its models.")
@click.option("--silo", type=int, required=True, help="Its number, which determines its data.")
@click.option("--listen", default="", help="The port for its neighbours, as host:port.")
def main(ticket_file: Path, data_dir: Path, silo: int, listen: str) -> None:
    """Run one silo until it is stopped."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    images, labels = silo_data.silo_data(silo)
    options = ClientOptions(exchange_models=True, peer_listen=listen)
    client = Client.from_ticket(
        ticket_file.read_text(), labels={"index": str(silo)}, data_dir=data_dir, options=options
    )

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        rate, epochs = float(task.config["learning_rate"]), int(task.config["epochs"])
        rng = np.random.default_rng(zlib.crc32(f"{silo} {task.round}".encode()))
        loss = silo_data.train(task.parameters, images, labels, rate, epochs, rng)
        return TrainResult(parameters=task.parameters, num_examples=len(labels), metrics={"loss": loss})

    client.run()


if __name__ == "__main__":
    main()
