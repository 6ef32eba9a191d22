"""What a client sends when its assignment names a codec."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from fedplat import codecs, wire
from fedplat.codecs.container import Format, options_to_text
from fedplat.model import Parameters
from fedplat.wire.v1 import model_pb2
from fedplat_client import Client, Task, TrainResult
from support.clients import add_one
from support.fake_fleet import FakeFleet

MakeClient = Callable[..., Client]
BF16 = codecs.Bf16()


def expected(base: Parameters, options: codecs.CodecOptions) -> bytes:
    """What a client with the random numbers of the fixture sends for `add_one`."""
    trained = base.copy()
    trained["weight"] += np.float32(1)
    rng = np.random.default_rng(random.Random(0).getrandbits(128))
    return b"".join(Format(options, base.schema).encode(trained.minus(base), rng))


def run(client: Client, num_tasks: int = 1) -> None:
    client.add_trainer("digits", add_one)
    client.run(max_tasks=num_tasks)


@pytest.mark.parametrize("name", codecs.CODECS)
@pytest.mark.parametrize("inline", [False, True])
def test_an_update_is_encoded(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, base: Parameters, name: str, inline: bool
) -> None:
    options = codecs.CODECS[name]()
    fleet.assign(model, uplink=options_to_text(options))
    run(make_client(inline_limit_bytes=wire.INLINE_BYTES if inline else 0))
    (report,) = fleet.requests["Report"]
    assert bool(report.update) == inline == ("Upload" not in fleet.calls)
    assert fleet.uploads[report.digest] == expected(base, options)
    assert fleet.requests["CheckIn"][0].codecs == sorted(codecs.CODECS)


def test_what_counts_for_the_inline_limit_is_the_encoded_size(fleet: FakeFleet, make_client: MakeClient) -> None:
    base = Parameters.from_arrays({"weight": np.zeros(1000, "f4")})
    model = fleet.add_model(base)
    for uplink in ("", options_to_text(BF16)):
        fleet.assign(model, uplink=uplink)
    run(make_client(inline_limit_bytes=3000), num_tasks=2)
    assert [bool(report.update) for report in fleet.requests["Report"]] == [False, True]


@pytest.mark.parametrize("uplink", ['{"codec":"of tomorrow"}', '{"codec":"bf16","bits":3}', "rubbish"])
def test_an_unknown_codec_ends_the_task_before_the_training(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, uplink: str
) -> None:
    fleet.assign(model, uplink=uplink)
    client = make_client()
    client.add_trainer("digits", lambda task: pytest.fail("it trained"))
    client.run(max_tasks=1)
    (failed,) = fleet.requests["Fail"]
    assert failed.reason == model_pb2.REASON_UNKNOWN_CODEC
    assert "supported codecs: " in failed.text
    assert "Download" not in fleet.calls


def test_a_result_that_cannot_be_encoded_is_the_trainers_failure(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    fleet.assign(model, uplink=options_to_text(BF16))
    client = make_client()

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        task.parameters["bias"][3] = np.nan
        return TrainResult(parameters=task.parameters, num_examples=1)

    client.run(max_tasks=1)
    (failed,) = fleet.requests["Fail"]
    assert (failed.reason, "NaN" in failed.text) == (model_pb2.REASON_TRAINER_ERROR, True)


def test_bytes_that_the_server_lost_are_sent_again_as_they_were(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, base: Parameters
) -> None:
    fleet.assign(model, uplink=options_to_text(BF16))
    fleet.truncate_at_report = 100
    fleet.cut_uploads = [1000, 3000]
    run(make_client())
    first, second = fleet.requests["Report"]
    assert first == second
    assert fleet.uploads[first.digest] == expected(base, BF16)
