"""Whole rounds: how they are measured, and that they are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import flare
import systems
import whole_rounds
from deployment import intervals
from models import MODELS
from systems import Plan, Sample
from whole_rounds import Budget, Measured

SMALL = ("4KB", 2)


@pytest.mark.slow
def test_ours_and_the_limit_are_measured() -> None:
    """The peers would be too, if they were installed and there were minutes."""
    names = ["fedplat", "limit", "limit, TLS"]
    found = whole_rounds.measure(SMALL, names, Budget(3, 60.0, math.inf), times=1)
    assert {name: len(found.seconds(name)) for name in found.samples} == dict.fromkeys(names, 3)
    made = whole_rounds.report({SMALL: found})
    assert [row[:2] for row in made.rows] == [("4KB, 2 clients", name) for name in names]
    assert all(isinstance(cell, int | float) and cell > 0 for row in made.rows for cell in row[2:])


def test_a_peer_that_is_not_installed_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(systems, "PEERS", tmp_path)
    found = whole_rounds.measure(SMALL, ["Flower", "NVFlare"], Budget(1, 1.0, math.inf))
    assert not found.samples
    assert len(found.failures) == 2
    assert all("make bench-peers" in failure for failure in found.failures)


def test_nothing_is_started_when_the_time_is_over() -> None:
    found = whole_rounds.measure(SMALL, ["fedplat"], Budget(1, 1.0, -math.inf), times=1)
    assert found.failures == ["4KB, 2 clients, from fedplat on: no time was left (--minutes)"]


def test_ours_are_measured_before_between_and_after_the_peers() -> None:
    assert list(whole_rounds.turns(["limit", "fedplat", "NVFlare", "Flower"], 3)) == [
        *("limit", "fedplat"),
        *("NVFlare", "limit", "fedplat"),
        *("Flower", "limit", "fedplat"),
    ]


def test_ratios_are_of_the_medians() -> None:
    found = Measured({"fedplat": [Sample([1.0, 9.0], 1), Sample([2.0], 2**20)], "Flower": [Sample([40.0], 1)]}, [])
    assert whole_rounds.row(SMALL, "fedplat", found) == ("4KB, 2 clients", "fedplat", 2.0, 1.0, None, None, 1, 3)
    assert whole_rounds.row(SMALL, "Flower", found)[3] == 20.0


def test_resnet50_is_set_beside_one_tensor_of_equal_bytes() -> None:
    def took(seconds: float) -> Measured:
        return Measured({"fedplat": [Sample([seconds], 1)]}, [])

    made = whole_rounds.report({("ResNet-50", 2): took(3.0), ("one-tensor", 2): took(2.0)})
    assert "ResNet-50, 2 clients: 1.50 x the time of one tensor of equal bytes." in made.notes


def test_a_line_that_a_peer_has_not_finished_is_not_read() -> None:
    assert systems.moments("") == []
    assert systems.moments("10.5\n12.0\n1") == [10.5, 12.0]
    assert intervals(systems.moments("10.5\n12.0\n12.25\n")) == [1.5, 0.25]


def test_only_the_tuned_nvflare_is_told_how_often_to_poll(tmp_path: Path) -> None:
    plan = Plan(MODELS["4KB"], 2, 5, 1.0)
    server, client = flare.job(plan, tmp_path, None)
    assert "server" not in server
    assert "default_task_fetch_interval" not in client
    server, client = flare.job(plan, tmp_path, 0.01)
    assert server["server"]["task_request_interval"] == 0.01
    assert server["workflows"][0]["args"]["task_check_period"] == client["default_task_fetch_interval"] == 0.01
