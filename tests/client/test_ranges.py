"""Downloads over several connections: how many there are, and that each byte arrives once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client._work import ranges
from fedplat_client._work.ranges import FAST_BYTES_PER_S, MEASURED_S, StreamCount
from support.fake_fleet import PIECE, FakeFleet
from support.transfers import MakeClient, run, trained_update

MB = 10**6
RANGE = 7 * PIECE
SIZE = 1000 * MB


def count(rates: Iterable[float], most: int = 4, size: int = SIZE) -> list[int]:
    """The numbers of streams after times with these rates, in bytes a second."""
    now = 0.0
    streams, received, numbers = StreamCount(most, lambda: now), 0, list[int]()
    for rate in rates:
        for _ in range(5):
            now += MEASURED_S / 5
            received += int(rate * MEASURED_S / 5)
            streams.note(received, size - received)
        numbers.append(streams.number)
    return numbers


def test_streams_are_doubled_as_long_as_that_makes_the_download_faster() -> None:
    assert count([1 * MB, 2 * MB, 4 * MB, 4 * MB]) == [2, 4, 4, 4]
    assert count([1 * MB, 1.2 * MB, 9 * MB]) == [2, 1, 1]  # the line is the limit
    assert count([1 * MB, 2 * MB, 2.1 * MB, 9 * MB]) == [2, 4, 2, 2]
    assert count([1 * MB, 2 * MB, 4 * MB, 8 * MB], most=8) == [2, 4, 8, 8]
    assert count([1 * MB, 2 * MB, 9 * MB], most=3) == [2, 2, 2]
    assert count([0.0, 0.0, 1 * MB]) == [2, 4, 4]  # one that has stopped altogether


def test_one_stream_is_enough_for_a_fast_line_a_short_download_and_an_old_server() -> None:
    assert count([1.1 * FAST_BYTES_PER_S, 1 * MB], size=10**12) == [1, 1]
    assert count([1 * MB, 1 * MB], size=20 * MB) == [1, 1]
    assert count([1 * MB, 1 * MB], most=1) == [1, 1]
    assert count([1 * MB, 1 * MB], most=0) == [1, 1]


@pytest.fixture
def large(fleet: FakeFleet) -> Parameters:
    return Parameters.from_arrays({"weight": np.arange(400_000, dtype=np.float32)})


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement is long enough, and finds that twice as many streams are worth it."""
    monkeypatch.setattr(ranges, "MEASURED_S", 0.0)
    monkeypatch.setattr(ranges, "GAIN", 0.0)
    monkeypatch.setattr(ranges, "WORTH_S", 0.0)
    monkeypatch.setattr(ranges, "FAST_BYTES_PER_S", float("inf"))
    monkeypatch.setattr(ranges, "RANGE_BYTES", RANGE)
    monkeypatch.setattr(ranges, "MAX_AHEAD_BYTES", 3 * RANGE)


def ranges_of(fleet: FakeFleet, size: int) -> list[tuple[int, int]]:
    """The offset and the end of each download after the first."""
    requests: list[fleet_pb2.DownloadRequest] = fleet.requests["Download"][1:]
    return sorted((each.offset, each.offset + each.length if each.length else size) for each in requests)


@pytest.mark.usefixtures("slow")
def test_ranges_over_several_connections_make_up_the_model(
    fleet: FakeFleet, make_client: MakeClient, large: Parameters
) -> None:
    model = fleet.add_model(large)
    fleet.assign(model, max_downloads=4)
    run(make_client())
    found = ranges_of(fleet, model.size_bytes)
    assert found[0] == (PIECE, PIECE + RANGE)  # the first stream ends after a piece
    assert [end for _, end in found] == [start for start, _ in found[1:]] + [model.size_bytes]
    assert len(set(fleet.downloading)) == 1 + 4
    assert fleet.uploads[fleet.requests["Report"][0].digest] == trained_update(large).to_bytes()


@pytest.mark.usefixtures("slow")
def test_a_range_that_breaks_goes_on_over_another_connection(
    fleet: FakeFleet, make_client: MakeClient, large: Parameters, delays: list[float]
) -> None:
    model = fleet.add_model(large)
    second = PIECE + RANGE
    fleet.cut_ranges = {second: 12_345}
    fleet.assign(model, max_downloads=2)
    run(make_client())
    found = ranges_of(fleet, model.size_bytes)
    assert (second, second + RANGE) in found
    assert (second + 12_345, second + RANGE) in found
    assert sum(fleet.sent_bytes[1:]) == model.size_bytes - PIECE
    assert len(delays) == 1
    assert len(set(fleet.downloading)) == 1 + 2 + 1
    assert fleet.uploads[fleet.requests["Report"][0].digest] == trained_update(large).to_bytes()


@pytest.mark.usefixtures("slow")
def test_ranges_without_progress_are_given_up(fleet: FakeFleet, make_client: MakeClient, large: Parameters) -> None:
    model = fleet.add_model(large)
    fleet.assign(model, max_downloads=2)
    fleet.cut_downloads = [model.size_bytes, *([0] * 20)]
    run(make_client(transfer_attempts=5))
    (fail,) = fleet.requests["Fail"]
    assert fail.reason == model_pb2.REASON_TRANSFER_FAILED
    assert "broke 5 times in a row without progress" in fail.text


@pytest.mark.usefixtures("slow")
def test_a_server_before_0_2_sends_all_over_one_connection(
    fleet: FakeFleet, make_client: MakeClient, large: Parameters
) -> None:
    fleet.assign(fleet.add_model(large))
    run(make_client())
    assert len(fleet.requests["Download"]) == len(set(fleet.downloading)) == 1
