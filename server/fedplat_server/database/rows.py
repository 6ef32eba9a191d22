"""Conversion between rows of the tables and the records of the coordinator and of the ports."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import sqlalchemy
from sqlalchemy.dialects import postgresql, sqlite

from fedplat.errors import FedplatError, JobFileError, PluginError, UserCodeError
from fedplat.job import JobSpec, find_mechanism, parse_job, read_newer
from fedplat.loaded_plugins import PluginVersion, versions_to_builtins
from fedplat.plugins import BUILTIN, Plugins
from fedplat.privacy import Privacy
from fedplat.rounds import Assignment, AssignmentSet, Attempt, AttemptKey, HistoryRow, JobState, ModelVersion, influence
from fedplat.rounds.invariants.records import JobRow
from fedplat.rounds.records import Claim
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase, JobStatus, Reason
from fedplat.toml import read_record, read_toml
from fedplat_server.database.jobs import AttemptRecord, Funnel, HistoryRecord, JobRecord, Staleness, VersionRecord
from fedplat_server.database.ledger import encode_mechanism
from fedplat_server.errors import StoreError

_Record = TypeVar("_Record")
Row = sqlalchemy.Row[Any]
Values = dict[str, Any]
"""A row to write: values by the names of the columns."""


def insert(dialect: str, table: sqlalchemy.Table) -> postgresql.Insert | sqlite.Insert:
    """Return an INSERT that supports ON CONFLICT, for which SQLAlchemy has separate but equal constructs by dialect."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def to_record(row: Row, record: type[_Record]) -> _Record:
    """Return a row as a record, whose fields have the names of columns; other columns are left out."""
    return record(*[getattr(row, name) for name in field_names(record)])


def to_values(record: object) -> Values:
    """Return the fields of a record, by name."""
    return {name: getattr(record, name) for name in field_names(type(record))}


@functools.cache
def field_names(record: type[Any]) -> tuple[str, ...]:
    """Return the names of a record's fields, in order."""
    if issubclass(record, msgspec.Struct):
        return record.__struct_fields__
    if dataclasses.is_dataclass(record):
        return tuple(field.name for field in dataclasses.fields(record))
    return record._fields  # of a NamedTuple


# --- versions ----------------------------------------------------------------------------------------------


def version_values(job_id: str, version: ModelVersion, unix_s: float) -> Values:
    """Return a row of `model_versions`."""
    return to_values(version) | {"job_id": job_id, "created_unix_s": unix_s, "metrics": {}}


def version_record(row: Row) -> VersionRecord:
    """Read a row of `model_versions`."""
    removed = row.model_removed_unix_s, row.state_removed_unix_s
    return VersionRecord(to_record(row, ModelVersion), row.created_unix_s, row.metrics, *removed)


def ledger_values(job: JobState, version: ModelVersion, unix_s: float) -> Values | None:
    """Return the row of `ledger` for a version of a job; None if it is not a private release."""
    mechanism = find_mechanism(job.spec)
    if mechanism is None or not version.is_aggregate:
        return None
    return {
        "job_id": job.job_id,
        "version": version.version,
        "round": version.round,
        "mechanism": encode_mechanism(mechanism),
        "unix_s": unix_s,
    }


# --- attempts and assignments ------------------------------------------------------------------------------


def attempt_values(attempt: Attempt, unix_s: float) -> Values:
    """Return a row of `attempts`, with `unix_s` as the time of its opening and, if it has ended, of its end."""
    return {
        "job_id": attempt.key.job_id,
        "round": attempt.key.round,
        "number": attempt.key.number,
        "kind": attempt.kind,
        "phase": attempt.phase,
        "reason": attempt.reason,
        "base_version": attempt.base_version,
        "goal": attempt.goal,
        "minimum": attempt.minimum,
        "target": attempt.target,
        "opened_unix_s": unix_s,
        "ended_unix_s": None if attempt.is_open else unix_s,
        "metrics": attempt.metrics,
        "num_checked_in": attempt.num_checked_in,
        "num_eligible": attempt.num_eligible,
    }


def attempt(row: Row) -> Attempt:
    """Read a row of `attempts`, without assignments and with times of zero."""
    return Attempt(
        key=AttemptKey(row.job_id, row.round, row.number),
        kind=AttemptKind(row.kind),
        phase=AttemptPhase(row.phase),
        base_version=row.base_version,
        goal=row.goal,
        minimum=row.minimum,
        target=row.target,
        opened_at=0.0,
        selection_ends_at=0.0,
        reason=row.reason,
        metrics=row.metrics,
        num_checked_in=row.num_checked_in,
        num_eligible=row.num_eligible,
    )


def attempt_record(row: Row, tally: Sequence[Row]) -> AttemptRecord:
    """Read a row of `attempts` with the counts of its assignments: `tally` has one or more rows for each state."""
    counts = Counter[AssignmentState]()
    for group in tally:
        counts[AssignmentState(group.state)] += group.total
    return AttemptRecord(
        key=AttemptKey(row.job_id, row.round, row.number),
        kind=AttemptKind(row.kind),
        phase=AttemptPhase(row.phase),
        reason=row.reason,
        base_version=row.base_version,
        goal=row.goal,
        minimum=row.minimum,
        target=row.target,
        opened_unix_s=row.opened_unix_s,
        ended_unix_s=row.ended_unix_s,
        metrics=row.metrics,
        counts=counts,
        update_bytes=sum(int(group.update_bytes) for group in tally),
        staleness=_staleness(tally),
        largest_norm=max((group.largest_norm for group in tally if group.largest_norm is not None), default=None),
        funnel=Funnel(
            row.num_checked_in,
            row.num_eligible,
            num_downloaded=sum(group.num_downloaded for group in tally),
            num_trained=sum(group.num_trained for group in tally),
        ),
    )


def _staleness(tally: Sequence[Row]) -> Staleness:
    """Return mean and maximum over the groups of a tally; a group without updates has no staleness."""
    groups = [(int(group.staleness), group.num_stale, group.max_staleness) for group in tally if group.num_stale]
    if not groups:
        return Staleness()
    number = sum(number for _, number, _ in groups)
    return Staleness(sum(total for total, _, _ in groups) / number, max(most for _, _, most in groups))


def assignment_values(assignment: Assignment, revision: int, epoch_unix_s: float, unix_s: float) -> Values:
    """Return a row of `assignments` for an assignment that changed in this revision of its job, at `unix_s`.

    `epoch_unix_s` is the wall-clock time at which the clock of the assignment's times is 0.
    """
    key, folded_into = assignment.key, assignment.folded_into
    into = folded_into if folded_into != key else None
    return {
        "job_id": key.job_id,
        "round": key.round,
        "number": key.number,
        "client_id": assignment.client_id,
        "token_hash": assignment.token_hash,
        "state": assignment.state,
        "reason": assignment.reason,
        "text": assignment.text,
        "digest": assignment.digest,
        "num_examples": assignment.num_examples,
        "weight": assignment.weight,
        "metrics": assignment.metrics,
        "took_s": assignment.took_s,
        "reported_revision": revision if assignment.took_s is not None else None,
        "assigned_unix_s": epoch_unix_s + assignment.assigned_at,
        "deadline_unix_s": epoch_unix_s + assignment.deadline_at,
        "report_number": assignment.report_number,
        "update_bytes": assignment.update_bytes,
        "base_version": assignment.base_version,
        "staleness": assignment.staleness if folded_into is not None else None,
        "into_round": into.round if into is not None else None,
        "into_number": into.number if into is not None else None,
        "norm": assignment.norm,
        "uploading_unix_s": unix_s if assignment.state is AssignmentState.UPLOADING else None,
        "ended_unix_s": None if assignment.is_busy else unix_s,
    }


def assignment(row: Row, epoch_unix_s: float | None = None) -> Assignment:
    """Read a row of `assignments` with its attempt's `kind`.

    Its times are on a clock that is 0 at `epoch_unix_s`; without it they are zero.
    """
    times = [row.assigned_unix_s, row.deadline_unix_s]
    assigned_at, deadline_at = [unix_s - epoch_unix_s if epoch_unix_s is not None else 0.0 for unix_s in times]
    key = AttemptKey(row.job_id, row.round, row.number)
    into = AttemptKey(row.job_id, row.into_round, row.into_number) if row.into_round is not None else key
    return Assignment(
        key=key,
        base_version=row.base_version,
        folded_into=into if row.staleness is not None else None,
        staleness=row.staleness or 0,
        client_id=row.client_id,
        kind=AttemptKind(row.kind),
        token_hash=row.token_hash,
        state=AssignmentState(row.state),
        assigned_at=assigned_at,
        deadline_at=deadline_at,
        reason=Reason(row.reason) if row.reason is not None else None,
        text=row.text,
        digest=row.digest,
        num_examples=row.num_examples,
        weight=row.weight,
        metrics=row.metrics,
        took_s=row.took_s,
        report_number=row.report_number,
        update_bytes=row.update_bytes,
        norm=row.norm,
    )


# --- jobs --------------------------------------------------------------------------------------------------


def job_values(state: JobState) -> Values:
    """Return the mutable columns of `jobs`."""
    return {
        "status": state.status,
        "reason": state.reason,
        "round": state.round,
        "failures": state.failures,
        "latest_version": state.latest.version,
        "revision": state.revision,
        "plugins": versions_to_builtins(state.plugins) or None,
        "cohort": list(state.cohort) or None,
    }


class ReportHistory(NamedTuple):
    """The past reports of a job: their durations in seconds, and the last claim of each client; oldest first."""

    durations: tuple[float, ...]
    claims: tuple[Claim, ...]


def job_record(
    row: Row,
    files: JobFileReader,
    latest: ModelVersion,
    last: tuple[Attempt | None, AssignmentSet],
    past: ReportHistory,
) -> JobRecord:
    """Read a row of `jobs`, with the job's latest version, last attempt and reports from other tables."""
    spec, problem = files.read(row)
    state = JobState(
        job_id=row.job_id,
        spec=spec,
        latest=latest,
        status=JobStatus(row.status),
        reason=row.reason,
        round=row.round,
        attempt=last[0],
        carried_over=last[1],
        failures=row.failures,
        durations=past.durations,
        claims=past.claims if influence.looks_back(spec) else (),
        revision=row.revision,
        plugins=job_plugins(row),
        cohort=tuple(row.cohort or ()),
    )
    return JobRecord(state, row.job_file, row.created_unix_s, problem)


def privacy_values(spec: JobSpec) -> Values:
    """Return `[privacy]` as a column of `jobs`. Raises `StoreError` if a private job is not calibrated."""
    options = spec.privacy
    if options is not None and (find_mechanism(spec) is None or options.max_releases is None):
        raise StoreError("a private job cannot be stored before its noise and its releases are calibrated")
    return {"privacy": msgspec.to_builtins(options)}


class JobFileReader:
    """Reads stored job files with the plugins of this process; each is parsed once."""

    def __init__(self, plugins: Plugins = BUILTIN) -> None:
        self._plugins = plugins
        self._parse = functools.lru_cache(maxsize=1024)(self._parse_file)

    def read(self, row: Row | JobRow) -> tuple[JobSpec, str]:
        """Return the job of a row of `jobs`, with its calibrated `[privacy]`, and the first mistake in its file.

        If there is a mistake, or this process lacks a plugin of the job, the options of its plugins are `AbsentPlugin`.
        A job file of a newer release is read by `read_newer`. Raises `StoreError` for what is not a job file.
        """
        try:
            return self._read_known(row)
        except (JobFileError, msgspec.ValidationError) as exc:
            problem = str(exc).partition("\n")[0]
        try:
            return read_newer(row.job_file, row.privacy), problem
        except JobFileError as exc:
            raise StoreError(
                f"the stored job file of {row.job_id} cannot be read by this version of fedplat: {exc}"
            ) from exc

    def _read_known(self, row: Row | JobRow) -> tuple[JobSpec, str]:
        plugins = job_plugins(row)
        spec, problem = self._parse(row.job_file, plugins)
        try:
            return with_calibrated(spec, row.privacy), problem
        except (PluginError, UserCodeError) as exc:  # it builds the job's rule again
            return with_calibrated(_without_plugins(row.job_file, plugins), row.privacy), str(exc)

    def _parse_file(self, job_file: str, plugins: tuple[PluginVersion, ...]) -> tuple[JobSpec, str]:
        try:
            return parse_job(job_file, self._plugins), ""
        except FedplatError as exc:  # the code of a plugin may raise any of them
            if not plugins:
                raise
            return _without_plugins(job_file, plugins), str(exc).partition("\n")[0]


def _without_plugins(job_file: str, plugins: Iterable[PluginVersion]) -> JobSpec:
    """Parse a stored job file; the options of its plugins are `AbsentPlugin`. Raises `JobFileError`."""
    absent = frozenset((version.kind, version.name) for version in plugins)
    return read_record(read_toml(job_file), JobSpec, plugins=Plugins(absent=absent))


def job_plugins(row: Row | JobRow) -> tuple[PluginVersion, ...]:
    """Return the versions of a job's plugins. Raises `msgspec.ValidationError`."""
    return msgspec.convert(row.plugins or (), tuple[PluginVersion, ...])


def with_calibrated(spec: JobSpec, privacy: object) -> JobSpec:
    """Return a job with its calibrated `[privacy]`, a value of the column `privacy`.

    Raises `JobFileError` or `msgspec.ValidationError` if they do not belong together.
    """
    if (spec.privacy is None) != (privacy is None):
        raise JobFileError("privacy: the job file and the stored [privacy] do not agree")
    if privacy is None:
        return spec
    return msgspec.structs.replace(spec, privacy=msgspec.convert(privacy, Privacy))


# --- history -----------------------------------------------------------------------------------------------


def history_values(job_id: str, row: HistoryRow, unix_s: float) -> Values:
    """Return a row of `history`."""
    return to_values(row) | {"job_id": job_id, "unix_s": unix_s}


def history_record(row: Row) -> HistoryRecord:
    """Read a row of `history`."""
    return HistoryRecord(row.sequence, row.unix_s, to_record(row, HistoryRow))
