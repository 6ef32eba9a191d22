"""Event files for TensorBoard (extra "tensorboard"). The step of a scalar is its round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from fedplat import errors, extras
from fedplat.trackers.tracker import RoundMetrics, RunStatus, Tracker

_SUFFIX = ".fedplat"
"""The end of the names of our files: those of other programs in the folder stay."""


class TensorBoardTracker(Tracker):
    """Writes each round as scalars, and replaces its older event files in the folder: a run is written from its start.

    Raises `MissingExtraError` without TensorBoard, and `TrackerError` if the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as exc:
            raise errors.MissingExtraError(
                f"event files need the package tensorboard; install it with: {extras.install_command('tensorboard')}"
            ) from exc
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
                old.unlink()
            self._writer: Any = EventFileWriter(str(folder), flush_secs=5, filename_suffix=_SUFFIX)
        except OSError as exc:
            raise errors.TrackerError(f"event files cannot be written to {folder}: {exc.strerror or exc}") from exc

    @override
    def log(self, rounds: Sequence[RoundMetrics]) -> None:
        event: Any
        summary: Any  # protobuf creates its classes at import: type checkers do not see them
        from tensorboard.compat.proto import event_pb2 as event
        from tensorboard.compat.proto import summary_pb2 as summary

        for each in rounds:
            values = [summary.Summary.Value(tag=tag, simple_value=value) for tag, value in each.values.items()]
            scalars = summary.Summary(value=values)
            self._writer.add_event(event.Event(wall_time=each.time_s, step=each.round, summary=scalars))

    @override
    def close(self, status: RunStatus) -> None:
        """Write buffered events and close the file; event files have no status."""
        self._writer.close()
