"""The folder of a run in progress, and its experiment trackers: what is written when, and how a run is resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedplat import errors, trackers
from fedplat.privacy.accounting import Cost
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.recording import resuming
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.run import Hooks
from fedplat.trackers import RoundMetrics

Observer = Callable[[AttemptResult], object]
CHECKPOINT_S = 5.0
"""Seconds between checkpoints. A checkpoint is a few synced files: at this interval its cost is negligible."""


def _print_warning(text: str) -> None:
    sys.stderr.write(f"warning: {text}\n")


@dataclasses.dataclass(frozen=True)
class RunFolderOptions:
    """The folder of a run. `resume` continues the run in the folder from its last checkpoint.

    Checkpoints are at least `checkpoint_s` seconds apart. With `tensorboard`, event files are written too. `mlflow` is
    the address of a tracking server, a database or a folder (a URI of MLflow) that gets the rounds; a failure does not
    stop the run, but calls `warn`. With `pause_after`, the run writes a checkpoint after that round and raises
    `PausedError`; it can be resumed like any stopped run.
    """

    folder: Path
    resume: bool = False
    tensorboard: bool = False
    checkpoint_s: float = CHECKPOINT_S
    pause_after: int = 0
    mlflow: str = ""
    warn: Callable[[str], object] = _print_warning


class Pace:
    """The number of updates that this process has merged, and the time it took; replayed attempts do not count.

    Attempts up to the version `replayed` come from a journal; `on_replayed` is called after each of them.
    """

    def __init__(self, replayed: int, on_replayed: Callable[[], object]) -> None:
        self.updates = 0
        self._replayed, self._on_replayed = replayed, on_replayed
        self._since = time.perf_counter()

    def add(self, record: AttemptResult) -> None:
        """Count an attempt that has ended."""
        if record.version <= self._replayed:
            self._since = time.perf_counter()
            self._on_replayed()
        else:
            self.updates += record.counts.get("MERGED", 0)

    def seconds(self) -> float:
        """Return the seconds since the last replayed attempt, or since the start of this process."""
        return time.perf_counter() - self._since


class Throttle:
    """A function that returns true at most once in `seconds` seconds, and not in the first ones."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock, self._last = seconds, clock, clock()

    def __call__(self) -> bool:
        """Return whether `seconds` have passed since this was last true."""
        if self._clock() - self._last < self._seconds:
            return False
        self._last = self._clock()
        return True


@contextlib.contextmanager
def open_run_folder(
    options: RunFolderOptions | None,
    inputs: Mapping[str, Any],
    observe: Observer,
    on_replayed: Callable[[], object] = lambda: None,
    *,
    resumable: bool = True,
    find_cost: Callable[[int], Cost] | None = None,
) -> Generator[tuple[Hooks, Pace]]:
    """Open the run folder, if there is one; yields the hooks of the run and its pace. `inputs` are recorded in it.

    `on_replayed` is called after each replayed attempt. `find_cost` returns the privacy cost of a number of
    releases, for experiment trackers. Raises `DataError` if a new run would overwrite another one, or if there is no
    run to resume or a different one. After the round `pause_after`, the run raises `PausedError`.
    """
    with contextlib.ExitStack() as stack:
        observers: list[Observer] = []
        hooks, replayed = Hooks(), 0
        if options is not None:
            if options.resume:
                folders.resume(options.folder, inputs)
            else:
                folders.begin(options.folder, inputs, resumable=resumable)
            journal = options.folder / folders.JOURNAL
            last = resuming.find_checkpoint(journal)
            replayed = 0 if last is None else last.version
            hooks = dataclasses.replace(hooks, journal=journal, checkpoint_due=_checkpoints(options))
            observers.append(stack.enter_context(folders.Lines(options.folder)).add)
            tracking = open_trackers(
                options.folder,
                inputs["simulation"],
                tensorboard=options.tensorboard,
                mlflow=options.mlflow,
                warn=options.warn,
                find_cost=find_cost,
            )
            observers.append(stack.enter_context(tracking))
        pace = Pace(replayed, on_replayed)
        # The folder first: an attempt that `observe` receives is already in it.
        observers += [observe, pace.add]

        def notify(record: AttemptResult) -> None:
            for observer in observers:
                observer(record)
            if options is not None and _is_pause(options.pause_after, record):
                raise errors.PausedError(f"the run in {options.folder} was paused after round {record.round}")

        yield dataclasses.replace(hooks, observe=notify), pace


def _checkpoints(options: RunFolderOptions) -> Callable[[int], bool]:
    """Return the function that decides after which versions a checkpoint is written: round N commits version N."""
    throttle = Throttle(options.checkpoint_s)
    return lambda version: version == options.pause_after or throttle()


def _is_pause(pause_after: int, record: AttemptResult) -> bool:
    return 0 < pause_after <= record.round and record.kind == "TRAIN" and record.committed


def remove_journal(options: RunFolderOptions) -> None:
    """Remove the journal, which only a stopped run needs."""
    shutil.rmtree(options.folder / folders.JOURNAL, ignore_errors=True)


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

    A resumed run calls it with all attempts again. If MLflow fails, `warn` is called. `find_cost` returns the privacy
    cost of a number of releases, which is tracked with the last round. Raises `MissingExtraError` and `TrackerError`.
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
    except (KeyboardInterrupt, errors.PausedError):
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


def metrics_of(record: AttemptResult) -> RoundMetrics | None:
    """Return the metrics of an attempt that was committed; None if it was not.

    `held_out/` are scores on the central test data, `clients/` the means of the clients' metrics in training, and
    `evaluation/` those in a federated evaluation.
    """
    return RoundMetrics(record.round, record.ended_at, dict(_metrics(record))) if record.committed else None


def _metrics(record: AttemptResult) -> Iterator[tuple[str, float]]:
    is_training = record.kind == "TRAIN"
    for name, value in record.evaluation.items():
        yield f"held_out/{name}", value
    for name, value in record.metrics.items():
        yield f"{'clients' if is_training else 'evaluation'}/{name}", value
    if is_training:
        yield "round/virtual_seconds", record.ended_at - record.opened_at
        yield "round/attempts", float(record.attempt)
        yield "round/bytes_down", record.bytes_down
        yield "round/bytes_up", record.bytes_up
        for name, count in record.counts.items():
            yield f"round/{name.lower()}", float(count)
        if merged := sum(record.staleness.values()):
            yield "round/staleness", sum(age * count for age, count in record.staleness.items()) / merged
