"""A Flower app that learns digits with NumPy: a process that imports PyTorch takes three times as long to start.

docs/flower.md runs the example with PyTorch, whose app has the same name, files and options.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

TASK = '''
from pathlib import Path

import numpy as np

FILE = np.load(Path(__file__).with_name("digits.npz"))
PICTURES, DIGITS = (FILE["pictures"] / 16.0).astype(np.float32), FILE["digits"]


def zeros():
    return {"weight": np.zeros((64, 10), np.float32), "bias": np.zeros(10, np.float32)}


def rows_of(partition, num_partitions):
    """The rows of a partition: those to train with, and those to test with."""
    rows = np.arange(partition, len(DIGITS), num_partitions)
    return rows[len(rows) // 5 :], rows[: len(rows) // 5]


def probabilities(arrays, rows):
    scores = PICTURES[rows] @ arrays["weight"] + arrays["bias"]
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def train(arrays, rows, epochs, batch_size, learning_rate):
    """Softmax regression; the mean loss."""
    losses = []
    for _ in range(epochs):
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            error = probabilities(arrays, batch)
            losses.append(-np.log(error[np.arange(len(batch)), DIGITS[batch]] + 1e-9).mean())
            error[np.arange(len(batch)), DIGITS[batch]] -= 1.0
            arrays["weight"] -= np.float32(learning_rate / len(batch)) * (PICTURES[batch].T @ error)
            arrays["bias"] -= np.float32(learning_rate / len(batch)) * error.sum(axis=0)
    return float(np.mean(losses))


def accuracy(arrays, rows):
    return float((probabilities(arrays, rows).argmax(axis=1) == DIGITS[rows]).mean())
'''
CLIENT = """
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits import task

app = ClientApp()


def arrays_of(message):
    return {name: each.numpy().copy() for name, each in message.content["arrays"].items()}


def rows_of(context):
    config = context.node_config
    return task.rows_of(config["partition-id"], config["num-partitions"])


@app.train()
def train(message, context):
    arrays, (rows, _), config = arrays_of(message), rows_of(context), context.run_config
    loss = task.train(arrays, rows, config["local-epochs"], config["batch-size"], message.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(rows)})
    record = ArrayRecord({name: Array(each) for name, each in arrays.items()})
    return Message(content=RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    _, rows = rows_of(context)
    metrics = MetricRecord({"eval_acc": task.accuracy(arrays_of(message), rows), "num-examples": len(rows)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
"""
SERVER = """
import random

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from digits import task

app = ServerApp()


@app.main()
def main(grid, context):
    random.seed(0)  # the strategy draws the same clients each time
    arrays = ArrayRecord({name: Array(each) for name, each in task.zeros().items()})
    # All three nodes train, also one that has to be started again first: otherwise its speed would decide.
    fraction = context.run_config["fraction-evaluate"]
    strategy = FedAvg(fraction_evaluate=fraction, min_train_nodes=3, min_available_nodes=3)
    strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=evaluate_centrally,
    )


def evaluate_centrally(server_round, arrays):
    found = {name: each.numpy() for name, each in arrays.items()}
    return MetricRecord({"accuracy": task.accuracy(found, np.arange(len(task.DIGITS)))})
"""


def write_app(folder: Path, example: Path, name: str = "digits") -> Path:
    """Write the app with the project file of the example, but its own name; the app's folder."""
    app = folder / name
    package = app / "digits"
    package.mkdir(parents=True)
    pictures, digits = load_digits(return_X_y=True)
    np.savez(package / "digits.npz", pictures=pictures, digits=digits)
    for file, text in (("__init__", ""), ("task", TASK), ("client_app", CLIENT), ("server_app", SERVER)):
        (package / f"{file}.py").write_text(text)
    project = (example / "pyproject.toml").read_text()
    assert '\nname = "digits"\n' in project
    (app / "pyproject.toml").write_text(project.replace('\nname = "digits"\n', f'\nname = "{name}"\n'))
    return app
