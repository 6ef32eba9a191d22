"""A run as event files for TensorBoard (extra "tensorboard").

Steps are rounds, and an event's time is its virtual second: TensorBoard's axis "Relative" is virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedplat.errors import MissingExtraError
from fedplat.simulation.recording.result import AttemptResult


class EventFile:
    """Writes each committed attempt as scalars; replaces the folder's older event files.

    Raises `MissingExtraError` without TensorBoard.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as exc:
            raise MissingExtraError(
                "event files need the package tensorboard; install it with: pip install 'fedplat[tensorboard]'"
            ) from exc
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer: Any = EventFileWriter(str(folder))

    def add(self, record: AttemptResult) -> None:
        """Write the scalars of an attempt if it was committed."""
        event: Any
        summary: Any  # protobuf creates its classes at import: type checkers do not see them
        from tensorboard.compat.proto import event_pb2 as event
        from tensorboard.compat.proto import summary_pb2 as summary

        if record.committed:
            values = [summary.Summary.Value(tag=tag, simple_value=value) for tag, value in _scalars(record)]
            scalars = summary.Summary(value=values)
            self._writer.add_event(event.Event(wall_time=record.ended_at, step=record.round, summary=scalars))

    def close(self) -> None:
        """Write buffered events and close the file."""
        self._writer.close()


def _scalars(record: AttemptResult) -> Iterator[tuple[str, float]]:
    for name, value in record.evaluation.items():
        yield f"held_out/{name}", value
    for name, value in record.metrics.items():
        yield f"clients/{name}", value
    if record.kind == "TRAIN":
        yield "round/virtual_seconds", record.ended_at - record.opened_at
        for name, count in record.counts.items():
            yield f"round/{name.lower()}", float(count)
        if merged := sum(record.staleness.values()):
            yield "round/staleness", sum(age * count for age, count in record.staleness.items()) / merged
