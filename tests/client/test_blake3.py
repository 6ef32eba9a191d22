"""Digests of BLAKE3, where a client and its server have it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import grpc
import pytest

from fedplat.model import Parameters
from fedplat.wire import digests
from fedplat.wire.v1 import model_pb2
from support.fake_fleet import FakeFleet
from support.raw_client import digest_of
from support.transfers import MakeClient, models, run, trained_update

pytest.importorskip("blake3")


@pytest.mark.parametrize("is_there", [True, False])
def test_both_ends_need_blake3(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    base: Parameters,
    monkeypatch: pytest.MonkeyPatch,
    is_there: bool,
) -> None:
    if not is_there:
        monkeypatch.setattr(digests, "has_blake3", lambda: False)
    update = trained_update(base).to_bytes()
    sha256 = hashlib.sha256(update).hexdigest()
    for blake3 in (True, False):
        fleet.assign(model, blake3=blake3)
    run(make_client(), num_tasks=2)
    reports = fleet.requests["Report"]
    assert [each.digest for each in reports] == [digest_of(update, "b3:") if is_there else sha256, sha256]
    assert [each.upload_id.startswith("b3:") for each in reports] == [is_there, False]


@pytest.mark.parametrize("is_right", [True, False])
def test_a_download_is_checked_by_the_digest_of_blake3(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, tmp_path: Path, is_right: bool
) -> None:
    model.blake3 = digest_of(fleet.models[model.digest] if is_right else b"another model", "b3:")
    fleet.cut_downloads = [2500]
    fleet.assign(model)
    run(make_client())
    assert (models(tmp_path) / f"{model.digest}.safetensors").exists() == is_right
    assert fleet.calls.count("Report") == int(is_right)
    assert ("Fail" in fleet.calls) != is_right


def test_an_operator_who_removes_blake3_gets_the_update_under_its_sha256(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, base: Parameters
) -> None:
    fleet.failures["Upload"] = [grpc.StatusCode.UNAVAILABLE]  # a part was hashed
    fleet.digest_last = False
    fleet.assign(model, digest_last=True, blake3=True)
    run(make_client())
    update = trained_update(base).to_bytes()
    digest = hashlib.sha256(update).hexdigest()
    assert (fleet.requests["Report"][0].digest, bytes(fleet.uploads[digest])) == (digest, update)
