"""Apps in each style: what nodes receive, what apps remember, and what happens when a node fails."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedplat.errors import FedplatError, FlowerError
from fedplat.flower import records
from fedplat.flower.apps import AppCheckpoint, ClientAppRunner, ServerAppRun
from fedplat.flower.grid import MessageSet, NodeReply
from fedplat.flower.records import MessageFile
from support import flower, polling

LEGACY_CLIENT = """
import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

class Client(NumPyClient):
    def __init__(self, node):
        self.node = node

    def get_parameters(self, config):
        return [np.zeros(3)]

    def fit(self, parameters, config):
        return [each + self.node for each in parameters], 1 + self.node, {"node": self.node}

    def evaluate(self, parameters, config):
        return float(sum(each.sum() for each in parameters)), 1 + self.node, {}

app = ClientApp(client_fn=lambda context: Client(context.node_config["partition-id"]).to_client())
"""
LEGACY_SERVER = """
import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp

RESULTS = []

class Kept(FedAvg):
    def aggregate_fit(self, server_round, results, failures):
        found = super().aggregate_fit(server_round, results, failures)
        RESULTS.append((found[0].tensors, len(results), len(failures)))
        return found

def server_fn(context):
    strategy = Kept(initial_parameters=ndarrays_to_parameters([np.ones(3)]))
    return ServerAppComponents(config=ServerConfig(num_rounds=2, round_timeout=5.0), strategy=strategy)

app = ServerApp(server_fn=server_fn)
"""


def test_a_legacy_app(tmp_path: Path) -> None:
    run = flower.drive(flower.write_app(tmp_path, LEGACY_CLIENT, LEGACY_SERVER))
    mean = (0 * 1 + 1 * 2 + 2 * 3 + 3 * 4) / 10
    tensors, num_results, num_failures = run.result
    assert (num_results, num_failures) == (4, 0)
    assert np.frombuffer(tensors[0][-24:]) == pytest.approx(1 + 2 * mean)


def test_a_legacy_app_with_a_failed_and_a_late_client(tmp_path: Path) -> None:
    def fault(sent: MessageSet, node: int) -> NodeReply | str | None:
        return "late" if node == 2 else NodeReply(3, None, "out of memory") if node == 3 else None

    run = flower.drive(flower.write_app(tmp_path, LEGACY_CLIENT, LEGACY_SERVER), fault=fault)
    assert run.result[1:] == (2, 2)


def run_with_claims(folder: Path, claim: str) -> flower.Run:
    """Run an app of the old API for a round, in which clients claim numbers of examples."""
    client = LEGACY_CLIENT.replace("for each in parameters], 1 + self.node", f"for each in parameters], {claim}")
    app = flower.write_app(folder, client, LEGACY_SERVER.replace("num_rounds=2", "num_rounds=1"))
    return flower.drive(app, max_weight_factor=10.0)


def test_claims_in_the_old_api_are_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = run_with_claims(tmp_path, "10**15 if self.node == 3 else 1").result[0]
    np.testing.assert_allclose(np.frombuffer(tensors[0][-24:]), 1 + 33 / 13)
    assert "num_examples = 1e+15 of node 3 counts as 10, 10 times the median" in caplog.text


def test_clients_without_examples_are_named_in_the_old_api(tmp_path: Path) -> None:
    text = r"num_examples of all 4 replies add up to 0 \(node 0, node 1, node 2, node 3\); the ServerApp of"
    with pytest.raises(FedplatError, match=text):
        run_with_claims(tmp_path, "0")


NONFINITE = """
    content = RecordDict({"config": ConfigRecord({"number": 1}), "arrays": ArrayRecord([np.array([1.0, np.nan])])})
    grid.send_and_receive([Message(content, node, "query") for node in grid.get_node_ids()])
"""


def test_arrays_of_an_app_that_are_not_finite_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else the clients, which cannot train with them, would be blamed."""
    flower.drive(flower.write_app(tmp_path, ECHO, f"import numpy as np{OWN_HEAD}{NONFINITE}"))
    warnings = [each.getMessage() for each in caplog.records if each.name == "fedplat.flower.grid"]
    assert warnings == ["The app sends the array 0 with NaN or infinite numbers, which no client can train with."]


OWN_HEAD = """
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()
RESULTS = []

@app.main()
def main(grid, context):
    def ask(node, number, kind="query"):
        return Message(RecordDict({"config": ConfigRecord({"number": number})}), node, kind)
"""
ECHO = """
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

def reply(message, context, name):
    node = context.node_config["partition-id"]
    content = {"asked": MetricRecord({"number": message.content["config"]["number"], "node": node})}
    return Message(RecordDict({**content, "name": ConfigRecord({"name": name})}), reply_to=message)

for name in ("default", "custom", "other"):
    for kind in (app.train, app.evaluate, app.query):
        kind(name)(lambda message, context, name=f"{kind.__name__}.{name}": reply(message, context, name))
"""
DIFFERENT = """
    replies = list(grid.send_and_receive([ask(node, 10 * node) for node in grid.get_node_ids()], timeout=5))
    RESULTS.append([dict(each.content["asked"]) for each in replies])
"""


def test_no_node_receives_the_message_of_another_one(tmp_path: Path) -> None:
    run = flower.drive(flower.write_app(tmp_path, ECHO, OWN_HEAD + DIFFERENT))
    assert run.result == [{"number": 10 * node, "node": node} for node in range(4)]
    assert [each.nodes for each in run.sets] == [(0,), (1,), (2,), (3,)]


EQUAL = """
    replies = list(grid.send_and_receive([ask(node, node % 2) for node in grid.get_node_ids()], timeout=5))
    replies += grid.send_and_receive([ask(0, 5), ask(0, 5), ask(1, 5)], timeout=5)
    RESULTS.append([(each.content["asked"]["number"], each.content["asked"]["node"]) for each in replies])
"""


def test_equal_messages_are_one_set(tmp_path: Path) -> None:
    run = flower.drive(flower.write_app(tmp_path, ECHO, OWN_HEAD + EQUAL))
    assert run.result == [(0, 0), (1, 1), (0, 2), (1, 3), (5, 0), (5, 0), (5, 1)]
    assert [each.nodes for each in run.sets] == [(0, 2), (1, 3), (0, 1), (0,)]


ACTIONS = """
    kinds = ["train", "evaluate", "query", "train.custom", "evaluate.other", "query.custom", "train.missing"]
    names = []
    for kind in kinds:
        (reply,) = grid.send_and_receive([ask(1, 0, kind)])
        names.append(reply.error.reason if reply.has_error() else reply.content["name"]["name"])
    RESULTS.append(names)
"""


def test_actions_have_names(tmp_path: Path) -> None:
    run = flower.drive(flower.write_app(tmp_path, ECHO, OWN_HEAD + ACTIONS))
    *names, missing = run.result
    assert names == [
        "train.default",
        "evaluate.default",
        "query.default",
        "train.custom",
        "evaluate.other",
        "query.custom",
    ]
    assert re.search(r"the ClientApp of \w+, called with train\.missing, raised ValueError", missing)


POLLING = """
    import time
    waiting = set(grid.push_messages([ask(node, node) for node in grid.get_node_ids()]))
    found = []
    while waiting:
        for reply in grid.pull_messages(waiting):
            waiting.remove(reply.metadata.reply_to_message_id)
            found.append((reply.metadata.src_node_id, reply.error.reason if reply.has_error() else ""))
        time.sleep(0.001)
    RESULTS.append(sorted(found))
"""


def test_an_app_that_polls_for_replies_ends(tmp_path: Path) -> None:
    app = flower.write_app(tmp_path, ECHO, OWN_HEAD + POLLING)
    faults: dict[int, NodeReply | str] = {1: "late", 2: NodeReply(2, None, "out of memory")}
    run = flower.drive(app, fault=lambda sent, node: faults.get(node))
    assert run.result == [(0, ""), (1, "the reply did not arrive in time"), (2, "out of memory"), (3, "")]


UNREAD = """
    grid.push_messages([ask(2, 1)])
"""


def test_messages_whose_replies_are_not_read_are_sent(tmp_path: Path) -> None:
    run = flower.drive(flower.write_app(tmp_path, ECHO, OWN_HEAD + UNREAD))
    assert [each.nodes for each in run.sets] == [(2,)]


MODS = """
from contextlib import contextmanager
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

calls = []

def mod(name):
    def call(message, context, inner):
        calls.append(f"into {name}")
        reply = inner(message, context)
        calls.append(f"out of {name}")
        return reply
    return call

app = ClientApp(mods=[mod("a"), mod("b")])

@app.lifespan()
def lifespan(context):
    calls.append("enter")
    yield
    calls.append("exit")

@app.train(mods=[mod("c")])
def train(message, context):
    calls.append("train")
    seen = context.state.config_records.setdefault("seen", ConfigRecord({"rounds": []}))
    seen["rounds"] = [*seen["rounds"], len(seen["rounds"])]
    metrics = MetricRecord({"seen": seen["rounds"]})
    return Message(RecordDict({"calls": ConfigRecord({"calls": calls}), "metrics": metrics}), reply_to=message)
"""


def make_file(**content: Any) -> Any:
    return records.encode(MessageFile(RecordDict(content), "train"))


def test_mods_and_lifespans_are_called_in_order(tmp_path: Path) -> None:
    app = flower.write_app(tmp_path, MODS)
    runner = ClientAppRunner(app)
    first = runner.answer(make_file(), 0, {"partition-id": 0})
    inwards, outwards = ["enter", "into a", "into b", "into c", "train"], ["out of c", "out of b", "out of a", "exit"]
    # The list of the reply is the app's own, which grows until the reply is encoded.
    assert first.reply.content.config_records["calls"]["calls"] == inwards + outwards
    second = runner.answer(make_file(), 0, {}, state=first.state).reply.content
    assert second.config_records["calls"]["calls"] == (inwards + outwards) * 2


def test_the_state_of_an_app_grows(tmp_path: Path) -> None:
    runner, state = ClientAppRunner(flower.write_app(tmp_path, MODS)), None
    for number in range(4):
        found = runner.answer(make_file(), 0, {}, state=state)
        state = found.state
        assert found.reply.content.metric_records["metrics"]["seen"] == list(range(number + 1))


def test_the_context_has_the_configurations(tmp_path: Path) -> None:
    client = """
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message, context):
        seen = {**context.run_config, **context.node_config, "node": context.node_id}
        seen["from"] = message.metadata.src_node_id
        return Message(RecordDict({"seen": ConfigRecord(seen)}), reply_to=message)
    """
    app = flower.write_app(tmp_path, client, config="lr = 0.5\nopt.name = 'sgd'").with_run_config(["lr=1"])
    reply = ClientAppRunner(app).answer(make_file(), 7, {"partition-id": 3}).reply
    seen = reply.content.config_records["seen"]
    assert dict(seen) == {"lr": 1, "opt.name": "sgd", "partition-id": 3, "node": 7, "from": 1}


BYTES_CLIENT = """
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    node = context.node_config["partition-id"]
    trees = b'{"trees": [' + b"1" * (node + 1) + b"]}"
    arrays = ArrayRecord({"0": Array("", (), "trees", trees)})
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
"""
BYTES_SERVER = """
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()
RESULTS = []

class Longest(FedAvg):
    def aggregate_train(self, server_round, replies):
        found = max((each.content["arrays"] for each in replies), key=lambda arrays: len(arrays["0"].data))
        return found, None

@app.main()
def main(grid, context):
    strategy = Longest(fraction_evaluate=0.0, min_evaluate_nodes=0)
    RESULTS.append(strategy.start(grid, ArrayRecord({"0": Array("", (), "trees", b"")}), num_rounds=2))
"""


def test_models_may_be_bytes_of_any_kind(tmp_path: Path) -> None:
    app = flower.write_app(tmp_path, BYTES_CLIENT, BYTES_SERVER)
    for restart_at in ([], [1]):
        array = flower.drive(app, restart_at=restart_at).result.arrays["0"]
        assert (array.stype, array.data) == ("trees", b'{"trees": [1111]}')


# --- failures ---

WRONG_REPLIES: dict[str, dict[str, Any]] = {
    "no records": {},
    "no metrics": {"arrays": ArrayRecord([np.zeros(2)])},
    "no number of examples": {"arrays": ArrayRecord([np.zeros(2)]), "metrics": MetricRecord({"loss": 1.0})},
    "no example": {"arrays": ArrayRecord([np.zeros(2)]), "metrics": MetricRecord({"num-examples": 0})},
    "two models": {"a": ArrayRecord(), "b": ArrayRecord(), "metrics": MetricRecord({"num-examples": 1})},
    "a configuration": {"config": ConfigRecord({"a": 1})},
}


@pytest.mark.parametrize("name", WRONG_REPLIES)
def test_wrong_replies_of_all_clients_are_one_sentence(name: str, tmp_path: Path) -> None:
    wrong = records.encode(MessageFile(RecordDict(WRONG_REPLIES[name])))
    app = flower.write_app(tmp_path)
    with pytest.raises(FedplatError) as caught:
        flower.drive(app, fault=lambda sent, node: NodeReply.read(node, wrong))
    blamed = "the num-examples of all 4 replies" if name == "no example" else f"the ServerApp of {app.name} raised "
    assert str(caught.value).startswith(blamed)


def test_a_reply_that_is_no_message_is_an_error_reply(tmp_path: Path) -> None:
    from fedplat.model import Parameters

    other = Parameters.from_arrays({"a": np.zeros(2)})
    run = flower.drive(
        flower.write_app(tmp_path), fault=lambda sent, node: NodeReply.read(node, other) if node == 1 else None
    )
    assert run.final_model is not None


@pytest.mark.parametrize("happened", ["late", NodeReply(1, None, "out of memory")])
def test_a_strategy_goes_on_without_a_client(happened: NodeReply | str, tmp_path: Path) -> None:
    def fault(sent: MessageSet, node: int) -> NodeReply | str | None:
        return happened if node == 1 else None

    app = flower.write_app(tmp_path)
    calm = flower.drive(app, fault=fault)
    assert calm.result.train_metrics_clientapp[3]["train_loss"] == pytest.approx(1 / 3)
    for number in range(6):
        assert flower.drive(app, restart_at=[number], fault=fault).final_model == calm.final_model


def test_a_strategy_goes_on_without_any_client(tmp_path: Path) -> None:
    run = flower.drive(flower.write_app(tmp_path), fault=lambda sent, node: "late")
    assert len(run.sets) == 6
    assert run.final_model is not None


CLIENTS = {
    "raise ValueError('no data')": r"called with train, raised ValueError: no data \(",
    "raise SystemExit(3)": r"called with train, raised SystemExit: 3",
    "return None": r"answered train with a NoneType; expected a Message",
    "return Message(RecordDict({'a': ArrayRecord([np.array([1, np.nan])])}), reply_to=message)": (
        r"answered train with arrays that are not finite \(0\): the training has diverged"
    ),
    "return Message(Error(0, 'no data'), reply_to=message)": r"answered train with: no data",
}


@pytest.mark.parametrize("body", CLIENTS)
def test_a_client_that_fails_is_one_sentence(body: str, tmp_path: Path) -> None:
    client = f"""
    import numpy as np
    from flwr.app import ArrayRecord, Error, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message, context):
        {body}
    """
    with pytest.raises(FedplatError, match=CLIENTS[body]) as caught:
        flower.answer(flower.write_app(tmp_path, client), make_file())
    assert "\n" not in str(caught.value)


SERVERS = {
    "raise ValueError('no model')": r"raised ValueError: no model \(.*server_app\.py, line 10\)",
    "raise SystemExit(3)": r"raised SystemExit: 3",
    "grid.send_and_receive([3])": r"raised AttributeError",
}


@pytest.mark.parametrize("body", SERVERS)
def test_a_server_that_fails_is_one_sentence(body: str, tmp_path: Path) -> None:
    head = OWN_HEAD.partition("    def ask")[0]
    app = flower.write_app(tmp_path, ECHO, f"{head}    {body}\n")
    with pytest.raises(FedplatError, match=SERVERS[body]):
        flower.drive(app)


# Python prints nothing when a thread raises SystemExit, but pytest warns.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("style", ["strategy", pytest.param("legacy", marks=pytest.mark.slow), "polling"])
def test_a_closed_run_ends_its_threads(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "strategy": (flower.CLIENT, ""),
        "legacy": (LEGACY_CLIENT, LEGACY_SERVER),
        "polling": (ECHO, OWN_HEAD + POLLING),
    }
    of_app, start = list[threading.Thread](), threading.Thread.start

    def note(thread: threading.Thread) -> None:
        """Others may start threads meanwhile, such as the pool of an event loop."""
        if threading.current_thread() in of_app or thread.name.startswith("ServerApp"):
            of_app.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    run = ServerAppRun(flower.write_app(tmp_path, *texts[style]), lambda: [0, 1])
    assert run.advance() is not None
    run.close()
    polling.until(lambda: not any(thread.is_alive() for thread in of_app), "the threads of the app to end")
    assert of_app


def test_a_checkpoint_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(FlowerError, match=r"checkpoint"):
        ServerAppRun(flower.write_app(tmp_path), lambda: [0], checkpoint=AppCheckpoint(b"x", make_file()))
