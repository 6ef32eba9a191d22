"""The pages of a simulation, from the files of its run folder, also while it runs.

Moments are virtual seconds since the start. `rounds.jsonl` grows by whole lines, of which each is read once; a resumed
run writes it again from the start, and then it is read again. A simulation records no single assignments, clients or
operators, so it has no pages about them.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast, overload

import msgspec

from fedplat.config.decoding import prepare_type
from fedplat.config.toml_text import format_toml
from fedplat.dashboard import formats, source
from fedplat.errors import DataError, JobFileError
from fedplat.packed.index import open_regular
from fedplat.simulation.recording import folder as folders
from fedplat.simulation.recording.result import AttemptResult
from fedplat.wire.v1 import admin_pb2

_P = ParamSpec("_P")
_T = TypeVar("_T")
POLL_S = 0.25
PAGE_SIZE = 250
JOB_ID = "run"
_PHASES = {"COMMITTED": admin_pb2.ATTEMPT_PHASE_COMMITTED, "ABANDONED": admin_pb2.ATTEMPT_PHASE_ABANDONED}
_KINDS = {"TRAIN": admin_pb2.ATTEMPT_KIND_TRAIN, "EVALUATE": admin_pb2.ATTEMPT_KIND_EVALUATE}


def _guard(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a method raise `DataError` if the files, which a stranger may have written, have odd contents."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as exc:
            folder: Path = cast(Any, args[0])._folder
            raise DataError(f"the files in {folder} are not those of a run: {str(exc)[:200]}") from exc

    return call


class RunFolderSource:
    """The one job of a run folder. Raises `DataError` if the folder has no run."""

    is_simulation = True
    home = f"/jobs/{JOB_ID}"  # the overview of one job has nothing that its page lacks

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not (folder / folders.RUN).is_file():
            raise DataError(
                f"there is no run in {folder}; expected the folder of a simulation, such as runs/digits, which "
                "fedplat simulate writes"
            )
        self._inputs = folders.read_json(folder / folders.RUN)
        self._reader = _RoundsReader(folder / folders.ROUNDS)
        self._known_results: tuple[int, dict[str, Any]] = (0, {})

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self._folder.resolve().name

    def close(self) -> None:
        """Do nothing: no file stays open."""

    @_guard
    def status(self) -> admin_pb2.GetStatusResponse:
        """Return the status of the run in place of a server's."""
        job = self._job()
        status = admin_pb2.JobStatus.Name(job.status).removeprefix("JOB_STATUS_")
        return admin_pb2.GetStatusResponse(num_jobs={status: 1}, role="viewer")

    @overload
    def page(self, request: admin_pb2.ListJobsRequest) -> admin_pb2.ListJobsResponse: ...
    @overload
    def page(self, request: admin_pb2.ListRoundsRequest) -> admin_pb2.ListRoundsResponse: ...
    def page(
        self, request: admin_pb2.ListJobsRequest | admin_pb2.ListRoundsRequest
    ) -> admin_pb2.ListJobsResponse | admin_pb2.ListRoundsResponse:
        """Return the job of the run, if the request selects it, or one page or a sample of its attempts."""
        if isinstance(request, admin_pb2.ListJobsRequest):
            return self._list_jobs(request)
        return self._list_rounds(request)

    @_guard
    def _list_jobs(self, request: admin_pb2.ListJobsRequest) -> admin_pb2.ListJobsResponse:
        job = self._job()
        status = admin_pb2.JobStatus.Name(job.status).removeprefix("JOB_STATUS_")
        is_chosen = (
            (not request.statuses or job.status in request.statuses)
            and request.search.lower() in job.name.lower()
            and request.population in ("", job.population)
        )
        jobs = [job] if is_chosen else []
        return admin_pb2.ListJobsResponse(jobs=jobs, total=len(jobs), num_by_status={status: 1})

    @_guard
    def show_job(self, job: str) -> admin_pb2.Job:
        """Return the job of the run with its simulation file. Raises `NotFoundError` for another one."""
        found = self._job()
        if job not in (found.job_id, found.name):
            raise source.NotFoundError
        try:
            found.job_file = format_toml(self._inputs.get("simulation", {}))
        except (JobFileError, TypeError, ValueError):  # an object that Python code made
            found.job_file = json.dumps(self._inputs.get("simulation", {}), indent=2)
        return found

    @_guard
    def _list_rounds(self, request: admin_pb2.ListRoundsRequest) -> admin_pb2.ListRoundsResponse:
        records = self._reader.read()
        if request.num_samples:
            committed = [each for each in records if each.committed and each.kind == "TRAIN"]
            chosen = [committed[at] for at in formats.spread(len(committed), request.num_samples)]
            return admin_pb2.ListRoundsResponse(rounds=map(_round, chosen), total=len(committed))
        chosen = [each for each in records if each.round == request.round or not request.round]
        if not request.all_attempts:
            chosen = [each for each in chosen if each.committed]
        if request.newest_first:
            chosen.reverse()
        start = int(request.page_token) if request.page_token.isdecimal() else 0
        end = start + min(request.page_size or PAGE_SIZE, PAGE_SIZE)
        token = str(end) if end < len(chosen) else ""
        page = map(_round, chosen[start:end])
        return admin_pb2.ListRoundsResponse(rounds=page, next_page_token=token, total=len(chosen))

    @_guard
    def show_round(self, job: str, round_: int, attempt: int = 0) -> admin_pb2.RoundDetails:
        """Return an attempt. Raises `NotFoundError` if the run does not have it."""
        attempts = [each for each in self._reader.read() if each.round == round_ and each.kind == "TRAIN"]
        chosen = [each for each in attempts if attempt in (0, each.attempt)]
        if not chosen:
            raise source.NotFoundError
        return admin_pb2.RoundDetails(round=_round(chosen[-1]), num_attempts=attempts[-1].attempt)

    @_guard
    def list_latest_versions(self, job: str, limit: int) -> list[admin_pb2.ModelVersion]:
        """Return the versions of the last committed rounds, the latest first; their files are not kept."""
        committed = [each for each in self._reader.read() if each.committed and each.kind == "TRAIN"]
        return [_version(each) for each in committed[: -limit - 1 : -1]]

    @_guard
    def show_privacy(self, job: str = "") -> admin_pb2.ShowPrivacyResponse:
        """Return the privacy cost that the results name; a run in progress has none yet."""
        found = admin_pb2.ShowPrivacyResponse()
        cost = self._results().get("privacy")
        if isinstance(cost, dict):
            row = found.jobs.add(job_id=JOB_ID, name=self._name, status=self._job().status, is_private=True)
            row.released.epsilon = row.planned.epsilon = float(cost.get("epsilon") or 0.0)
            row.delta = float(cost.get("delta") or 0.0)
            row.released.releases = row.planned.releases = int(cost.get("releases") or 0)
        return found

    def watch(self, job: str) -> FolderWatch:
        """Return the changes of the files."""
        return FolderWatch(self._folder)

    @property
    def _name(self) -> str:
        return str(self._inputs.get("simulation", {}).get("name") or self._results().get("job") or self.name)

    def _job(self) -> admin_pb2.Job:
        simulation: dict[str, Any] = self._inputs.get("simulation", {})
        records, results = self._reader.read(), self._results()
        committed = [each for each in records if each.committed and each.kind == "TRAIN"]
        status = admin_pb2.JobStatus.Value(f"JOB_STATUS_{results.get('status', 'RUNNING')}")
        job = admin_pb2.Job(
            job_id=JOB_ID,
            name=self._name,
            population=str(simulation.get("population", "")),
            status=status,
            reason=str(results.get("reason", "")),
            round=committed[-1].round if committed else 0,
            num_rounds=int(simulation.get("rounds") or 0),
        )
        job.model.version = committed[-1].version if committed else 0
        return job

    def _results(self) -> dict[str, Any]:
        """Return the results of a finished run; empty while it runs."""
        path = self._folder / folders.RESULTS
        if not path.is_file():
            return {}
        stamp = path.stat().st_mtime_ns
        if self._known_results[0] != stamp:
            found = folders.read_json(path)
            found.pop("attempts", None)  # they are in rounds.jsonl, too
            self._known_results = (stamp, found)
        return self._known_results[1]


class FolderWatch:
    """The changes of a run folder, by the sizes and times of its files."""

    def __init__(self, folder: Path) -> None:
        self._paths = (folder / folders.ROUNDS, folder / folders.RESULTS)
        self._closed = threading.Event()
        self._seen = self._stamp()

    def changes(self) -> Iterator[object]:
        """Yield an item whenever a file has changed, until `close`."""
        while not self._closed.wait(POLL_S):
            if (stamp := self._stamp()) != self._seen:
                self._seen = stamp
                yield stamp

    def close(self) -> None:
        """End `changes`."""
        self._closed.set()

    def _stamp(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for path in self._paths:
            try:
                status = path.stat()
            except FileNotFoundError:
                found.append((0, 0))
            else:
                found.append((status.st_size, status.st_mtime_ns))
        return found


class _RoundsReader:
    """Reads `rounds.jsonl` as it grows; several threads may call it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._identity: tuple[int, int] = (0, 0)
        self._records: list[AttemptResult] = []

    def read(self) -> list[AttemptResult]:
        """Return all attempts that are written completely. Raises `DataError` for a line that is not one."""
        with self._lock:
            try:
                with open_regular(self._path, "a file of a run") as file:
                    self._read_rest(file)
            except FileNotFoundError:
                self._identity, self._records = (0, 0), []
            return list(self._records)

    def _read_rest(self, file: Any) -> None:
        status = os.fstat(file.fileno())
        inode, offset = self._identity
        if inode != status.st_ino or status.st_size < offset:  # a resumed run begins again
            offset, self._records = 0, []
        if status.st_size > folders.MAX_BYTES:
            raise DataError(f"{self._path} is too large; expected at most {folders.MAX_BYTES >> 20} MiB")
        file.seek(offset)
        content = file.read(status.st_size - offset)
        complete = content[: content.rfind(b"\n") + 1]
        try:
            lines = map(_without_nulls, complete.splitlines())
            self._records += [msgspec.json.decode(line, type=prepare_type(AttemptResult)) for line in lines]
        except (msgspec.MsgspecError, AttributeError, RecursionError, ValueError) as exc:
            raise DataError(f"{self._path} is not the file of a run: {exc}") from exc
        self._identity = (status.st_ino, offset + len(complete))


def _without_nulls(line: bytes) -> bytes:
    """Return a line without the metrics that were not finite, which the file has as null."""
    if b"null" not in line:
        return line
    record = json.loads(line)
    for name in ("metrics", "evaluation"):
        record[name] = {key: value for key, value in record.get(name, {}).items() if value is not None}
    return json.dumps(record).encode()


def _round(each: AttemptResult) -> admin_pb2.Round:
    counts = each.counts
    merged = counts.get("MERGED", 0)
    staleness = sum(behind * number for behind, number in each.staleness.items())
    return admin_pb2.Round(
        round=each.round,
        attempt=each.attempt,
        kind=_KINDS.get(each.kind, admin_pb2.ATTEMPT_KIND_UNSPECIFIED),
        phase=_PHASES.get(each.phase, admin_pb2.ATTEMPT_PHASE_UNSPECIFIED),
        reason=each.reason,
        assigned=sum(counts.values()),
        reported=merged,
        merged=merged,
        late=counts.get("LATE", 0),
        failed=counts.get("FAILED", 0),
        rejected=counts.get("REJECTED", 0),
        surplus=counts.get("SURPLUS", 0),
        dropped=counts.get("DROPPED", 0),
        opened_unix_s=each.opened_at,
        seconds=each.ended_at - each.opened_at,
        client_metrics=each.metrics,
        server_metrics=each.evaluation,
        update_bytes=int(each.bytes_up),
        mean_staleness=staleness / sum(each.staleness.values()) if each.staleness else 0.0,
        max_staleness=max(each.staleness, default=0),
    )


def _version(each: AttemptResult) -> admin_pb2.ModelVersion:
    version = admin_pb2.ModelVersion(
        round=each.round, created_unix_s=each.ended_at, num_updates=each.num_updates, metrics=each.evaluation
    )
    version.model.version = each.version
    return version
