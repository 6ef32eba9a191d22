"""One client's reply does not end the rounds of all others."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

from fedplat.errors import FedplatError
from fedplat.flower import records
from fedplat.flower.grid import NodeReply
from fedplat.flower.records import MessageFile
from fedplat.flower.server import ServerAppRun
from support import flower

NUM_NODES = 4
SERVER = """
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
import numpy as np

app = ServerApp()

@app.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=4)
    strategy.start(grid, ArrayRecord([np.zeros(3, "f4")]), num_rounds=1)
"""


def reply(shape: tuple[int, ...] = (3,), weight: object = 2, name: str = "0", metric: str = "train_loss") -> RecordDict:
    metrics = MetricRecord({"num-examples": weight, metric: 1.0})  # pyright: ignore[reportArgumentType]
    return RecordDict({"arrays": ArrayRecord({name: Array(np.ones(shape, "f4"))}), "metrics": metrics})


BAD: dict[str, Callable[[], RecordDict]] = {
    "another shape": lambda: reply(shape=(1,)),
    "another key": lambda: reply(name="weight"),
    "another metric": lambda: reply(metric="loss"),
    "no arrays": lambda: RecordDict({"metrics": MetricRecord({"num-examples": 1})}),
    "no metrics": lambda: RecordDict({"arrays": ArrayRecord({"0": Array(np.ones(3, "f4"))})}),
    "a negative weight": lambda: reply(weight=-8),
    "a weight that is no number": lambda: reply(weight=math.nan),
    "a weight above all bounds": lambda: reply(weight=1e30),
    "a list as weight": lambda: reply(weight=[1, 2]),
}


def train(app_folder: Path, bad: Callable[[], RecordDict] | None, num_bad: int = 1) -> np.ndarray[Any, Any]:
    """Return the arrays after a round in which the first nodes reply otherwise than the rest."""
    app = flower.write_app(app_folder, server=SERVER)
    run = ServerAppRun(app, lambda: list(range(NUM_NODES)))
    exchange = run.advance()
    while exchange is not None:
        replies = []
        for node in exchange.nodes:
            content = bad() if bad is not None and node < num_bad else reply()
            replies.append(NodeReply.read(node, records.encode(MessageFile(content))))
        exchange = run.advance(replies)
    assert run.grid.final_arrays is not None
    return run.grid.final_arrays["0"].numpy()


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_reply_that_deviates_is_refused(tmp_path: Path, bad: Callable[[], RecordDict]) -> None:
    np.testing.assert_array_equal(train(tmp_path, bad), np.ones(3, "f4"))


def test_replies_without_a_majority_are_left_to_the_strategy(tmp_path: Path) -> None:
    with pytest.raises(FedplatError, match="the ServerApp of"):
        train(tmp_path, BAD["another key"], num_bad=2)


def test_good_replies_are_not_touched(tmp_path: Path) -> None:
    np.testing.assert_array_equal(train(tmp_path, None), np.ones(3, "f4"))
