"""The experiment trackers of a run in progress."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedplat import trackers
from fedplat.errors import PausedError
from fedplat.privacy.cost import Cost
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.report.tracking import metrics_of


@contextlib.contextmanager
def open_trackers(
    folder: Path,
    file: Mapping[str, Any],
    *,
    tensorboard: bool,
    mlflow: str,
    warn: Callable[[str], object],
    find_cost: Callable[[int], Cost] | None,
) -> Generator[Callable[[AttemptResult], None]]:
    """Open the trackers of the run in `folder` of a simulation file; yields the function that tracks an attempt.

    A resumed run calls it with all attempts again. If MLflow fails, `warn` is called. `find_cost` returns the
    privacy cost of a number of releases, which is tracked with the last round. Raises `MissingExtraError` and
    `TrackerError`.
    """
    with contextlib.ExitStack() as stack:
        opened: list[trackers.Tracker] = []
        if tensorboard:
            opened.append(stack.enter_context(_closing(trackers.TensorBoardTracker(folder / folders.EVENTS))))
        if mlflow:
            tracker = trackers.MlflowTracker(mlflow, _describe_run(folder, file))
            delivery = trackers.BackgroundTracker(tracker, warn)
            stack.callback(_warn_of_missing, delivery, warn)
            opened.append(stack.enter_context(_closing(delivery)))

        rounds = _RoundTracker(opened)
        yield rounds.add
        if find_cost is not None:
            rounds.add_privacy(find_cost)


class _RoundTracker:
    """Sends each committed attempt to trackers, and counts the releases of a private job."""

    def __init__(self, opened: Sequence[trackers.Tracker]) -> None:
        self._opened = opened
        self._num_releases = 0
        self._last: AttemptResult | None = None

    def add(self, record: AttemptResult) -> None:
        """Track an attempt that has ended, if it was committed."""
        metrics = metrics_of(record)
        if metrics is None:
            return
        for tracker in self._opened:
            tracker.log([metrics])
        if record.kind == "TRAIN":
            self._num_releases, self._last = self._num_releases + 1, record

    def add_privacy(self, find_cost: Callable[[int], Cost]) -> None:
        """Track the privacy cost of the run with its last round."""
        if self._opened and self._last is not None:
            cost = {"privacy/epsilon": find_cost(self._num_releases).epsilon}
            for tracker in self._opened:
                tracker.log([trackers.RoundMetrics(self._last.round, self._last.ended_at, cost)])


@contextlib.contextmanager
def _closing(tracker: trackers.Tracker) -> Generator[trackers.Tracker]:
    """Close a tracker with the status of the run."""
    status: trackers.RunStatus = "FAILED"
    try:
        yield tracker
        status = "FINISHED"
    except (KeyboardInterrupt, PausedError):
        status = "KILLED"
        raise
    finally:
        tracker.close(status)


def _describe_run(folder: Path, file: Mapping[str, Any]) -> trackers.TrackedRun:
    """Return the description of a run, with the key that the folder has, or a new one."""
    path = folder / folders.MLFLOW
    key = folders.read_json(path).get("run") if path.exists() else None
    if not isinstance(key, str) or not key.isalnum():
        key = uuid.uuid4().hex
        folders.write(path, (json.dumps({"run": key}) + "\n").encode())
    name = str(file.get("name", folder.name))
    tags = {"fedplat.kind": "simulation", "fedplat.folder": str(folder.resolve())}
    return trackers.TrackedRun(key, folder.name, name, trackers.flatten(file), tags)


def _warn_of_missing(delivery: trackers.BackgroundTracker, warn: Callable[[str], object]) -> None:
    if missing := delivery.missing:
        warn(
            f"MLflow does not have {trackers.describe_rounds(missing)} of the run ({delivery.failure}); "
            f"{folders.ROUNDS} in the run folder has all of them"
        )
