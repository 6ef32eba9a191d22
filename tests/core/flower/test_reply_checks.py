"""One client's reply does not end or decide the rounds of all others."""

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
from fedplat.flower.apps import ServerAppRun
from fedplat.flower.grid import NodeReply
from fedplat.flower.records import MessageFile
from support import flower

NUM_NODES = 4
SERVER = """
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, FedXgbBagging
import json
import numpy as np

class Strict(FedAvg):
    seen = 0

    def aggregate_train(self, server_round, replies):
        self.seen += 1
        replies = list(replies)
        for reply in replies:
            if reply.has_content() and reply.content["metrics"]["train_loss"] < 0:
                raise ValueError("a loss below 0")
        assert self.seen == 1, "a failed aggregation has left something"
        return super().aggregate_train(server_round, replies)

class NoErrors(FedAvg):
    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        assert all(reply.content for reply in replies)  # raises for an error reply, as Flower's wrappers of privacy do
        return super().aggregate_train(server_round, replies)

class Summing(FedAvg):
    def aggregate_train(self, server_round, replies):
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        total = np.sum([each.content["arrays"]["0"].numpy() for each in valid], axis=0, dtype="f8")
        with np.errstate(over="ignore"):
            return ArrayRecord([total.astype("f4")]), None

app = ServerApp()

@app.main()
def main(grid, context):
    strategy = {strategy}(fraction_evaluate=0.0, min_train_nodes=4)
    strategy.start(grid, ArrayRecord([np.{arrays}]), num_rounds=1)
"""


def reply(
    values: Any = 1.0, weight: object = 2, name: str = "0", metric: str = "train_loss", loss: object = 1.0
) -> RecordDict:
    array = Array(np.broadcast_to(np.asarray(values, "f4"), 3) if np.ndim(values) == 0 else np.asarray(values))
    metrics = MetricRecord({"num-examples": weight, metric: loss})  # pyright: ignore[reportArgumentType]
    return RecordDict({"arrays": ArrayRecord({name: array}), "metrics": metrics})


BAD: dict[str, Callable[[], RecordDict]] = {
    "another shape": lambda: reply(np.ones(1, "f4")),
    "numbers that cannot be averaged": lambda: reply(np.array(["a", "b", "c"])),
    "another key": lambda: reply(name="weight"),
    "another metric": lambda: reply(metric="loss"),
    "a list as a metric": lambda: reply(loss=[1.0, 2.0]),
    "no arrays": lambda: RecordDict({"metrics": MetricRecord({"num-examples": 1})}),
    "no metrics": lambda: RecordDict({"arrays": ArrayRecord({"0": Array(np.ones(3, "f4"))})}),
    "a negative weight": lambda: reply(weight=-8),
    "a weight that is no number": lambda: reply(weight=math.nan),
    "a weight above all bounds": lambda: reply(weight=1e30),
    "a list as weight": lambda: reply(weight=[1, 2]),
}


def train(
    app_folder: Path,
    bad: Callable[[], RecordDict] | None,
    *,
    num_bad: int = 1,
    good: Callable[[], RecordDict] = reply,
    **server: str,
) -> tuple[np.ndarray[Any, Any], dict[int, str]]:
    """Return the arrays after a round in which the first nodes reply otherwise than the rest, and who was refused."""
    options = {"strategy": "FedAvg", "arrays": 'zeros(3, "f4")', **server}
    app = flower.write_app(app_folder, server=SERVER.format_map(options))
    run = ServerAppRun(app, lambda: list(range(NUM_NODES)))
    run.grid.max_weight_factor = 10.0
    sent, refused = run.advance(), dict[int, str]()
    while sent is not None:
        replies = []
        for node in sent.nodes:
            content = bad() if bad is not None and node < num_bad else good()
            replies.append(NodeReply.read(node, records.encode(MessageFile(content))))
        sent = run.advance(replies)
        refused |= run.grid.refused
    assert run.grid.final_arrays is not None
    return run.grid.final_arrays["0"].numpy(), refused


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_reply_that_deviates_is_refused(tmp_path: Path, bad: Callable[[], RecordDict]) -> None:
    values, refused = train(tmp_path, bad)
    np.testing.assert_array_equal(values, np.ones(3, "f4"))
    assert list(refused) == [0]


def test_replies_without_a_majority_are_left_to_the_strategy(tmp_path: Path) -> None:
    with pytest.raises(FedplatError, match="the ServerApp of"):
        train(tmp_path, BAD["another key"], num_bad=2)


def test_good_replies_are_not_touched(tmp_path: Path) -> None:
    values, refused = train(tmp_path, None)
    np.testing.assert_array_equal(values, np.ones(3, "f4"))
    assert not refused


def test_a_reply_that_only_the_strategy_can_judge_costs_its_sender(tmp_path: Path) -> None:
    values, refused = train(tmp_path, lambda: reply(loss=-1.0), strategy="Strict")
    np.testing.assert_array_equal(values, np.ones(3, "f4"))
    assert refused == {0: "the strategy cannot use it: ValueError: a loss below 0"}


def test_a_strategy_that_fails_with_error_replies_gets_none(tmp_path: Path) -> None:
    values, refused = train(tmp_path, BAD["another key"], strategy="NoErrors")
    np.testing.assert_array_equal(values, np.ones(3, "f4"))
    assert list(refused) == [0]


def booster(num_trees: int, base_score: str = "5E-1") -> bytes:
    model = {
        "gbtree_model_param": {"num_trees": str(num_trees), "num_parallel_tree": "1"},
        "iteration_indptr": list(range(num_trees + 1)),
        "trees": [{"id": number} for number in range(num_trees)],
        "tree_info": [0] * num_trees,
    }
    learner = {"gradient_booster": {"model": model}, "learner_model_param": {"base_score": base_score}}
    return records.msgspec.json.encode({"learner": learner})


def trees(content: bytes) -> Callable[[], RecordDict]:
    return lambda: reply(np.frombuffer(content, np.uint8))


def sent(content: bytes) -> str:
    return f"frombuffer({content!r}, np.uint8)"


def test_bytes_that_are_no_booster_cost_their_sender(tmp_path: Path) -> None:
    arrays, good = sent(booster(1)), trees(booster(1))
    values, refused = train(tmp_path, trees(b"{}"), strategy="FedXgbBagging", arrays=arrays, good=good)
    assert len(records.msgspec.json.decode(values.tobytes())["learner"]["gradient_booster"]["model"]["trees"]) == 4
    assert list(refused) == [0]


@pytest.mark.parametrize(
    ("good", "odd", "text"),
    [
        (booster(1), booster(1, "7E-1"), "different base_score (5E-1, 7E-1)"),
        (booster(3), booster(3), "kept 5 of 13 trees of XGBoost"),
        (booster(1), booster(1), ""),
    ],
)
def test_boosters_that_do_not_add_up_are_reported(
    good: bytes, odd: bytes, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, trees(odd), strategy="FedXgbBagging", arrays=sent(booster(1)), good=trees(good))
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("fedplat")]
    assert len(warnings) == bool(text), warnings
    assert text in "".join(warnings)


def test_a_reply_that_makes_the_mean_infinite_costs_its_sender(tmp_path: Path) -> None:
    large = np.full(3, 3e38, "f4")
    values, refused = train(
        tmp_path, lambda: reply(large), num_bad=1, strategy="Summing", good=lambda: reply(large / 4)
    )
    np.testing.assert_allclose(values, 0.75 * large)
    assert list(refused) == [0]


def test_no_client_claims_more_than_ten_times_the_median(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values, refused = train(tmp_path, lambda: reply(5.0, weight=10**15))
    np.testing.assert_allclose(values, (10 * 5.0 + 3 * 1.0) / 13)
    assert not refused
    assert "num-examples = 1e+15 of node 0 counts as 20" in caplog.text


def test_replies_without_any_example_are_named(tmp_path: Path) -> None:
    with pytest.raises(FedplatError, match=r"the num-examples of all 4 replies add up to 0 \(from node 0, node 1"):
        train(tmp_path, None, good=lambda: reply(weight=0))
