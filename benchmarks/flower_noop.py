"""Measure rounds of a Flower app whose clients do nothing, simulated: python benchmarks/flower_noop.py [CLIENTS]."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from fedplat.simulation.flower import AppOptions, MessageSetResult, run_app

PROJECT = """
[project]
name = "noop"
version = "1.0.0"
[tool.flwr.app.components]
serverapp = "flower_noop_app.app:server"
clientapp = "flower_noop_app.app:client"
"""
APP = """
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client, server = ClientApp(), ServerApp()


@client.train()
def train(message, context):
    content = RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


@server.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy.start(grid, ArrayRecord([np.zeros(10, np.float32)]), num_rounds=3)
"""


def main() -> None:
    """Print the seconds of each round, with clients in this process and in two."""
    num_clients = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pyproject.toml").write_text(PROJECT)
        (Path(folder) / "flower_noop_app").mkdir()
        (Path(folder) / "flower_noop_app/app.py").write_text(APP)
        for workers in (1, 2):
            began, rounds = time.perf_counter(), list[float]()

            def note(sent: MessageSetResult, rounds: list[float] = rounds) -> None:
                assert sent.num_replies == num_clients
                rounds.append(time.perf_counter())

            run_app(folder, AppOptions(num_clients=num_clients, workers=workers), on_messages=note)
            took = [after - before for before, after in zip([began, *rounds], rounds, strict=False)]
            print(f"workers {workers}: {', '.join(f'{each:.3f}' for each in took)} s for the rounds")


if __name__ == "__main__":
    main()
