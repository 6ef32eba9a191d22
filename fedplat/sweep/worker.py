"""A worker of a sweep: it computes one run after the other, each in its run folder, with one thread; its messages."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import cast

import msgspec
from msgspec import Struct

from fedplat import forks, system
from fedplat.config import plugins, user_code
from fedplat.config.decoding import prepare_type
from fedplat.errors import USAGE_ERRORS, DataError, FedplatError, PausedError
from fedplat.simulation import api, run_folder
from fedplat.simulation.data import Dataset, DataSource, Federation, federation
from fedplat.simulation.data.sources import SourcePaths
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.scenario import file as files
from fedplat.simulation.scenario.file import SimulationFile
from fedplat.sweep.plan import Objective, Outcome, list_metrics, summarize_attempts


class WorkerSetup(Struct, frozen=True, kw_only=True):
    """What a worker needs for all its runs. `runs` is the folder of the run folders; both folders are absolute."""

    base_text: str
    base_folder: str
    runs: str
    metric: str
    maximize: bool
    best: bool
    target: float
    checkpoint_s: float


class PartRequest(Struct, frozen=True, kw_only=True):
    """A run to compute until the end of the round `until`, or until its end if that is 0.

    `folder` is the name of its run folder; `changes` are those of the base file, as `key=value` texts.
    """

    folder: str
    changes: list[str]
    until: int


class RoundReply(Struct, frozen=True, kw_only=True, tag="round"):
    """A round of the run in progress has ended; `value` is the metric if it was scored."""

    round: int
    value: float | None


class DoneReply(Struct, frozen=True, kw_only=True, tag="done"):
    """The run has reached its round; its outcome is in its folder."""


class FailureReply(Struct, frozen=True, kw_only=True, tag="failure"):
    """The run has raised an error; `is_usage` is true for a mistake of the user."""

    text: str
    is_usage: bool


WorkerReply = RoundReply | DoneReply | FailureReply

_encoder = msgspec.json.Encoder()
_setup = msgspec.json.Decoder(WorkerSetup)
_request = msgspec.json.Decoder(PartRequest)
_reply: msgspec.json.Decoder[WorkerReply] = msgspec.json.Decoder(WorkerReply)
decode_setup, decode_request, decode_reply = _setup.decode, _request.decode, _reply.decode


def encode_line(message: Struct) -> bytes:
    """Return a message as one line."""
    return _encoder.encode(message) + b"\n"


OUTCOME = "outcome.json"
"""The file of a run's outcome, in its run folder."""
REPORT_EVERY_S = 0.2
"""The shortest time between two reports of a run's progress."""
NUM_DATASETS = 2
"""Data sets that a worker keeps in memory."""

Send = Callable[[WorkerReply], object]


class SweepWorker:
    """Computes the runs of a sweep. It loads each data set once."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._objective = Objective(setup.metric, setup.maximize, setup.best, setup.target)
        self._sources: dict[str, CachedSource] = {}
        _use_one_thread()

    def run(self, request: PartRequest, send: Send) -> WorkerReply:
        """Compute a run until the requested round, write its outcome, and return the final reply."""
        try:
            with user_code.wrap_errors("the training"):
                self._run(request, send)
        except FedplatError as exc:
            return FailureReply(text=str(exc), is_usage=isinstance(exc, USAGE_ERRORS))
        return DoneReply()

    def _run(self, request: PartRequest, send: Send) -> None:
        file = files.parse(self._setup.base_text, Path(self._setup.base_folder), request.changes)
        folder = Path(self._setup.runs) / request.folder
        with _lock(folder):
            outcome = self._outcome(file, folder, request.until, send)
            folders.write(folder / OUTCOME, msgspec.json.encode(outcome))

    def _outcome(self, file: SimulationFile, folder: Path, until: int, send: Send) -> Outcome:
        attempts: list[AttemptResult] = []
        if (folder / folders.RESULTS).exists():  # the sweep was killed before it wrote the outcome
            attempts, status = read_attempts(folder)
            return self._summarize(attempts, 0, status)
        report = _throttle(self._setup.metric, send)

        def observe(record: AttemptResult) -> None:
            attempts.append(record)
            report(record)
            if record.evaluation and file.job.evaluation.clients is None:
                self._check_metric(attempts)  # after the first round already

        options = run_folder.RunFolderOptions(
            folder,
            resume=(folder / folders.RUN).exists(),
            checkpoint_s=self._setup.checkpoint_s,
            pause_after=until if until < file.job.rounds else 0,
        )
        try:
            with api.prepare(file, self._load_data(file)) as setup:
                run = api.execute(file, setup, observe, options)
        except PausedError:
            return self._summarize(attempts, until, "RUNNING")
        return self._summarize(run.result.attempts, 0, run.result.status)

    def _summarize(self, attempts: Sequence[AttemptResult], until: int, status: str) -> Outcome:
        outcome = summarize_attempts(attempts, self._objective, until, status)
        committed = [record for record in attempts if record.kind == "TRAIN" and record.committed]
        if not until and committed:
            self._check_metric(attempts)
        return outcome

    def _check_metric(self, attempts: Sequence[AttemptResult]) -> None:
        """Raise `DataError` if no attempt was scored with the metric."""
        known = list_metrics(attempts)
        if self._setup.metric not in known:
            raise DataError(
                f'metric = "{self._setup.metric}": no round was scored with it; expected one of {", ".join(known)}'
            )

    def _load_data(self, file: SimulationFile) -> Federation | None:
        """Return the data of a run; the data set is that of an earlier run if its options are equal."""
        options = file.simulation
        if options.data is None:
            return None  # `prepare` knows whether that is a mistake
        key = json.dumps(file.raw[files.TABLE]["data"], sort_keys=True, default=str)
        if key not in self._sources:
            while len(self._sources) >= NUM_DATASETS:
                del self._sources[next(iter(self._sources))]
            self._sources[key] = CachedSource(options.data)
        return federation(self._sources[key], options.partition, seed=options.seed, folder=file.folder)


class CachedSource:
    """A source of data that loads once. Its data does not depend on the simulation's seed."""

    def __init__(self, source: DataSource) -> None:
        self._source = source
        self._loaded: Dataset | Federation | None = None

    def load(self, place: SourcePaths) -> Dataset | Federation:
        """Return the data. Raises `DataError`."""
        if self._loaded is None:
            loaded = cast(object, self._source.load(place))
            if not isinstance(loaded, Dataset | Federation):
                raise DataError(
                    f'the source "{plugins.name_of(self._source)}" returned an object of type {type(loaded).__name__}; '
                    "expected a Dataset or a Federation"
                )
            self._loaded = loaded
        return self._loaded


def read_attempts(folder: Path) -> tuple[list[AttemptResult], str]:
    """Return the attempts of a finished run and the status of its job. Raises `DataError`."""
    content = folders.read_json(folder / folders.RESULTS)
    for record in content["attempts"]:
        for scores in (record["metrics"], record["evaluation"]):
            scores |= {name: math.nan for name, value in scores.items() if value is None}
    attempts = msgspec.convert(content["attempts"], prepare_type(list[AttemptResult]), str_keys=True, strict=False)
    return attempts, content["status"]


@contextlib.contextmanager
def _lock(folder: Path) -> Generator[None]:
    """Keep other workers out of a run folder: one of a killed sweep may be about to end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = system.open_folder_to_lock(folder)
    except OSError as exc:
        raise DataError(f"{folder} cannot be written: {exc.strerror or exc}") from exc
    with forks.keep_descriptor(descriptor):
        system.lock(descriptor)
        if (folder / folders.RESULTS).exists():  # a killed process may have left the journal
            shutil.rmtree(folder / folders.JOURNAL, ignore_errors=True)
        yield


def _throttle(metric: str, send: Send) -> Callable[[AttemptResult], None]:
    """Return the function that reports rounds, at most one in `REPORT_EVERY_S` seconds."""
    sent_at = -math.inf

    def report(record: AttemptResult) -> None:
        nonlocal sent_at
        now = time.monotonic()
        if record.kind == "TRAIN" and record.committed and now - sent_at >= REPORT_EVERY_S:
            sent_at = now
            value = record.evaluation.get(metric)
            send(RoundReply(round=record.round, value=value if value is not None and math.isfinite(value) else None))

    return report


def _use_one_thread() -> None:
    with contextlib.suppress(ModuleNotFoundError):  # a sweep without training needs no PyTorch
        import torch

        torch.set_num_threads(1)
