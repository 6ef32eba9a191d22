"""Uploads by several calls: when there are more, and that each byte arrives once."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2
from fedplat_client._work import upload_calls
from support.fake_fleet import FakeFleet
from support.transfers import MakeClient, run, trained_update

NUM_VALUES = 1_300_000


@pytest.fixture
def large(fleet: FakeFleet) -> Parameters:
    return Parameters.from_arrays({"weight": np.arange(NUM_VALUES, dtype=np.float32)})


@pytest.fixture
def latent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part shows that the line has latency."""
    monkeypatch.setattr(upload_calls, "LATENT_PART_S", 0.0)
    monkeypatch.setattr(upload_calls, "MEASURED_PARTS", 2)
    monkeypatch.setattr(upload_calls, "WORTH_BYTES", 0)


def headers_of(fleet: FakeFleet) -> list[fleet_pb2.UploadHeader]:
    return fleet.requests["Upload"]


def is_whole(fleet: FakeFleet, base: Parameters) -> bool:
    """Whether the server has the reported update."""
    (report,) = fleet.requests["Report"]
    return bytes(fleet.uploads[report.digest]) == trained_update(base).to_bytes()


@pytest.mark.usefixtures("latent")
def test_several_calls_bring_an_update_over_a_line_with_latency(
    fleet: FakeFleet, make_client: MakeClient, large: Parameters
) -> None:
    fleet.assign(fleet.add_model(large))
    run(make_client())
    assert [each.additional for each in headers_of(fleet)] == [False, True, True, True]
    assert len({each.upload_id for each in headers_of(fleet)}) == 1
    assert not any(fleet.positioned[:3])  # the parts before a server said that it knows positions
    assert any(fleet.positioned)
    assert is_whole(fleet, large)


@pytest.mark.slow
def test_one_call_is_enough_where_parts_are_sent_at_once(
    fleet: FakeFleet, make_client: MakeClient, large: Parameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_calls, "LATENT_PART_S", float("inf"))
    fleet.assign(fleet.add_model(large))
    run(make_client())
    assert len(headers_of(fleet)) == 1
    assert "QueryUpload" not in fleet.calls


@pytest.mark.slow
@pytest.mark.usefixtures("latent")
def test_a_server_before_0_2_gets_all_by_one_call(fleet: FakeFleet, make_client: MakeClient, large: Parameters) -> None:
    fleet.max_calls = 0
    fleet.assign(fleet.add_model(large))
    run(make_client())
    assert len(headers_of(fleet)) == 1
    assert not any(fleet.positioned)
    assert is_whole(fleet, large)


@pytest.mark.slow
@pytest.mark.usefixtures("latent")
@pytest.mark.parametrize("code", ["TOO_MANY_STREAMS", "TOO_MANY_UPLOADS", "WRONG_OFFSET"])
def test_when_more_calls_are_refused_one_brings_the_rest(
    fleet: FakeFleet, make_client: MakeClient, large: Parameters, code: str
) -> None:
    fleet.refuse_additional = (grpc.StatusCode.RESOURCE_EXHAUSTED, code)
    fleet.assign(fleet.add_model(large))
    run(make_client())
    check_the_rest(fleet, large)


@pytest.mark.slow
@pytest.mark.usefixtures("latent")
def test_when_one_of_them_breaks_one_brings_the_rest(
    fleet: FakeFleet, make_client: MakeClient, large: Parameters
) -> None:
    fleet.cut_uploads = [len(trained_update(large).to_bytes()), 2**21]  # the second call ends when the file has 2 MiB
    fleet.assign(fleet.add_model(large))
    run(make_client())
    check_the_rest(fleet, large)


def check_the_rest(fleet: FakeFleet, base: Parameters) -> None:
    """More calls were begun once, and the update has arrived."""
    assert sum(each.additional for each in headers_of(fleet)) in (1, 2, 3)
    assert headers_of(fleet)[0].offset == 0
    assert "Fail" not in fleet.calls
    assert is_whole(fleet, base)
