"""Flower apps for tests: their folders, a loop that delivers messages in this process, and Flower's own rounds."""

from __future__ import annotations

import copy
import importlib
import itertools
import random
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from flwr.app import Context, Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid

from fedplat.errors import FedplatError
from fedplat.flower import identity
from fedplat.flower.app import FlowerApp, read_app
from fedplat.flower.apps import AppCheckpoint, ClientAppRunner, ServerAppRun
from fedplat.flower.grid import MessageSet, NodeReply
from fedplat.flower.identity import SERVER_NODE_ID
from fedplat.model import Parameters

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "flower" / "digits"
_numbers = itertools.count()


def mark_slow(names: Collection[str], fast: Collection[str]) -> list[Any]:
    """The names as parameters of a test; only those in `fast` belong to `make test`."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


CLIENT = """
import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict, ConfigRecord, Array, Message
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    node, number = context.node_config["partition-id"], message.content["config"]["server-round"]
    rng = np.random.default_rng([node, number])
    arrays = [each + rng.normal(size=each.shape).astype(each.dtype) for each in
              message.content["arrays"].to_numpy_ndarrays()]
    metrics = MetricRecord({"num-examples": node + 1, "train_loss": 1.0 / number, "model": [1]})
    del metrics["model"]
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)

@app.evaluate()
def evaluate(message, context):
    node = context.node_config["partition-id"]
    total = sum(float(each.sum()) for each in message.content["arrays"].to_numpy_ndarrays())
    metrics = MetricRecord({"num-examples": node + 1, "eval_loss": total})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
"""
"""A ClientApp that moves each array by random numbers of the node and the round."""

SERVER = """
import random
import numpy as np
from flwr.app import ArrayRecord, MetricRecord, ConfigRecord, RecordDict, Message
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import *
{definitions}
app = ServerApp()
RESULTS = []

@app.main()
def main(grid, context):
    random.seed(1)
    np.random.seed(1)
    arrays = ArrayRecord([np.random.normal(size=(3, 4)).astype(np.float32), np.arange(5, dtype=np.float32)])
    strategy = {strategy}
    result = strategy.start(grid, arrays, num_rounds=3, timeout=60,
                            evaluate_fn=lambda number, arrays: MetricRecord({{"round": number}}))
    RESULTS.append(result)
"""
"""A ServerApp in Flower's current template style."""


class Run(msgspec.Struct, frozen=True):
    """What a run of an app has sent and returned."""

    sets: list[MessageSet]
    result: Any
    final_model: Parameters | None
    checkpoints: list[bytes]


def write_app(folder: Path, client: str = CLIENT, server: str = "", config: str = "") -> FlowerApp:
    """Write an app, whose package has a name of its own, and return it."""
    package = f"flower_app_{next(_numbers)}"
    folder = folder / package
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").touch()
    (folder / package / "client_app.py").write_text(textwrap.dedent(client))
    (folder / package / "server_app.py").write_text(textwrap.dedent(server or strategy_server("FedAvg()")))
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{package}"\n'
        f'[tool.flwr.app.components]\nserverapp = "{package}.server_app:app"\nclientapp = "{package}.client_app:app"\n'
        f"[tool.flwr.app.config]\n{config}\n"
    )
    return read_app(folder)


def strategy_server(strategy: str, definitions: str = "") -> str:
    """Return the text of a ServerApp that starts a strategy."""
    return SERVER.format(strategy=strategy, definitions=definitions)


def server_module(app: FlowerApp) -> Any:
    """Return the imported module of the ServerApp."""
    return importlib.import_module(app.serverapp.partition(":")[0])


def answer(app: FlowerApp, file: Parameters, node: int = 0, **options: Any) -> Parameters:
    """Return the ClientApp's reply to one message."""
    return ClientAppRunner(app).answer(file, node, {"partition-id": node}, **options).reply.to_parameters()


Fault = Callable[[MessageSet, int], NodeReply | str | None]


def drive(
    app: FlowerApp,
    num_nodes: int = 4,
    restart_at: Collection[int] = (),
    fault: Fault = lambda sent, node: None,
    max_weight_factor: float = 0.0,
) -> Run:
    """Run an app to its end; `restart_at` are the messages during which the server crashes and continues.

    `fault` returns what happens in place of a node's answer: its reply, or "late" for none.
    """
    runner, states, nodes = ClientAppRunner(app), {}, list(range(num_nodes))
    run = ServerAppRun(app, lambda: nodes)
    run.grid.max_weight_factor = max_weight_factor
    module = server_module(app)
    sets: list[MessageSet] = []
    checkpoints: list[bytes] = []
    sent = run.advance()
    while sent is not None:
        checkpoints.append(run.state)
        if len(sets) in restart_at:
            run.close()
            random.seed(99)
            np.random.seed(99)
            run = ServerAppRun(app, lambda: nodes, checkpoint=AppCheckpoint(checkpoints[-1], sent.file.to_parameters()))
        sets.append(sent)
        replies = [_reply(runner, sent, node, states, fault) for node in sent.nodes]
        sent = run.advance([each for each in replies if each is not None])
    result = module.RESULTS[-1] if getattr(module, "RESULTS", None) else None
    return Run(sets, result, run.final_model, checkpoints)


def _reply(
    runner: ClientAppRunner, sent: MessageSet, node: int, states: dict[int, Parameters], fault: Fault
) -> NodeReply | None:
    happened = fault(sent, node)
    if happened == "late" or isinstance(happened, NodeReply):
        return None if happened == "late" else happened
    config = {"partition-id": node, "num-partitions": 4}
    try:
        answered = runner.answer(sent.file.to_parameters(), node, config, state=states.get(node))
    except FedplatError as exc:
        return NodeReply(node, None, str(exc))
    states[node] = answered.state
    return NodeReply.read(node, answered.reply.to_parameters())


class DirectGrid(Grid):
    """A grid without fedplat: it calls the ClientApp for each message, in order."""

    def __init__(self, app: FlowerApp, num_nodes: int) -> None:
        self._client_app = app.load_client_app()
        self._nodes = list(range(num_nodes))
        self._states = {node: RecordDict() for node in self._nodes}

    def set_run(self, run: Any) -> None:
        """Do nothing."""

    @property
    def run(self) -> Any:
        """There is no information about the run."""
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return self._nodes

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [self._answer(message) for message in messages]

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        metadata = Metadata(1, "m", SERVER_NODE_ID, node, "", "", time.time(), 60.0, message.metadata.message_type)
        asked = Message(content=copy.deepcopy(message.content), metadata=metadata)  # pyright: ignore
        context = Context(1, node, {"partition-id": node, "num-partitions": 4}, self._states[node], {})
        identity.assume(node)
        try:
            reply = self._client_app(asked, context)
        except Exception as exc:
            reply = Message(Error(1, str(exc)), reply_to=asked)
        identity.assume(SERVER_NODE_ID)
        return reply


def run_with_flower(app: FlowerApp, num_nodes: int = 4) -> Any:
    """Return the result of an app whose strategy runs Flower's own rounds."""
    identity.assume(SERVER_NODE_ID)
    context = Context(1, SERVER_NODE_ID, {}, RecordDict(), dict(app.run_config))
    app.load_server_app()(DirectGrid(app, num_nodes), context)
    return server_module(app).RESULTS[-1]


def arrays_of(result: Any) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of a strategy's result."""
    return list(result.arrays.to_numpy_ndarrays())


def node_sequence(sets: Sequence[MessageSet]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the types and the nodes of sets of messages."""
    return [(each.message_type, each.nodes) for each in sets]
