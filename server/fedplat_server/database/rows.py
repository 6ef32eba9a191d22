"""Conversion between rows and records, also of states that a newer release has stored.

While the daemons of a server are replaced one by one, an older one may take over in the middle of an attempt of a newer
one. It pauses such a job, as one with a job file that it cannot read (`fedplat/job/spec.py`), and runs the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec
import sqlalchemy
from sqlalchemy.dialects import postgresql, sqlite

from fedplat import rounds
from fedplat.config.decoding import require_known
from fedplat.config.loaded_plugins import PluginVersion, versions_to_builtins
from fedplat.job import JobSpec, find_mechanism, is_unreadable, read_newer
from fedplat.job.privacy import find_mechanism_of
from fedplat.rounds import influence, records, states
from fedplat.rounds.protocols.base import find_training, training_of
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase, Reason
from fedplat_server.database import tables
from fedplat_server.database.records import (
    AttemptRecord,
    HistoryRecord,
    JobFileReader,
    JobRecord,
    Staleness,
    Tally,
    VersionRecord,
    encode_mechanism,
    read_plugins,
)
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


def version_values(job_id: str, version: rounds.ModelVersion, unix_s: float) -> Values:
    """Return a row of `model_versions`."""
    return to_values(version) | {"job_id": job_id, "created_unix_s": unix_s, "metrics": {}}


def version_record(row: Row) -> VersionRecord:
    """Read a row of `model_versions`."""
    removed = row.model_removed_unix_s, row.state_removed_unix_s
    return VersionRecord(to_record(row, rounds.ModelVersion), row.created_unix_s, row.metrics, *removed)


def ledger_values(job: rounds.JobState, version: rounds.ModelVersion, unix_s: float) -> Values | None:
    """Return the row of `ledger` for a version that a job's last attempt made; None if it is no private release."""
    num_survivors = job.attempt.num_survivors if job.attempt is not None else 0
    mechanism = find_mechanism_of(job.spec, num_survivors)
    if mechanism is None or not version.is_aggregate:
        return None
    return {
        "job_id": job.job_id,
        "version": version.version,
        "round": version.round,
        "mechanism": encode_mechanism(mechanism),
        "unix_s": unix_s,
    }


ATTEMPT_COLUMNS = tuple(name for name in rounds.Attempt.__struct_fields__ if name in tables.attempts.c)
"""The columns of `attempts` that have the names of the fields that they keep."""


def attempt_values(attempt: rounds.Attempt, unix_s: float) -> Values:
    """Return a row of `attempts`, with `unix_s` as the time of its opening and, if it has ended, of its end."""
    times = {"opened_unix_s": unix_s, "ended_unix_s": None if attempt.is_open else unix_s}
    return attempt.key._asdict() | {name: getattr(attempt, name) for name in ATTEMPT_COLUMNS} | times


def attempt(row: Row) -> rounds.Attempt:
    """Read a row of `attempts`, without assignments and with times of zero."""
    kept = {name: getattr(row, name) for name in ATTEMPT_COLUMNS}
    kept["kind"] = read_attempt_kind(row.kind)
    kept["phase"] = read_attempt_phase(row.phase, has_ended=row.ended_unix_s is not None)
    return rounds.Attempt(
        key=rounds.AttemptKey(row.job_id, row.round, row.number), opened_at=0.0, selection_ends_at=0.0, **kept
    )


def attempt_record(row: Row, groups: Sequence[Row]) -> AttemptRecord:
    """Read a row of `attempts` with the tally of its assignments: `groups` has one or more rows for each state."""
    counts, has_ended = Counter[states.AssignmentState](), row.ended_unix_s is not None
    for group in groups:
        counts[read_assignment_state(group.state, has_ended=has_ended)] += group.total
    tally = Tally(
        counts,
        update_bytes=sum(int(group.update_bytes) for group in groups),
        staleness=_staleness(groups),
        largest_norm=max((group.largest_norm for group in groups if group.largest_norm is not None), default=None),
        num_downloaded=sum(group.num_downloaded for group in groups),
        num_trained=sum(group.num_trained for group in groups),
    )
    return AttemptRecord(attempt(row), row.opened_unix_s, row.ended_unix_s, tally)


def _staleness(tally: Sequence[Row]) -> Staleness:
    """Return mean and maximum over the groups of a tally; a group without updates has no staleness."""
    groups = [(int(group.staleness), group.num_stale, group.max_staleness) for group in tally if group.num_stale]
    if not groups:
        return Staleness()
    number = sum(number for _, number, _ in groups)
    return Staleness(sum(total for total, _, _ in groups) / number, max(most for _, _, most in groups))


ASSIGNMENT_COLUMNS = tuple(name for name in rounds.Assignment.__struct_fields__ if name in tables.assignments.c)
"""The columns of `assignments` that have the names of the fields that they keep."""


def assignment_values(assignment: rounds.Assignment, revision: int, epoch_unix_s: float, unix_s: float) -> Values:
    """Return a row of `assignments` for an assignment that changed in this revision of its job, at `unix_s`.

    `epoch_unix_s` is the wall-clock time at which the clock of the assignment's times is 0.
    """
    key, folded_into, secure = assignment.key, assignment.folded_into, assignment.secure
    into = folded_into if folded_into != key else None
    kept = {name: getattr(assignment, name) for name in ASSIGNMENT_COLUMNS}
    return kept | {
        "job_id": key.job_id,
        "round": key.round,
        "number": key.number,
        "reported_revision": revision if assignment.took_s is not None else None,
        "assigned_unix_s": epoch_unix_s + assignment.assigned_at,
        "deadline_unix_s": epoch_unix_s + assignment.deadline_at,
        "staleness": assignment.staleness if folded_into is not None else None,
        "into_round": into.round if into is not None else None,
        "into_number": into.number if into is not None else None,
        "uploading_unix_s": unix_s if assignment.state is states.AssignmentState.UPLOADING else None,
        "ended_unix_s": None if assignment.is_busy else unix_s,
        "secure_group": secure.group if secure is not None else None,
        "secure_position": secure.position if secure is not None else None,
    }


def assignment(
    row: Row, epoch_unix_s: float | None = None, messages: Mapping[str, bytes] = MappingProxyType({})
) -> rounds.Assignment:
    """Read a row of `assignments` with its attempt's `kind`, and with the client's messages by their kinds.

    Its times are on a clock that is 0 at `epoch_unix_s`; without it they are zero.
    """
    times = [row.assigned_unix_s, row.deadline_unix_s]
    assigned_at, deadline_at = [unix_s - epoch_unix_s if epoch_unix_s is not None else 0.0 for unix_s in times]
    key = rounds.AttemptKey(row.job_id, row.round, row.number)
    into = rounds.AttemptKey(row.job_id, row.into_round, row.into_number) if row.into_round is not None else key
    kept = {name: getattr(row, name) for name in ASSIGNMENT_COLUMNS}
    kept["state"] = read_assignment_state(row.state, has_ended=row.ended_unix_s is not None)
    kept["reason"] = read_reason(row.reason)
    kept["staleness"] = row.staleness or 0
    return rounds.Assignment(
        key=key,
        kind=read_attempt_kind(row.kind),
        assigned_at=assigned_at,
        deadline_at=deadline_at,
        folded_into=into if row.staleness is not None else None,
        secure=_secure_messages(row, messages),
        **kept,
    )


def _secure_messages(row: Row, messages: Mapping[str, bytes]) -> records.SecureMessages | None:
    if row.secure_group is None:
        return None
    return records.SecureMessages(row.secure_group, row.secure_position, **messages)


def job_values(state: rounds.JobState) -> Values:
    """Return the mutable columns of `jobs`; of a job that was not read as a whole, without those that may be more."""
    values: Values = {
        "status": state.status,
        "reason": state.reason,
        "round": state.round,
        "failures": state.failures,
        "latest_version": state.latest.version,
        "revision": state.revision,
    }
    if is_unreadable(state.spec):
        return values  # what a newer release has written to the others stays there until it is back
    kind = training_of(state)
    return values | {"plugins": versions_to_builtins(state.plugins) or None, kind.column: kind.write_state(state)}


class ReportHistory(NamedTuple):
    """The past of a job, oldest first.

    The durations of reports in seconds, the last claim of each client, the numbers of survivors of unmasked attempts,
    and the clients whose messages of a secure aggregation were invalid.
    """

    durations: tuple[float, ...]
    claims: tuple[records.Claim, ...]
    unmasked: tuple[int, ...]
    barred: tuple[str, ...] = ()


class LastAttempt(NamedTuple):
    """The last attempt of a job, and the assignments that it carries over.

    `unknown_state` names a state of theirs that only a newer release knows, if there is one.
    """

    attempt: rounds.Attempt | None = None
    carried_over: rounds.AssignmentSet = records.NO_ASSIGNMENTS
    unknown_state: str = ""


def job_record(
    row: Row, files: JobFileReader, latest: rounds.ModelVersion, last: LastAttempt, past: ReportHistory
) -> JobRecord:
    """Read a row of `jobs`, with the job's latest version, last attempt and reports from other tables."""
    spec, problem = files.read(row)
    kept, unread = _read_kept(row, spec)
    if (unknown := last.unknown_state or unread) and not is_unreadable(spec):
        spec, problem = read_newer(row.job_file, row.privacy), unknown
    state = rounds.JobState(
        job_id=row.job_id,
        spec=spec,
        latest=latest,
        status=states.JobStatus(row.status),
        reason=row.reason,
        round=row.round,
        attempt=last.attempt,
        carried_over=last.carried_over,
        failures=row.failures,
        durations=past.durations,
        claims=past.claims if influence.looks_back(spec) else (),
        revision=row.revision,
        plugins=kept.plugins,
        protocol=kept.protocol,
        unmasked=past.unmasked,
        barred=past.barred,
    )
    return JobRecord(state, row.job_file, row.created_unix_s, problem)


class _Kept(NamedTuple):
    """What a job keeps between its attempts."""

    plugins: tuple[PluginVersion, ...] = ()
    protocol: object = None


def _read_kept(row: Row, spec: JobSpec) -> tuple[_Kept, str]:
    """Read what a job keeps, and why the first part of it that a newer release has written cannot be read."""
    kept, problem, kind = _Kept(), "", find_training(spec)
    try:
        kept = kept._replace(plugins=_read_plugins(row.plugins))
    except msgspec.ValidationError as exc:
        problem = f"the stored plugins of the job: {exc}"
    try:
        kept = kept._replace(protocol=kind.read_state(getattr(row, kind.column), spec))
    except msgspec.ValidationError as exc:
        problem = problem or f"the stored {kind.column} of the job: {exc}"
    return kept, problem


def _read_plugins(stored: Any) -> tuple[PluginVersion, ...]:
    for version in stored or ():
        require_known(version, PluginVersion)
    return read_plugins(stored)


def privacy_values(spec: JobSpec) -> Values:
    """Return `[privacy]` as a column of `jobs`. Raises `StoreError` if a private job is not calibrated."""
    options = spec.privacy
    if options is not None and (find_mechanism(spec) is None or options.max_releases is None):
        raise StoreError("a private job cannot be stored before its noise and its releases are calibrated")
    stored = msgspec.to_builtins(options)
    if options is not None and options.trust == "server":
        del stored["trust"]  # 0.1.0 does not know it, and stops at a key that it does not know
    return {"privacy": stored}


def adds_own_noise(row: Row) -> bool:
    """Return whether the clients of a job add the noise: with `privacy.trust = "none"`."""
    return (row.privacy or {}).get("trust") == "none"


def may_be_secure(row: Row) -> bool:
    """Return whether a job may have secure aggregation; without reading its file."""
    return "secure_aggregation" in row.job_file


def history_values(job_id: str, row: rounds.HistoryRow, unix_s: float) -> Values:
    """Return a row of `history`."""
    return to_values(row) | {"job_id": job_id, "unix_s": unix_s}


def history_record(row: Row) -> HistoryRecord:
    """Read a row of `history`."""
    return HistoryRecord(row.sequence, row.unix_s, to_record(row, rounds.HistoryRow))


_Name = TypeVar("_Name", bound=StrEnum)


def _find(enum: type[_Name], name: str, otherwise: _Name) -> _Name:
    return enum(name) if _is_known(enum, name) else otherwise


def _is_known(enum: type[StrEnum], name: str) -> bool:
    return name in enum.__members__


def read_attempt_kind(name: str) -> AttemptKind:
    """Return the kind of an attempt."""
    return _find(AttemptKind, name, AttemptKind.TRAIN)


def read_attempt_phase(name: str, *, has_ended: bool) -> AttemptPhase:
    """Return the phase of an attempt. An unknown one that is open becomes COLLECTING, which can be abandoned."""
    return _find(AttemptPhase, name, AttemptPhase.ABANDONED if has_ended else AttemptPhase.COLLECTING)


def read_assignment_state(name: str, *, has_ended: bool) -> AssignmentState:
    """Return the state of an assignment. An unknown one that is open becomes TRAINING, which can be dropped."""
    return _find(AssignmentState, name, AssignmentState.DROPPED if has_ended else AssignmentState.TRAINING)


def read_reason(name: str | None) -> Reason | None:
    """Return the reason of the end of an assignment; None if this release does not know it."""
    return Reason(name) if name is not None and _is_known(Reason, name) else None


def describe_unknown(attempt: Row, assignments: Iterable[Row]) -> str:
    """Return which state of a job's last attempt this release does not know; empty if it knows them all."""
    place = f"attempt {attempt.number} at round {attempt.round}"
    if not (_is_known(AttemptPhase, attempt.phase) and _is_known(AttemptKind, attempt.kind)):
        return f"{place} of the kind {attempt.kind} is {attempt.phase}"
    for each in assignments:
        if not _is_known(AssignmentState, each.state):
            return f"the assignment of client {each.client_id} in {place} is {each.state}"
    return ""
