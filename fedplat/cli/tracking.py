"""Experiment trackers that follow a job of a server: `fedplat job watch --mlflow URI --tensorboard DIR`.

A watch receives all events of its job, from the first one, so the trackers get all rounds again after a restart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Annotated

import typer

from fedplat import admin, errors, trackers
from fedplat.cli.watch import ENDED, AttemptTable
from fedplat.config.toml import read_toml
from fedplat.wire.v1 import admin_pb2

TensorBoardOption = Annotated[
    Path | None, typer.Option("--tensorboard", metavar="DIR", help="Write event files for TensorBoard to DIR/JOB_ID.")
]
MlflowOption = Annotated[
    str, typer.Option("--mlflow", metavar="URI", help="Tracking server, database or folder of MLflow for the rounds.")
]
PRIVACY_EVERY_S = 60.0
"""The shortest time between two questions for the privacy cost, which the server must compute."""
_COUNTS = ("assigned", "reported", "late", "failed", "rejected", "surplus", "dropped", "update_bytes")
_STATUSES: dict[int, trackers.RunStatus] = {
    admin_pb2.JOB_STATUS_COMPLETED: "FINISHED",
    admin_pb2.JOB_STATUS_FAILED: "FAILED",
    admin_pb2.JOB_STATUS_CANCELLED: "KILLED",
}


@dataclasses.dataclass(frozen=True)
class TrackerOptions:
    """The trackers that the command line names."""

    tensorboard: Path | None = None
    mlflow: str = ""


NO_TRACKERS = TrackerOptions()


class RoundTracker:
    """Turns the events of a job into metrics of its rounds.

    `find_epsilon` returns the number of releases of a private job and their cost; None for other jobs.
    """

    def __init__(
        self,
        opened: list[trackers.Tracker],
        find_epsilon: Callable[[], tuple[int, float]] | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opened, self._find_epsilon, self._now = opened, find_epsilon, now
        self._attempts = AttemptTable()
        self._num_releases = 0
        self._asked_at = -PRIVACY_EVERY_S
        self._last: trackers.RoundMetrics | None = None

    def add(self, event: admin_pb2.JobEvent) -> None:
        """Track the attempt that an event ended, or the version that it scored."""
        attempt = self._attempts.add(event)
        if attempt is None or attempt.phase != admin_pb2.ATTEMPT_PHASE_COMMITTED:
            return
        if event.entity == "version":
            self._log(attempt.round, event.unix_s, {f"server/{name}": value for name, value in event.metrics.items()})
            return
        self._log(attempt.round, event.unix_s, dict(_metrics(attempt)))
        if attempt.kind == admin_pb2.ATTEMPT_KIND_TRAIN:
            self._num_releases += 1
            self._last = trackers.RoundMetrics(attempt.round, event.unix_s, {})
            if self._now() - self._asked_at >= PRIVACY_EVERY_S:
                self.add_privacy()

    def add_privacy(self) -> None:
        """Track the privacy cost of the latest round, unless the server has committed further rounds already."""
        if self._find_epsilon is None or self._last is None:
            return
        self._asked_at = self._now()
        try:
            num_releases, epsilon = self._find_epsilon()
        except errors.FedplatError:  # the server is away: a later round asks again, or the next watch
            return
        if num_releases == self._num_releases:
            self._log(self._last.round, self._last.time_s, {"privacy/epsilon": epsilon})
            self._last = None

    def _log(self, number: int, unix_s: float, values: dict[str, float]) -> None:
        for tracker in self._opened if values else ():
            tracker.log([trackers.RoundMetrics(number, unix_s, values)])


def _metrics(attempt: admin_pb2.Round) -> Iterator[tuple[str, float]]:
    is_evaluation = attempt.kind == admin_pb2.ATTEMPT_KIND_EVALUATE
    for name, value in attempt.client_metrics.items():
        yield f"{'evaluation' if is_evaluation else 'clients'}/{name}", value
    if is_evaluation:
        return
    yield "round/seconds", attempt.seconds
    yield "round/attempts", float(attempt.attempt)
    if attempt.kind == admin_pb2.ATTEMPT_KIND_WARM_START:
        return  # no client took part
    for name in _COUNTS:
        yield f"round/{name}", float(getattr(attempt, name))
    if attempt.max_staleness:
        yield "round/staleness", attempt.mean_staleness


@contextlib.contextmanager
def track(
    client: admin.AdminClient, job: admin_pb2.Job, options: TrackerOptions, tell: Callable[[str], object]
) -> Generator[Callable[[admin_pb2.JobEvent], None]]:
    """Open the trackers of a job; yields the function that tracks an event.

    If MLflow fails, `tell` is called. Raises `MissingExtraError` and `TrackerError` for options that cannot work.
    """
    if options == NO_TRACKERS:
        yield lambda event: None
        return
    opened: list[trackers.Tracker] = []
    delivery: trackers.BackgroundTracker | None = None
    if options.tensorboard is not None:
        opened.append(trackers.TensorBoardTracker(options.tensorboard / job.job_id))
    if options.mlflow:
        tracker = trackers.MlflowTracker(options.mlflow, _describe(job))
        delivery = trackers.BackgroundTracker(tracker, lambda text: tell(f"warning: {text}"))
        opened.append(delivery)
    rounds = RoundTracker(opened, _epsilon_of(client, job))
    try:
        yield rounds.add
        rounds.add_privacy()
    finally:
        status = _find_status(client, job)
        for tracker in opened:
            tracker.close(status)
        if delivery is not None and (missing := delivery.missing):
            tell(
                f"warning: MLflow does not have {trackers.describe_rounds(missing)} ({delivery.failure}); to add them, "
                f"repeat: fedplat job watch {job.job_id} --mlflow URI"
            )


def _describe(job: admin_pb2.Job) -> trackers.TrackedRun:
    params = trackers.flatten(read_toml(job.job_file))
    tags = {"fedplat.kind": "job", "fedplat.job": job.job_id, "fedplat.population": job.population}
    return trackers.TrackedRun(job.job_id, job.job_id, job.name, params, tags)


def _epsilon_of(client: admin.AdminClient, job: admin_pb2.Job) -> Callable[[], tuple[int, float]] | None:
    if "privacy" not in read_toml(job.job_file):
        return None

    def find() -> tuple[int, float]:
        (found,) = client.show_privacy(job.job_id).jobs
        return found.released.releases, found.released.epsilon

    return find


def _find_status(client: admin.AdminClient, job: admin_pb2.Job) -> trackers.RunStatus:
    """Return the final status of a job; RUNNING if it is open, or if the server does not answer."""
    try:
        status = client.show_job(job.job_id).status
    except errors.FedplatError:
        return "RUNNING"
    return _STATUSES[status] if status in ENDED else "RUNNING"
