"""Plugins of a client's owner: announced to the server and used for its jobs, which never make it import code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec import Struct

from fedplat import codecs
from fedplat.codecs.codec import Source
from fedplat.errors import PluginError
from fedplat.model import Blocks, Parameters, Vector, VectorBlocks
from fedplat.wire.v1 import model_pb2
from fedplat_client import Client, Task, TrainResult
from support import plugins
from support.clients import add_one
from support.fake_fleet import FakeFleet

MakeClient = Callable[..., Client]
HALVES = '{"codec":"halves","fails":""}'


class Silent(Struct, frozen=True):
    """A codec that sends nothing, or fails."""

    where: str = ""

    def build(self) -> codecs.Codec:
        if self.where == "build":
            raise KeyError("build")

        def write(vector: Blocks, rng: np.random.Generator) -> Iterator[bytes]:
            if self.where == "write":
                raise KeyError("write")
            yield from (b"" for _ in vector)

        def read(source: Source, size: int) -> Iterator[Vector]:
            return iter(VectorBlocks(np.zeros(size, np.float32)))

        return codecs.Codec(write=write, read=read, max_bytes=lambda size: 0)


def run(client: Client) -> None:
    client.add_trainer("digits", add_one)
    client.run(max_tasks=1)


def test_a_plugin_is_announced_and_used(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, base: Parameters, tmp_path: Path
) -> None:
    file = plugins.write_file(tmp_path)
    fleet.assign(model, uplink=HALVES)
    run(make_client(plugins={"codecs.halves": f"{file}:Halves", "codecs.silent": Silent}))
    (report,) = fleet.requests["Report"]
    change = np.float16(1).tobytes()
    assert fleet.uploads[report.digest].count(change) >= base["weight"].size
    check_in = fleet.requests["CheckIn"][0]
    assert list(check_in.codecs) == sorted([*codecs.CODECS, "halves", "silent"])
    assert list(check_in.algorithms) == []


def test_trainers_get_the_plugins_of_the_client(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    fleet.assign(model)
    client, seen = make_client(plugins={"codecs.silent": Silent}), list[Task]()

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        seen.append(task)
        return add_one(task)

    client.run(max_tasks=1)
    assert seen[0].plugins.names(codecs.KIND) == [*codecs.CODECS, "silent"]


@pytest.mark.parametrize("where", ["build", "write"])
def test_a_codec_that_raises_fails_the_task_only(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, where: str
) -> None:
    fleet.assign(model, uplink=f'{{"codec":"silent","where":"{where}"}}')
    run(make_client(plugins={"codecs.silent": Silent}))
    (failed,) = fleet.requests["Fail"]
    assert failed.reason == model_pb2.REASON_TRAINER_ERROR
    assert f"{where}() raised KeyError: '{where}'" in failed.text


def test_a_job_cannot_make_a_client_import_anything(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, tmp_path: Path
) -> None:
    file = plugins.write_file(tmp_path, name="elsewhere.py")
    fleet.assign(model, uplink=f'{{"codec":"{file}:Halves"}}')
    run(make_client(plugins={"codecs.silent": Silent}))
    (failed,) = fleet.requests["Fail"]
    assert failed.reason == model_pb2.REASON_UNKNOWN_CODEC
    assert failed.text.endswith("supported codecs: none, bf16, quantize, topk, eden, silent")
    assert not any(name.startswith("elsewhere") for name in sys.modules)


@pytest.mark.parametrize(
    ("label", "source", "text"),
    [
        ("rules.mine", Silent, "rules.mine: the kind is 'rules'; expected one of codecs"),
        ("silent", Silent, "silent: expected KIND.NAME="),
        ("codecs.bf16", Silent, "bf16 is a built-in name"),
        ("codecs.silent", 3, "codecs.silent is of type int; expected a class"),
    ],
)
def test_a_wrong_plugin_is_refused(make_client: MakeClient, label: str, source: type, text: str) -> None:
    with pytest.raises(PluginError, match=text):
        make_client(plugins={label: source})
