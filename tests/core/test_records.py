"""Records as messages of the protocol: every field of both, and what a receiver refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from google.protobuf.message import Message

from fedplat.gossip.steps import Broken, GossipSetup, Leave, SiloMessage, SiloStep
from fedplat.wire import messages
from fedplat.wire.v1 import gossip_pb2
from fedplat.wire.v1.gossip_pb2 import SiloReport
from wire import make_golden

LIMIT = 2**16


def full_messages() -> Iterator[tuple[Message, type[msgspec.Struct]]]:
    """Messages with every field set, one for each alternative, and their records."""
    yield make_golden.example(gossip_pb2.GossipSetup.DESCRIPTOR), GossipSetup
    for field in SiloReport.DESCRIPTOR.fields:
        message = gossip_pb2.SiloMessage.FromString(full(gossip_pb2.SiloMessage))
        message.report.ParseFromString(full(SiloReport, field.name))
        yield message, SiloMessage
    for field in gossip_pb2.SiloInstruction.DESCRIPTOR.fields:
        step = gossip_pb2.SiloStep.FromString(full(gossip_pb2.SiloStep))
        step.instruction.ParseFromString(full(gossip_pb2.SiloInstruction, field.name))
        yield step, SiloStep


def full(kind: Any, choice: str = "") -> bytes:
    return make_golden.example(kind.DESCRIPTOR, choice).SerializeToString()


@pytest.mark.parametrize(("message", "kind"), list(full_messages()))
def test_messages_have_the_fields_of_their_records(message: Message, kind: type[msgspec.Struct]) -> None:
    record = messages.to_record(message, kind, LIMIT)
    assert messages.to_message(type(message), record) == message


def test_numbers_that_are_zero_and_what_is_unset() -> None:
    """The protocol sends neither."""
    message = SiloMessage(report=Broken(0, "c-1", 0))
    assert messages.to_record(messages.to_message(gossip_pb2.SiloMessage, message), SiloMessage, LIMIT) == message
    assert messages.to_record(gossip_pb2.SiloMessage(), SiloMessage, LIMIT) == SiloMessage()
    step = SiloStep(instruction=Leave(), known="", round=0, remaining_s=0.0)
    assert messages.to_record(messages.to_message(gossip_pb2.SiloStep, step), SiloStep, LIMIT) == step


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (SiloReport(), "missing required field `type`"),
        (SiloReport(broken=SiloReport.Broken(sender="x" * 201)), "`str` of length <= 200"),
        (SiloReport(broken=SiloReport.Broken(sender="c", step=2**32 - 1)), "`int` <= 2147483648"),
        (SiloReport(key=SiloReport.OfferKey(key=b"x", largest=1.0)), "`bytes` of length >= 32"),
        (SiloReport(key=SiloReport.OfferKey(largest=float("nan"))), "largest is nan; expected a finite number"),
        (SiloReport(announce=SiloReport.Announce(metrics={"loss": float("inf")})), "metrics is inf"),
        (SiloReport(exchanged=SiloReport.Exchanged(missed=["c"] * 201)), "length <= 200"),
        (SiloReport(exchanged=SiloReport.Exchanged(missed=["c"] * 1001)), "1001 entries; expected at most 1000"),
        (SiloReport(exchanged=SiloReport.Exchanged(missed=["c" * 99] * 700)), "bytes; expected at most 65536"),
    ],
)
def test_what_a_receiver_refuses(report: SiloReport, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        messages.to_record(gossip_pb2.SiloMessage(report=report), SiloMessage, LIMIT)
