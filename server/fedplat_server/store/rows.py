"""Rows of the tables to the records of the coordinator and of the port, and back."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy

from fedplat.errors import JobFileError
from fedplat.job import JobSpec, parse_job
from fedplat.privacy import Privacy
from fedplat.rounds import Assignment, Attempt, AttemptKey, Crew, HistoryRow, JobState, ModelVersion, influence
from fedplat.rounds.records import Claim
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase, JobStatus, Reason
from fedplat_server.errors import StoreError
from fedplat_server.store.fleet import ClientRecord, EnrolmentToken
from fedplat_server.store.ledger import spelled
from fedplat_server.store.port import AttemptRecord, HistoryRecord, JobRecord, Staleness, VersionRecord

Row = sqlalchemy.Row[Any]
Values = dict[str, Any]
"""A row to be written, by the names of the columns."""


def client_record(row: Row) -> ClientRecord:
    """A row of `clients`."""
    return ClientRecord(
        client_id=row.client_id,
        population=row.population,
        labels=row.labels,
        software_version=row.software_version,
        enrolled_unix_s=row.enrolled_unix_s,
        public_key=row.public_key,
        session_number=row.session_number,
        revoked_unix_s=row.revoked_unix_s,
        token_id=row.token_id,
    )


def token_values(token: EnrolmentToken, token_hash: bytes) -> Values:
    """A token as a row of `enrolment_tokens`."""
    return {**dataclasses.asdict(token), "token_hash": token_hash}


def enrolment_token(row: Row) -> EnrolmentToken:
    """A row of `enrolment_tokens`."""
    names = (field.name for field in dataclasses.fields(EnrolmentToken))
    return EnrolmentToken(**{name: getattr(row, name) for name in names})


def version_values(job_id: str, version: ModelVersion, unix_s: float) -> Values:
    """A version as a row of `model_versions`."""
    return {
        "job_id": job_id,
        "version": version.version,
        "round": version.round,
        "attempt": version.attempt,
        "digest": version.digest,
        "size_bytes": version.size_bytes,
        "state_digest": version.state_digest,
        "delta_digest": version.delta_digest,
        "delta_size_bytes": version.delta_size_bytes,
        "delta_base": version.delta_base,
        "num_updates": version.num_updates,
        "total_weight": version.total_weight,
        "restored_from": version.restored_from,
        "created_unix_s": unix_s,
        "metrics": {},
    }


def model_version(row: Row) -> ModelVersion:
    """A row of `model_versions`."""
    return ModelVersion(
        version=row.version,
        round=row.round,
        attempt=row.attempt,
        digest=row.digest,
        size_bytes=row.size_bytes,
        state_digest=row.state_digest,
        delta_digest=row.delta_digest,
        delta_size_bytes=row.delta_size_bytes,
        delta_base=row.delta_base,
        num_updates=row.num_updates,
        total_weight=row.total_weight,
        restored_from=row.restored_from,
    )


def version_record(row: Row) -> VersionRecord:
    """A row of `model_versions`, with what was said of it."""
    removed = row.model_removed_unix_s, row.state_removed_unix_s
    return VersionRecord(model_version(row), row.created_unix_s, row.metrics, *removed)


def attempt_values(attempt: Attempt, unix_s: float) -> Values:
    """An attempt as a row of `attempts`, as if it was opened (and, if it has ended, ended) at this moment."""
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
    }


def attempt(row: Row) -> Attempt:
    """A row of `attempts`, without its crew; moments of its own are forgotten."""
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
    )


def attempt_record(row: Row, tally: Sequence[Row]) -> AttemptRecord:
    """A row of `attempts` with its assignments counted; `tally` has one row or more for each of their states."""
    counts = Counter[AssignmentState]()
    for one in tally:
        counts[AssignmentState(one.state)] += one.total
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
        update_bytes=sum(int(one.update_bytes) for one in tally),
        staleness=_staleness(tally),
        largest_norm=max((one.largest_norm for one in tally if one.largest_norm is not None), default=None),
    )


def _staleness(tally: Sequence[Row]) -> Staleness:
    """Mean and maximum over the groups of a tally; a group without any update has no number."""
    groups = [(int(one.staleness), one.num_stale, one.max_staleness) for one in tally if one.num_stale]
    if not groups:
        return Staleness()
    number = sum(number for _, number, _ in groups)
    return Staleness(sum(total for total, _, _ in groups) / number, max(most for _, _, most in groups))


def assignment_values(assignment: Assignment, revision: int, epoch_unix_s: float) -> Values:
    """An assignment that changed in this revision of its job, as a row of `assignments`.

    `epoch_unix_s` is where the clock of its moments stands at 0.
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
    }


def assignment(row: Row, epoch_unix_s: float | None = None) -> Assignment:
    """Read a row of `assignments` with its attempt's `kind`.

    Its moments are on a clock that stands at 0 at `epoch_unix_s`; without that they are zero.
    """
    moments = [row.assigned_unix_s, row.deadline_unix_s]
    assigned_at, deadline_at = [unix_s - epoch_unix_s if epoch_unix_s is not None else 0.0 for unix_s in moments]
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


def job_values(state: JobState) -> Values:
    """What changes of a job, as columns of `jobs`."""
    return {
        "status": state.status,
        "reason": state.reason,
        "round": state.round,
        "failures": state.failures,
        "latest_version": state.latest.version,
        "revision": state.revision,
    }


class Past(NamedTuple):
    """What a job remembers of its assignments: how long they took, and what clients claimed last; oldest first."""

    durations: tuple[float, ...]
    claims: tuple[Claim, ...]


def job_record(row: Row, latest: ModelVersion, last: tuple[Attempt | None, Crew], past: Past) -> JobRecord:
    """A row of `jobs` with what belongs to it."""
    spec = job_spec(row)
    state = JobState(
        job_id=row.job_id,
        spec=spec,
        latest=latest,
        status=JobStatus(row.status),
        reason=row.reason,
        round=row.round,
        attempt=last[0],
        carried=last[1],
        failures=row.failures,
        durations=past.durations,
        claims=past.claims if influence.looks_back(spec) else (),
        revision=row.revision,
    )
    return JobRecord(state, row.job_file, row.created_unix_s)


def settled_values(spec: JobSpec) -> Values:
    """What was settled of a job, as columns of `jobs`. Raises `StoreError` if a private one was not settled."""
    options = spec.privacy
    if options is not None and (spec.mechanism is None or options.max_releases is None):
        raise StoreError("a private job cannot be stored before its noise and its releases are settled")
    return {"privacy": msgspec.to_builtins(options)}


def job_spec(row: Row) -> JobSpec:
    """The job file of a row of `jobs`, with what was settled. Raises `StoreError` if this fedplat cannot read it."""
    try:
        spec = parse_job_once(row.job_file)
        return with_settled(spec, row.privacy)
    except (JobFileError, msgspec.ValidationError) as exc:
        raise StoreError(
            f"the stored job file of {row.job_id} cannot be read by this version of fedplat: {exc}"
        ) from exc


parse_job_once = functools.lru_cache(maxsize=1024)(parse_job)


def with_settled(spec: JobSpec, settled: object) -> JobSpec:
    """A job with what was settled of it. Raises `JobFileError` or `ValidationError` if they do not belong together."""
    if (spec.privacy is None) != (settled is None):
        raise JobFileError("privacy: the job file and what was settled of it do not agree")
    if settled is None:
        return spec
    return msgspec.structs.replace(spec, privacy=msgspec.convert(settled, Privacy))


def ledger_values(job: JobState, version: ModelVersion, unix_s: float) -> Values | None:
    """The row of `ledger` that belongs to a version of a job; None if that is no private release."""
    mechanism = job.spec.mechanism
    if mechanism is None or not version.is_aggregate:
        return None
    return {
        "job_id": job.job_id,
        "version": version.version,
        "round": version.round,
        "mechanism": spelled(mechanism),
        "unix_s": unix_s,
    }


def history_values(job_id: str, row: HistoryRow, unix_s: float) -> Values:
    """A row of `history`."""
    return {
        "unix_s": unix_s,
        "job_id": job_id,
        "entity": row.entity,
        "from_state": row.from_state,
        "to_state": row.to_state,
        "round": row.round,
        "attempt": row.attempt,
        "client_id": row.client_id,
        "reason": row.reason,
        "metrics": row.metrics,
        "kind": row.kind,
        "update_bytes": row.update_bytes,
        "norm": row.norm,
    }


def history_record(row: Row) -> HistoryRecord:
    """A row of `history`."""
    columns = (row.entity, row.from_state, row.to_state, row.round, row.attempt, row.client_id, row.reason)
    return HistoryRecord(
        row.sequence, row.unix_s, HistoryRow(*columns, row.metrics, row.kind, row.update_bytes, row.norm)
    )
