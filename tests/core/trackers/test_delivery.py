from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from fedplat import trackers
from fedplat.errors import TrackerError
from fedplat.trackers import BackgroundTracker, RoundMetrics, RunStatus, Tracker

PATIENCE_S = 60.0


class Recorder(Tracker):
    """A tracker that is away until `returns` is set, and remembers what it got."""

    def __init__(self, *, is_away: bool = False) -> None:
        self.is_away = is_away
        self.num_failures = 0
        self.rounds: list[int] = []
        self.statuses: list[RunStatus] = []
        self.has_failed, self.has_received = threading.Event(), threading.Event()

    def log(self, rounds: Sequence[RoundMetrics]) -> None:
        if self.is_away:
            self.num_failures += 1
            self.has_failed.set()
            raise TrackerError("MLflow at http://one.example: no answer")
        self.rounds += [each.round for each in rounds]
        self.has_received.set()

    def close(self, status: RunStatus) -> None:
        self.statuses.append(status)


def metrics(*rounds: int) -> list[RoundMetrics]:
    return [RoundMetrics(number, 0.0, {"clients/loss": 1.0}) for number in rounds]


def test_rounds_arrive_in_order_before_the_tracker_is_closed() -> None:
    recorder, warnings = Recorder(), list[str]()
    background = BackgroundTracker(recorder, warnings.append)
    for number in range(1, 201):
        background.log(metrics(number))
    background.close("FINISHED")
    assert recorder.rounds == list(range(1, 201))
    assert (recorder.statuses, warnings, background.missing) == (["FINISHED"], [], [])


def test_a_tracker_that_returns_gets_everything_once() -> None:
    recorder, warnings = Recorder(is_away=True), list[str]()
    background = BackgroundTracker(recorder, warnings.append, retry_s=0.01)
    background.log(metrics(1, 2))
    assert recorder.has_failed.wait(PATIENCE_S)
    background.log(metrics(3))
    recorder.is_away = False
    assert recorder.has_received.wait(PATIENCE_S)
    background.close("FINISHED")
    assert recorder.rounds == [1, 2, 3]
    (warning,) = warnings  # whatever the number of failures
    assert warning.startswith("MLflow at http://one.example: no answer; the rounds are kept")
    assert background.missing == []


def test_a_tracker_that_stays_away_ends_with_the_missing_rounds() -> None:
    recorder, warnings = Recorder(is_away=True), list[str]()
    background = BackgroundTracker(recorder, warnings.append, retry_s=3600.0)
    background.log(metrics(1, 2))
    assert recorder.has_failed.wait(PATIENCE_S)
    background.log(metrics(2, 5))
    background.close("FAILED")  # does not wait for the hour, but tries once more
    assert recorder.num_failures == 2
    assert len(warnings) == 1
    assert (background.missing, recorder.statuses) == ([1, 2, 5], [])
    assert background.failure == "MLflow at http://one.example: no answer"


def test_what_waits_is_bounded() -> None:
    recorder = Recorder(is_away=True)
    background = BackgroundTracker(recorder, lambda text: None, retry_s=3600.0, max_waiting=3)
    background.log(metrics(1))
    assert recorder.has_failed.wait(PATIENCE_S)
    background.log(metrics(2, 3, 4, 5))
    recorder.is_away = False
    background.close("FINISHED")
    assert recorder.rounds == [3, 4, 5]
    assert background.missing == [1, 2]


@pytest.mark.parametrize(
    ("rounds", "text"),
    [([4], "round 4"), ([1, 2, 3, 7], "rounds 1-3, 7"), ([1, 3], "rounds 1, 3"), ([1, 2], "rounds 1-2")],
)
def test_rounds_are_described_as_ranges(rounds: list[int], text: str) -> None:
    assert trackers.describe_rounds(rounds) == text
