"""Strategies on fedplat's grid: results equal those of Flower's own rounds, also after any crash."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fedplat import claims
from fedplat.flower.grid import FlowerGrid
from support import flower
from support.flower import mark_slow

DRIFT = """
class Drift(FedAvg):
    def __init__(self, **options):
        super().__init__(**options)
        self.velocity, self.rounds, self.lock = None, [], __import__("threading").Lock()

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        values = arrays.to_numpy_ndarrays()
        noise = [value + np.random.normal(size=value.shape).astype(value.dtype) for value in values]
        before = self.velocity or [0 * value for value in values]
        self.velocity = [0.5 * old + new for old, new in zip(before, noise)]
        self.rounds.append(server_round)
        return ArrayRecord(self.velocity), MetricRecord({**metrics, "seen": sum(self.rounds)})
"""
STRATEGIES = {
    "FedAvg": ("FedAvg()", ""),
    "FedAvg of half": ("FedAvg(fraction_train=0.5, fraction_evaluate=0.25)", ""),
    "FedAvg without evaluation": ("FedAvg(fraction_evaluate=0.0, min_evaluate_nodes=0)", ""),
    "FedProx": ("FedProx(proximal_mu=0.1)", ""),
    "FedAvgM": ("FedAvgM(server_momentum=0.9)", ""),
    "FedAdam": ("FedAdam(eta=0.1)", ""),
    "FedAdagrad": ("FedAdagrad(eta=0.1)", ""),
    "FedYogi": ("FedYogi(eta=0.1)", ""),
    "FedMedian": ("FedMedian()", ""),
    "FedTrimmedAvg": ("FedTrimmedAvg(beta=0.2)", ""),
    "Krum": ("Krum(num_malicious_nodes=1)", ""),
    "MultiKrum": ("MultiKrum(num_malicious_nodes=1, num_nodes_to_select=2)", ""),
    "Bulyan": ("Bulyan(num_malicious_nodes=1)", ""),
    "QFedAvg": ("QFedAvg(client_learning_rate=0.1, q=0.2, train_loss_key='train_loss')", ""),
    "server-side privacy": ("DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 8)", ""),
    "adaptive privacy": ("DifferentialPrivacyServerSideAdaptiveClipping(FedAdam(eta=0.1), 0.5, 8)", ""),
    "the user's": ("Drift(fraction_train=0.75)", DRIFT),
}
RESTARTED = [
    "FedAvg",
    "FedAvg of half",
    "FedAvgM",
    "FedAdam",
    "FedMedian",
    "Krum",
    "adaptive privacy",
    "the user's",
]


@pytest.mark.parametrize("name", mark_slow(STRATEGIES, fast=("FedAvg of half", "FedAdam", "the user's")))
def test_equals_the_rounds_of_flower(name: str, tmp_path: Path) -> None:
    app = flower.write_app(tmp_path, server=flower.strategy_server(*STRATEGIES[name]))
    expected = flower.run_with_flower(app, num_nodes=8)
    found = flower.drive(app, num_nodes=8).result
    for ours, theirs in zip(flower.arrays_of(found), flower.arrays_of(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)
    assert found.train_metrics_clientapp == expected.train_metrics_clientapp
    assert found.evaluate_metrics_clientapp == expected.evaluate_metrics_clientapp
    assert found.evaluate_metrics_serverapp == expected.evaluate_metrics_serverapp


@pytest.mark.parametrize("name", mark_slow(RESTARTED, fast=("FedAvg of half",)))
def test_a_crash_at_any_set_of_messages_changes_no_byte(name: str, tmp_path: Path) -> None:
    app = flower.write_app(tmp_path, server=flower.strategy_server(*STRATEGIES[name]))
    calm = flower.drive(app, num_nodes=8)
    assert calm.final_model is not None
    for number in range(len(calm.sets)):
        disturbed = flower.drive(app, num_nodes=8, restart_at=[number])
        assert flower.node_sequence(disturbed.sets) == flower.node_sequence(calm.sets)
        assert disturbed.final_model == calm.final_model
        assert str(disturbed.result) == str(calm.result)


def test_a_crash_at_every_set_of_messages_changes_no_byte(tmp_path: Path) -> None:
    app = flower.write_app(tmp_path, server=flower.strategy_server(*STRATEGIES["the user's"]))
    calm = flower.drive(app)
    assert flower.drive(app, restart_at=range(6)).final_model == calm.final_model


TWO_STARTS = """
    first, second = FedAvg(fraction_train=0.5), FedAdam(eta=0.1)
    result = first.start(grid, arrays, num_rounds=2)
    result = second.start(grid, result.arrays, num_rounds=2)
    RESULTS.append(result)
"""


def test_an_app_may_start_several_strategies(tmp_path: Path) -> None:
    head = flower.strategy_server("None").partition("    strategy = ")[0]
    app = flower.write_app(tmp_path, server=head + TWO_STARTS)
    expected = flower.arrays_of(flower.run_with_flower(app))
    calm = flower.drive(app)
    assert len(calm.sets) == 8
    for number in (None, *range(8)):
        run = flower.drive(app, restart_at=[] if number is None else [number])
        for ours, theirs in zip(flower.arrays_of(run.result), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs, strict=True)


def test_a_checkpoint_takes_the_arrays_from_the_message(tmp_path: Path) -> None:
    server = flower.strategy_server("FedAvg()").replace("size=(3, 4)", "size=(300, 400)")
    calm, crashed = (flower.drive(flower.write_app(tmp_path, server=server), restart_at=at) for at in ([], [1, 4]))
    for run in (calm, crashed):
        assert all(
            len(state) < 20_000 < 480_000 < sent.file.schema.size_bytes
            for state, sent in zip(run.checkpoints, run.sets, strict=True)
        )
    for ours, theirs in zip(flower.arrays_of(crashed.result), flower.arrays_of(calm.result), strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)


def test_messages_of_the_app_after_a_round_without_evaluation_make_no_checkpoint(tmp_path: Path) -> None:
    more = """
    content = RecordDict({"config": ConfigRecord({"server-round": 9}), "arrays": arrays})
    grid.send_and_receive([Message(content, 0, "train")])
"""
    server = flower.strategy_server("FedAvg(fraction_evaluate=0.0, min_evaluate_nodes=0)")
    run = flower.drive(flower.write_app(tmp_path, server=server + more))
    assert [bool(each) for each in run.checkpoints] == [True, True, True, False]


def test_the_metrics_of_a_round_are_published(tmp_path: Path) -> None:
    from fedplat.flower.apps import ServerAppRun
    from fedplat.flower.grid import NodeReply

    app = flower.write_app(tmp_path)
    run = ServerAppRun(app, lambda: [0, 1])
    sent = run.advance()
    while sent is not None:
        sent = run.advance(
            [NodeReply.read(node, flower.answer(app, sent.file.to_parameters(), node)) for node in sent.nodes]
        )
    metrics = run.grid.take_metrics()
    assert metrics["round"] == 3.0
    assert metrics["train_loss"] == pytest.approx(1 / 3)


def test_metrics_that_cannot_be_stored_are_left_out() -> None:
    grid = FlowerGrid(lambda: [0])
    grid.publish({"server-round": 1, "loss": math.nan, "accuracy": 0.5, "text": "no number", "x" * 200: 1.0})
    assert grid.take_metrics() == {"server-round": 1.0, "accuracy": 0.5}
    for start in range(0, 400, 100):
        grid.publish({f"metric {number:050}": math.inf if number % 2 else 1.0 for number in range(start, start + 100)})
    grid.publish({f"metric {0:050}": 2.0})
    found = grid.take_metrics()
    assert len(found) == claims.DEFAULT_LIMITS.num_metrics
    assert found[f"metric {0:050}"] == 2.0
    assert claims.check_metrics(found) == ""
    grid.publish({f"{number:0100}": 1.0 for number in range(60)})
    assert sum(map(len, grid.take_metrics())) <= claims.DEFAULT_LIMITS.name_bytes
