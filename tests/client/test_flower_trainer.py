"""A Flower ClientApp as trainer and evaluator, without a server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("flwr")

from fedplat.client_state import ClientState
from fedplat.errors import FedplatError, FlowerError, UserCodeError
from fedplat.flower.app import read_app
from fedplat.model import Parameters
from fedplat_client.commands import main
from fedplat_client.task import Task
from fedplat_client.trainers.flower import STATE, FlowerTrainer

PROJECT = """
[project]
name = "small"

[tool.flwr.app.components]
serverapp = "small_app:server"
clientapp = "small_app:app"

[tool.flwr.app.config]
step = 0.5
how = "well"
"""
APP = """
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

def reply(msg, arrays, metrics, more=None):
    content = RecordDict({"metrics": MetricRecord(metrics), **(more or {})})
    if arrays is not None:
        content["arrays"] = ArrayRecord({key: Array(np.asarray(value)) for key, value in arrays.items()})
    return Message(content=content, reply_to=msg)

@app.train()
def train(msg, context):
    how = context.run_config["how"]
    config = msg.content["config"]
    seen = context.state["seen"]["rounds"] if "seen" in context.state else []
    context.state["seen"] = ConfigRecord({"rounds": [*seen, config["server-round"]]})
    step = context.run_config["step"] * config["lr"]
    arrays = {key: array.numpy() + step for key, array in msg.content["arrays"].items()}
    metrics = {"num-examples": 5 + context.node_config.get("partition-id", 0), "seen": len(seen), "losses": [1.0, 2.0]}
    if how == "without":
        del metrics["num-examples"]
    if how == "keys":
        arrays.pop("bias")
    if how == "shape":
        arrays["bias"] = arrays["bias"][:1]
    if how == "diverge":
        arrays["bias"] = arrays["bias"] * np.nan
    if how == "raise":
        raise RuntimeError("no data")
    if how == "twice":
        return reply(msg, arrays, metrics, {"more": MetricRecord({"a": 1})})
    return reply(msg, None if how == "nothing" else arrays, metrics)

@app.evaluate()
def evaluate(msg, context):
    loss = float(sum(np.abs(array.numpy()).sum() for array in msg.content["arrays"].values()))
    return reply(msg, None, {"num-examples": 3, "loss": loss})
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "small_app.py").write_text(APP)
    return tmp_path


def make_trainer(folder: Path, *changes: str, partition: int = 2) -> FlowerTrainer:
    app = read_app(folder).with_run_config(changes)
    return FlowerTrainer(app=app, node_config={"partition-id": partition, "num-partitions": 3})


def make_task(state: ClientState | None = None, number: int = 1) -> Task:
    arrays = {"weight": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}
    return Task(
        name="small",
        parameters=Parameters.from_arrays(arrays),
        config={"lr": 0.5},
        round=number,
        client_state=state or ClientState(),
    )


def test_training_and_evaluation(folder: Path) -> None:
    trainer, task = make_trainer(folder), make_task(number=4)
    result = trainer(task)
    assert result.num_examples == 7
    assert result.metrics == {"seen": 0.0}
    update = result.to_update(make_task().parameters)
    np.testing.assert_array_equal(update["weight"], np.full((2, 2), 0.25, np.float32))
    score = trainer.evaluate(make_task())
    assert (score.num_examples, score.metrics) == (3, {"loss": 6.0})


def test_the_state_counts_only_if_the_client_keeps_it(folder: Path) -> None:
    trainer, first = make_trainer(folder), ClientState()
    trainer(make_task(first))
    assert set(first.contents) == {STATE}
    assert trainer(make_task()).metrics["seen"] == 0, "the update was not merged"
    second = ClientState(first.contents)
    assert trainer(make_task(second, 2)).metrics["seen"] == 1
    assert trainer(make_task(ClientState(second.contents), 3)).metrics["seen"] == 2


def test_evaluation_without_state_adds_none(folder: Path) -> None:
    state = ClientState()
    make_trainer(folder).evaluate(make_task(state))
    assert not state.changed


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("without", FlowerError, "the ClientApp of small answered without the metric num-examples; expected it in its"),
        ("nothing", FlowerError, "the ClientApp of small answered train without arrays; expected an ArrayRecord"),
        ("twice", FlowerError, "the ClientApp of small answered with 2 MetricRecords; expected one"),
        ("diverge", FlowerError, "the ClientApp of small answered train with arrays that are not finite"),
        ("raise", UserCodeError, "the ClientApp of small, called with train, raised RuntimeError: no data"),
        ("keys", FedplatError, "tensor 'bias' is missing"),
        ("shape", FedplatError, "tensor 'bias' is float32"),
    ],
)
def test_bad_replies(how: str, kind: type[FedplatError], text: str, folder: Path) -> None:
    task = make_task()
    with pytest.raises(kind) as caught:
        make_trainer(folder, f"how={how}")(task).to_update(task.parameters)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--run-config", "lr=1"], "small has no key 'lr' in [tool.flwr.app.config]"),
        (["--node-config", "partition"], "'partition': expected KEY=VALUE"),
        (["--label", "partition_id"], "--label 'partition_id' cannot be read"),
        ([], "ticket"),
    ],
)
def test_the_command_refuses_mistakes_in_one_line(arguments: list[str], text: str, folder: Path) -> None:
    command = ["flower", str(folder), "--data-dir", str(folder / "data"), *arguments]
    done = CliRunner().invoke(main, command, env={"FEDPLAT_TICKET": "", "FEDPLAT_TICKET_FILE": ""})
    assert done.exit_code == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_without_an_app(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["flower", str(tmp_path)])
    assert done.exit_code == 2
    assert "expected the folder of a Flower app" in done.stderr
