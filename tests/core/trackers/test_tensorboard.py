from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedplat.errors import MissingExtraError, TrackerError
from fedplat.trackers import RoundMetrics, TensorBoardTracker

pytest.importorskip("tensorboard")


def test_a_round_is_a_step_and_older_files_are_replaced(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"another program's")
    for _ in range(2):  # a restarted process writes the run again
        tracker = TensorBoardTracker(tmp_path)
        tracker.log([RoundMetrics(1, 10.0, {"clients/loss": 2.0}), RoundMetrics(2, 20.0, {"clients/loss": 0.5})])
        tracker.close("FINISHED")
    other, path = sorted(tmp_path.iterdir())
    assert other.read_bytes() == b"another program's"
    _, *events = list(EventFileLoader(str(path)).Load())
    values = [
        (event.step, event.wall_time, value.tag, value.tensor.float_val[0])
        for event in events
        for value in event.summary.value
    ]
    assert values == [(1, 10.0, "clients/loss", 2.0), (2, 20.0, "clients/loss", 0.5)]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tensorboard>="):
        TensorBoardTracker(tmp_path)


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrackerError, match=r"cannot be written to .*file/events"):
        TensorBoardTracker(tmp_path / "file" / "events")
