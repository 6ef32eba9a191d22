"""How a client gets a version that is close to one that it has, from a scripted server on a real socket."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fedplat import codecs
from fedplat.aggregate import Accumulator, Contribution, compress_step, seed_of, weighted_mean
from fedplat.codecs.container import Format, options_to_text
from fedplat.model import WINDOW, Carry, Parameters
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import Client, Task, TrainResult
from fedplat_client._state.data_dir import DataDirectory
from support.fake_fleet import FakeFleet

MakeClient = Callable[..., Client]
EDEN = codecs.Eden(bits=4)


def first_model(carry: Carry = "keep") -> Parameters:
    """Every floating dtype, longer than a window, and a counter."""
    rng = np.random.default_rng(0)
    arrays = {
        "double": rng.normal(size=1000),
        "single": rng.normal(size=WINDOW + 12_345).astype(np.float32),
        "bf16": rng.normal(size=777).astype(ml_dtypes.bfloat16),
        "half": rng.normal(size=3001).astype(np.float16),
        "steps": np.arange(5),
        "mask": rng.random(7) < 0.5,
    }
    return Parameters.from_arrays(arrays, carry)


def next_version(base: Parameters, options: codecs.CodecOptions = EDEN, seed: int = 1) -> tuple[Parameters, bytes]:
    """The next version, made as the server makes it, and the file of its delta."""
    payloads: list[bytes] = []
    rule = compress_step(options.build(), seed_of("job", 1), payloads.append)(weighted_mean())
    accumulator, rng = Accumulator(base.schema, rule), np.random.default_rng(seed)
    update = base.copy()
    for name in ("double", "single", "bf16", "half"):
        update[name] = (0.01 * rng.normal(size=update[name].shape)).astype(update[name].dtype)
    update["steps"] += seed
    accumulator.fold(update, Contribution(1.0))
    model, _ = accumulator.finish(base, rule.init(base.schema.num_floating))
    return model, b"".join(Format(options, base.schema).frame_payload(payloads, model))


def add_delta(
    fleet: FakeFleet, base: model_pb2.ModelRef, content: bytes, options: codecs.CodecOptions = EDEN
) -> fleet_pb2.ModelDelta:
    digest = hashlib.sha256(content).hexdigest()
    fleet.models[digest] = content
    return fleet_pb2.ModelDelta(
        digest=digest, size_bytes=len(content), base_digest=base.digest, codec=options_to_text(options)
    )


@dataclasses.dataclass
class Versions:
    """Two versions on the server, and an assignment for each."""

    fleet: FakeFleet
    first: Parameters
    second: Parameters
    content: bytes
    options: codecs.CodecOptions = EDEN

    def assign(self, **changes: object) -> tuple[model_pb2.ModelRef, model_pb2.ModelRef, fleet_pb2.ModelDelta]:
        base, model = self.fleet.add_model(self.first), self.fleet.add_model(self.second)
        delta = add_delta(self.fleet, base, self.content, self.options)
        for name, value in changes.items():
            setattr(delta, name, value)
        self.fleet.assign(base)
        self.fleet.assign(model, delta=delta)
        return base, model, delta

    @property
    def downloaded(self) -> list[str]:
        """The digests of all downloads."""
        return [request.digest for request in self.fleet.requests["Download"]]


@pytest.fixture
def versions(fleet: FakeFleet) -> Versions:
    base = first_model()
    return Versions(fleet, base, *next_version(base))


def run(client: Client, num_tasks: int = 2, between: Callable[[], None] = lambda: None) -> list[Parameters]:
    """The models that the trainer was given."""
    seen: list[Parameters] = []

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        seen.append(task.parameters.copy())
        if len(seen) == 1:
            between()
        task.parameters["half"] += np.float16(1)
        return TrainResult(parameters=task.parameters, num_examples=1)

    client.run(max_tasks=num_tasks)
    return seen


@pytest.fixture
def folder(fleet: FakeFleet, tmp_path: Path) -> Path:
    """The folder in which a client of `make_client` keeps models."""
    return DataDirectory(tmp_path / "data", fleet.address, "demo").models


@pytest.mark.parametrize("carry", ["keep", "max"])
@pytest.mark.parametrize("name", codecs.CODECS)
def test_a_version_is_made_from_the_one_before(
    fleet: FakeFleet, make_client: MakeClient, folder: Path, name: str, carry: Carry
) -> None:
    options = codecs.Plain(zstd=True) if name == "none" else codecs.CODECS[name]()
    base = first_model(carry)
    versions = Versions(fleet, base, *next_version(base, options), options)
    assert versions.second["steps"].tolist() == ([1, 2, 3, 4, 5] if carry == "max" else [0, 1, 2, 3, 4])
    first, second, delta = versions.assign()
    assert run(make_client()) == [versions.first, versions.second]
    assert versions.downloaded == [first.digest, delta.digest]
    assert fleet.sent_bytes == [first.size_bytes, len(versions.content)]
    assert {path.name for path in folder.iterdir()} == {f"{one.digest}.safetensors" for one in (first, second)}


def test_a_delta_is_resumed_where_it_broke(versions: Versions, make_client: MakeClient) -> None:
    first, _, delta = versions.assign()
    versions.fleet.cut_downloads = [first.size_bytes, 50_000]
    assert run(make_client()) == [versions.first, versions.second]
    assert versions.downloaded == [first.digest, delta.digest, delta.digest]
    assert versions.fleet.sent_bytes == [first.size_bytes, 50_000, delta.size_bytes - 50_000]


def test_a_client_without_the_base_gets_the_whole_model(
    versions: Versions, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedplat_client")
    _, second, _ = versions.assign()
    del versions.fleet.work[0]
    assert run(make_client(), num_tasks=1) == [versions.second]
    assert versions.downloaded == [second.digest]
    assert "The delta's base is not in the cache" in caplog.text


def test_who_has_a_damaged_base_gets_the_whole_model(versions: Versions, make_client: MakeClient, folder: Path) -> None:
    first, second, _ = versions.assign()

    def damage() -> None:
        path = folder / f"{first.digest}.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    assert run(make_client(), between=damage) == [versions.first, versions.second]
    assert versions.downloaded == [first.digest, second.digest]


@pytest.mark.parametrize(
    ("change", "downloads", "said"),
    [
        ({"codec": '{"codec":"of tomorrow"}'}, [], "is not supported"),
        ({"codec": '{"codec":"eden","bits":4,"secret":1}'}, [], "is not supported"),
        ({"codec": '{"codec":"bf16"}'}, ["delta"], "is encoded with"),
        ({"base_digest": "../../etc/passwd"}, [], "expected 64 lower-case hexadecimal digits"),
        ({"digest": "../../etc/passwd"}, [], "expected 64 lower-case hexadecimal digits"),
        ({"size_bytes": 2**40}, [], "expected a base and a model of equal size, and a smaller delta"),
        ({"size_bytes": 5}, ["delta"], "sends more than the 5 bytes"),
    ],
)
def test_a_delta_of_no_use_costs_a_download_at_most(
    versions: Versions,
    make_client: MakeClient,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, object],
    downloads: list[str],
    said: str,
) -> None:
    first, second, delta = versions.assign(**change)
    assert run(make_client()) == [versions.first, versions.second]
    names = {first.digest: "first", second.digest: "second", delta.digest: "delta"}
    assert [names[digest] for digest in versions.downloaded] == ["first", *downloads, "second"]
    assert "The delta cannot be used; downloading the full model" in caplog.text
    assert said in caplog.text


def other_payload(versions: Versions) -> bytes:
    """A well-formed delta to another version."""
    return next_version(versions.first, seed=2)[1]


def cut(versions: Versions) -> bytes:
    """A delta that ends when most of the model is written."""
    return versions.content[:-100]


def not_numbers(versions: Versions) -> bytes:
    prefix = len(Format(EDEN, versions.first.schema).prefix)
    return versions.content[:prefix] + b"\xff" * (len(versions.content) - prefix)


@pytest.mark.parametrize("made", [other_payload, cut, not_numbers])
def test_a_delta_that_leads_elsewhere_is_not_believed(
    versions: Versions,
    make_client: MakeClient,
    caplog: pytest.LogCaptureFixture,
    made: Callable[[Versions], bytes],
    folder: Path,
) -> None:
    versions.content = made(versions)
    first, second, delta = versions.assign()
    assert run(make_client()) == [versions.first, versions.second]
    assert versions.downloaded == [first.digest, delta.digest, second.digest]
    assert [request.offset for request in versions.fleet.requests["Download"]] == [0, 0, 0]
    assert "The delta cannot be used" in caplog.text
    assert {path.suffix for path in folder.iterdir()} == {".safetensors"}, "files of the delta are left"


def test_a_delta_with_other_bytes_than_announced_is_not_used(
    versions: Versions, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, delta = versions.assign()
    versions.fleet.models[delta.digest] = versions.content[:-1] + b"!"
    assert run(make_client()) == [versions.first, versions.second]
    assert versions.downloaded == [first.digest, delta.digest, second.digest]
    assert "the downloaded file has the digest" in caplog.text


def test_a_cache_without_room_for_both_takes_the_whole_model(
    versions: Versions, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, _ = versions.assign()
    assert run(make_client(cache_limit_bytes=2 * first.size_bytes)) == [versions.first, versions.second]
    assert versions.downloaded == [first.digest, second.digest]
    assert "cache_limit_bytes" in caplog.text


def test_the_base_stays_while_others_are_evicted(versions: Versions, make_client: MakeClient, folder: Path) -> None:
    """The cache has room for exactly the two models and the delta, and contains another file."""
    stale = folder / f"{'a' * 64}.safetensors"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"x" * 1000)
    first, second, delta = versions.assign()
    limit = 2 * first.size_bytes + len(versions.content)
    assert run(make_client(cache_limit_bytes=limit)) == [versions.first, versions.second]
    assert versions.downloaded == [first.digest, delta.digest]
    assert {path.stem for path in folder.iterdir()} == {first.digest, second.digest}


def test_a_model_beyond_the_limit_is_used_and_not_kept(
    versions: Versions, make_client: MakeClient, folder: Path
) -> None:
    first, second, _ = versions.assign()
    assert run(make_client(cache_limit_bytes=first.size_bytes - 1)) == [versions.first, versions.second]
    assert versions.downloaded == [first.digest, second.digest]
    assert list(folder.iterdir()) == []


def test_a_model_that_is_larger_than_the_client_takes_is_refused(
    versions: Versions, make_client: MakeClient, folder: Path
) -> None:
    first, _, _ = versions.assign()
    assert run(make_client(max_model_bytes=first.size_bytes - 1)) == []
    assert versions.downloaded == []
    assert list(folder.iterdir()) == []
    reasons = [(request.reason, request.text) for request in versions.fleet.requests["Fail"]]
    assert [reason for reason, _ in reasons] == [model_pb2.REASON_TRANSFER_FAILED] * 2
    assert f"has {first.size_bytes} bytes; this client accepts at most {first.size_bytes - 1}" in reasons[0][1]
