"""Clients exchange models only if their owners allow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from fedplat.gossip import stated, steps
from fedplat.secure_aggregation.setup import FEATURE
from fedplat.wire.v1 import gossip_pb2, model_pb2
from fedplat_client import Client, ClientOptions, Task, TrainResult
from fedplat_client.cancellation import StopSignal
from fedplat_client.commands import main
from support.clients import add_one
from support.fake_fleet import FakeFleet

MakeClient = Callable[..., Client]
SETUP = gossip_pb2.GossipSetup(trains=True, exchange="neighbours")
LISTEN = {"peer_listen": "127.0.0.1:7445"}


def stop(_: StopSignal, seconds: float) -> bool:
    """Stops instead of waiting."""
    return True


@pytest.mark.parametrize(
    ("options", "takes"),
    [
        ({}, False),
        ({"exchange_models": True}, True),
        (LISTEN, True),
        ({"exchange_models": True, "require_secure_aggregation": True}, False),
        ({**LISTEN, "require_local_noise": True}, False),
    ],
)
def test_the_owner_decides(options: dict[str, Any], takes: bool) -> None:
    assert ClientOptions(**options).takes_exchanges is takes


def test_the_largest_share_is_that_of_coordinators() -> None:
    assert ClientOptions().max_share == stated.MAX_SHARE


@pytest.mark.parametrize("exchanges", [False, True])
def test_the_server_learns_who_takes_part(fleet: FakeFleet, make_client: MakeClient, exchanges: bool) -> None:
    fleet.refuse(model_pb2.REASON_NO_WORK, None)
    client = make_client(exchange_models=exchanges, wait=stop)
    client.add_trainer("digits", add_one)
    client.run()
    expected = [FEATURE, steps.FEATURE] if exchanges else [FEATURE]
    assert [list(each.features) for each in fleet.requests["CheckIn"]] == [expected]


@pytest.mark.parametrize(
    ("options", "setup", "text"),
    [
        ({}, SETUP, "does not allow that other clients see its models"),
        ({"exchange_models": True, "require_secure_aggregation": True}, SETUP, "only with secure aggregation"),
        ({"exchange_models": True}, gossip_pb2.GossipSetup(exchange="star"), "Invalid enum value 'star'"),
        ({"exchange_models": True}, gossip_pb2.GossipSetup(exchange="x" * 100_000), "expected at most 65536"),
    ],
)
def test_other_assignments_are_refused_before_the_training(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    options: dict[str, Any],
    setup: gossip_pb2.GossipSetup,
    text: str,
) -> None:
    def train(task: Task) -> TrainResult:
        raise AssertionError("it trained")

    fleet.assign(model, gossip_setup=setup)
    client = make_client(**options)
    client.add_trainer("digits", train)
    client.run(max_tasks=1)
    (failed,) = fleet.requests["Fail"]
    assert failed.reason == model_pb2.REASON_UNSAFE_AGGREGATION
    assert text in failed.text
    assert "Step" not in fleet.calls


def test_the_option_of_the_command() -> None:
    shown = CliRunner().invoke(main, ["run", "--help"]).output
    assert "--exchange-models" in shown
    assert "FEDPLAT_EXCHANGE_MODELS" in shown
