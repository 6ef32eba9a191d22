"""Small Flower apps with NumPy only, in each style: a new-style strategy, a loop of the app's own, and the old API."""

from __future__ import annotations

from pathlib import Path

PROJECT = """
[project]
name = "small"
version = "1.0.0"

[tool.flwr.app]
publisher = "fedplat"

[tool.flwr.app.components]
serverapp = "small_{tag}.server:app"
clientapp = "small_{tag}.client:app"

[tool.flwr.app.config]
num-rounds = 2
fail = -1
mode = ""

[tool.flwr.federations]
default = "local"

[tool.flwr.federations.local]
options.num-supernodes = 6
"""

SERVER = """
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = FedAvg(fraction_train=0.8, fraction_evaluate=0.5)
    strategy.start(grid, ArrayRecord([np.zeros(4, np.float32)]), num_rounds=context.run_config["num-rounds"])
"""

CLIENT = """
import multiprocessing
import os
import random

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    print("the app prints")
    partition, mode = context.node_config["partition-id"], context.run_config["mode"]
    if partition == context.run_config["fail"]:
        raise ValueError("no data here")
    before = context.state["calls"]["number"] if "calls" in context.state else 0
    context.state["calls"] = MetricRecord({"number": before + 1})
    drawn = partition + random.random() + np.random.rand()
    arrays = [each + np.float32(drawn) for each in message.content["arrays"].to_numpy_ndarrays()]
    if mode == "not-finite":
        arrays[0][1] = np.nan
    if mode == "one-shape" and partition == 2:
        arrays = [np.zeros(9, np.float32)]
    if mode == "exit":
        os._exit(3)
    if mode == "child":
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join()
    if mode == "text":
        return "done"
    metrics = {"seen": before} if mode == "no-examples" else {"seen": before, "num-examples": 1 + partition}
    return Message(
        RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)}), reply_to=message
    )


@app.evaluate()
def evaluate(message, context):
    metrics = MetricRecord({"number": float(message.content["arrays"].to_numpy_ndarrays()[0][0]), "num-examples": 1})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
"""

OWN_LOOP = """
import json
import time

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    replies = []
    for number in range(context.run_config["num-rounds"]):
        content = RecordDict({"config": ConfigRecord({"number": number})})
        ids = grid.push_messages([Message(content, node, "query.sum") for node in grid.get_node_ids()])
        while ids:
            arrived = grid.pull_messages(ids)
            ids = ids[len(arrived) :]
            replies += arrived
            time.sleep(0.001)
    good = [each.content["sum"]["sum"] for each in replies if not each.has_error()]
    with open("sums.txt", "w") as file:
        file.write(f"{sum(good)} {len(replies) - len(good)}")
    seen = {}
    for each in replies:
        if not each.has_error():
            seen.setdefault(each.metadata.src_node_id, []).append(each.content["sum"]["seen"])
    with open("seen.json", "w") as file:
        json.dump(seen, file)
"""

OWN_LOOP_CLIENT = """
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query("sum")
def query(message, context):
    total = message.content["config"]["number"] + context.node_config["partition-id"]
    seen = context.state["calls"]["number"] if "calls" in context.state else 0
    context.state["calls"] = MetricRecord({"number": seen + 1})
    return Message(RecordDict({"sum": MetricRecord({"sum": total, "seen": seen})}), reply_to=message)
"""

LEGACY_SERVER = """
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp


def server_fn(context):
    return ServerAppComponents(strategy=FedAvg(), config=ServerConfig(num_rounds=context.run_config["num-rounds"]))


app = ServerApp(server_fn=server_fn)
"""

LEGACY_CLIENT = """
import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp


class Client(NumPyClient):
    def get_parameters(self, config):
        return [np.zeros(4, np.float32)]

    def fit(self, parameters, config):
        return [each + 1 for each in parameters], 10, {"loss": 0.5}

    def evaluate(self, parameters, config):
        return float(parameters[0][0]), 10, {"accuracy": 0.25}


app = ClientApp(client_fn=lambda context: Client().to_client())
"""
_count = 0


def write_app(
    folder: Path, server: str = SERVER, client: str = CLIENT, *, fedplat: str = "", project: str = PROJECT
) -> Path:
    """Write an app, whose package has a name of its own in this process, and return its folder."""
    global _count
    _count += 1
    package = folder / f"small_{_count}"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(project.replace("{tag}", str(_count)))
    (package / "__init__.py").touch()
    (package / "server.py").write_text(server)
    (package / "client.py").write_text(client)
    if fedplat:
        (folder / "fedplat.toml").write_text(fedplat)
    return folder
