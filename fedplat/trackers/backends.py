"""Runs in MLflow (extra "mlflow"), and event files for TensorBoard (extra "tensorboard").

A run has the tag `fedplat.run`, by which a restarted process finds it again. It reads which steps of each metric the
run has, and adds only the others.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from fedplat import errors, extras
from fedplat.errors import MissingExtraError, TrackerError
from fedplat.extras import install_command
from fedplat.trackers.tracker import RoundMetrics, RunStatus, TrackedRun, Tracker

TAG = "fedplat.run"
NUM_METRICS, NUM_PARAMS = 1000, 100
"""MLflow's largest batches."""
MAX_TEXT = 500
"""The largest parameter, in characters, that all servers accept."""
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds, not minutes: `BackgroundTracker` retries
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # MLflow's package reports its use to its developers
}
"""Environment variables of MLflow that are set unless the user has set them."""
_NO_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|databricks|uc$")
"""Schemes, and the names of services that have none."""
_NOT_IN_NAMES = re.compile(r"[^\w\-./: ]", re.ASCII)
_PASSWORD = re.compile(r"//[^/@\s]+@")
"""The user and the password in an address."""
_Item = TypeVar("_Item")


class MlflowTracker(Tracker):
    """Writes each round to a run of a tracking server, a database or a folder (`uri`).

    The variable `MLFLOW_EXPERIMENT_NAME` names another experiment than `run.experiment`. The server is first asked in
    `log`, so that it may be away. Raises `MissingExtraError` without MLflow, and `TrackerError` for a `uri` that MLflow
    does not support.
    """

    def __init__(self, uri: str, run: TrackedRun) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow.tracking import MlflowClient
        except ModuleNotFoundError as exc:
            raise MissingExtraError(
                f"runs in MLflow need the package mlflow-skinny; install it with: {install_command('mlflow')}"
            ) from exc
        self._place = f"MLflow at {hide_password(uri)}"
        self._run, self._run_id = run, ""
        self._steps: dict[str, set[int]] = {}
        try:
            with self._translate():
                # MLflow would take the path of a folder for a quoted one.
                self._client = MlflowClient(tracking_uri=uri if _NO_PATH.match(uri) else Path(uri).absolute().as_uri())
        except ModuleNotFoundError as exc:
            raise MissingExtraError(
                f"{self._place} needs the package {exc.name}; install it, or use the address of a tracking server"
            ) from exc

    @override
    def log(self, rounds: Sequence[RoundMetrics]) -> None:
        from mlflow.entities import Metric

        with self._translate():
            self._open()
            metrics = [
                Metric(name, value, int(1000 * each.time_s), each.round)
                for each in rounds
                for name, value in ((clean_name(name), value) for name, value in each.values.items())
                if each.round not in self._steps.get(name, ())
            ]
            for batch in _batches(metrics, NUM_METRICS):
                self._client.log_batch(self._run_id, metrics=batch)
                for metric in batch:
                    self._steps.setdefault(metric.key, set()).add(metric.step)

    @override
    def close(self, status: RunStatus) -> None:
        with self._translate():
            if status != "RUNNING":
                self._open()
                self._client.set_terminated(self._run_id, status)

    def _open(self) -> None:
        """Find the run, or create it, unless that is done; a failed call may have reached the server or not."""
        if self._run_id:
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self._run.experiment
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        key = f"tags.`{TAG}` = '{self._run.key}'"
        found = next(iter(self._client.search_runs([experiment_id], filter_string=key, max_results=1)), None)
        if found is None:
            tags = {**self._run.tags, TAG: self._run.key}
            found = self._client.create_run(experiment_id, tags=tags, run_name=self._run.name)
        self._continue(found)

    def _continue(self, run: Any) -> None:
        """Add the parameters that a run lacks, and read which steps it has."""
        from mlflow.entities import Param

        run_id: str = run.info.run_id
        params = {clean_name(name)[:MAX_TEXT]: value[:MAX_TEXT] for name, value in self._run.params.items()}
        absent = [Param(name, value) for name, value in params.items() if name not in run.data.params]
        for batch in _batches(absent, NUM_PARAMS):
            self._client.log_batch(run_id, params=batch)
        if run.info.status != "RUNNING":
            self._client.update_run(run_id, status="RUNNING")
        self._steps = {
            name: {metric.step for metric in self._client.get_metric_history(run_id, name)} for name in run.data.metrics
        }
        self._run_id = run_id

    @contextlib.contextmanager
    def _translate(self) -> Generator[None]:
        try:
            yield
        except ImportError:
            raise
        except Exception as exc:  # what MLflow raises has no common base: its folders raise `Exception` itself
            self._run_id = ""
            text = _PASSWORD.sub("//", " ".join(str(exc).split()))
            raise TrackerError(f"{self._place}: {text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + ' ...'}") from exc


def clean_name(name: str) -> str:
    """Return the name of a metric or parameter with `_` in place of the characters that MLflow refuses.

    >>> clean_name("clients/top 5 (%)")
    'clients/top 5 ___'
    """
    return _NOT_IN_NAMES.sub("_", name)


def hide_password(uri: str) -> str:
    """Return an address without its user and password, for messages.

    >>> hide_password("https://me:secret@mlflow.example.org/path")
    'https://mlflow.example.org/path'
    """
    return _PASSWORD.sub("//", uri)


def _batches(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch


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
