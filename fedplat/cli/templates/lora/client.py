"""One client, which trains on its own data: python client.py NUMBER."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from fedplat_client import Client
from fedplat_client.trainers.torch import TorchTrainer
from torch.utils.data import TensorDataset

import data
import model


def make_trainer(number: int) -> TorchTrainer:
    """Return the trainer of a client."""
    tokens, following = data.load(number)
    dataset = TensorDataset(torch.from_numpy(tokens), torch.from_numpy(following))
    return TorchTrainer(model=model.build, data=dataset, share="trained", seed=number)


def main() -> None:
    """Run a client until it is stopped."""
    parser = argparse.ArgumentParser(description="Run a client until it is stopped.")
    parser.add_argument("number", type=int, choices=range(data.NUM_CLIENTS), help="the client's number")
    parser.add_argument("--ticket-file", type=Path, default=Path("ticket"), help="the enrollment ticket")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ticket = arguments.ticket_file.read_text() if arguments.ticket_file.exists() else None
    client = Client.from_ticket(ticket, data_dir=f"client-{arguments.number}")
    client.add_trainer("PROJECT_NAME", make_trainer(arguments.number))
    client.run()


if __name__ == "__main__":
    main()
