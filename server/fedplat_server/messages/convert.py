"""Conversion between records of the core and messages of the wire."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message
from msgspec import structs

from fedplat import rounds, texts
from fedplat.codecs import container
from fedplat.config.loaded_plugins import PluginVersion
from fedplat.job import JobSpec, Scalar
from fedplat.rounds import commands, privacy_rules
from fedplat.rounds.states import (
    BUSY_STATES,
    REASON_TEXTS,
    AssignmentState,
    AttemptKind,
    AttemptPhase,
    JobStatus,
    Reason,
)
from fedplat.wire.v1 import admin_pb2, fleet_pb2, model_pb2
from fedplat_server.coordination.progress import ProgressSummary
from fedplat_server.database import records, rows

_Message = TypeVar("_Message", bound=Message)
REASONS: Mapping[Reason, model_pb2.Reason.ValueType] = {
    reason: model_pb2.Reason.Value(f"REASON_{reason.name}") for reason in Reason
}
_REASONS_BACK = {wire: reason for reason, wire in REASONS.items()}
STATUSES = {status: admin_pb2.JobStatus.Value(f"JOB_STATUS_{status.name}") for status in JobStatus}
KINDS = {kind: admin_pb2.AttemptKind.Value(f"ATTEMPT_KIND_{kind.name}") for kind in AttemptKind}
_PHASES = {phase: admin_pb2.AttemptPhase.Value(f"ATTEMPT_PHASE_{phase.name}") for phase in AttemptPhase}
_ANNOUNCED_PHASES = frozenset({AttemptPhase.COLLECTING, AttemptPhase.EXCHANGING, AttemptPhase.REDUCING})
"""Phases in which only silos of a decentralised job are ADVERTISED."""


def encode(message: type[_Message], record: object, **others: Any) -> _Message:
    """Return a message with the fields of a record that have the same names, and with others. None is left unset."""
    return message(**{name: getattr(record, name) for name in _shared_names(message, type(record))} | others)


@functools.cache
def _shared_names(message: type[Message], record: type[Any]) -> list[str]:
    return [name for name in rows.field_names(record) if name in message.DESCRIPTOR.fields_by_name]


def reason_from_wire(value: model_pb2.Reason.ValueType) -> Reason | None:
    """Decode a reason; None if it is unset or from a newer version."""
    return _REASONS_BACK.get(value)


def refusal(reason: Reason, window: commands.RetryWindow, text: str = "") -> fleet_pb2.Refusal:
    """Encode a refusal; `text` replaces the default text of the reason."""
    return fleet_pb2.Refusal(
        reason=REASONS[reason],
        text=text or REASON_TEXTS[reason],
        retry=model_pb2.RetryWindow(min_s=window.min_s, max_s=window.max_s),
    )


def value(scalar: Scalar) -> model_pb2.Value:
    """Encode a hyper-parameter."""
    if isinstance(scalar, bool):  # before int: bool is a subclass
        return model_pb2.Value(bool_value=scalar)
    if isinstance(scalar, int):
        return model_pb2.Value(int_value=scalar)
    if isinstance(scalar, float):
        return model_pb2.Value(double_value=scalar)
    return model_pb2.Value(string_value=scalar)


def model_ref(version: rounds.ModelVersion) -> model_pb2.ModelRef:
    """Return the reference to a version's model file."""
    return model_pb2.ModelRef(version=version.version, digest=version.digest, size_bytes=version.size_bytes)


def model_delta(version: rounds.ModelVersion, spec: JobSpec) -> fleet_pb2.ModelDelta | None:
    """Return the reference to the step from a version's base to it; None without one smaller than the whole model."""
    codec = spec.compression.downlink
    if codec is None or not version.delta_digest or version.delta_size_bytes >= version.size_bytes:
        return None
    return fleet_pb2.ModelDelta(
        digest=version.delta_digest,
        size_bytes=version.delta_size_bytes,
        base_digest=version.delta_base,
        codec=container.options_to_text(codec),
    )


def job(record: records.JobRecord, current: admin_pb2.Round | None, shown: admin_pb2.Job) -> admin_pb2.Job:
    """Encode a job with its last attempt; `shown` has the fields of its kind."""
    state = record.state
    message = admin_pb2.Job(
        job_id=state.job_id,
        name=state.spec.name,
        population=state.spec.population,
        status=STATUSES[state.status],
        reason=texts.shorten(state.reason),
        round=state.round,
        model=model_ref(state.latest),
        created_unix_s=record.created_unix_s,
        job_file=record.job_file,
        current=current,
        restored_from=state.latest.restored_from,
        plugins=plugins(state.plugins),
    )
    message.MergeFrom(shown)
    return message


def plugins(versions: Iterable[PluginVersion]) -> list[admin_pb2.Plugin]:
    """Encode the versions of plugins."""
    return [admin_pb2.Plugin(**structs.asdict(version)) for version in versions]


def progress(summary: ProgressSummary) -> admin_pb2.AttemptProgress:
    """Encode the progress of the clients of an attempt."""
    step = summary.step
    encoded = encode(admin_pb2.StepProgress, step, phase=_PHASES[step.phase]) if step is not None else None
    return encode(admin_pb2.AttemptProgress, summary, step=encoded)


_NUMBERS = tuple(
    field.name
    for field in admin_pb2.Round.DESCRIPTOR.fields
    if field.name in rounds.Attempt.__struct_fields__ and field.type == field.TYPE_UINT32
)
"""The numbers of an attempt that have the same name on the wire."""


def round_(
    record: records.AttemptRecord, server_metrics: Mapping[str, float], summary: ProgressSummary | None = None
) -> admin_pb2.Round:
    """Encode an attempt with the counts of its assignments by outcome."""
    attempt, tally, ended = record.attempt, record.tally, record.ended_unix_s
    counts = {state: tally.counts.get(state, 0) for state in AssignmentState}
    return admin_pb2.Round(
        round=attempt.key.round,
        attempt=attempt.key.number,
        kind=KINDS[attempt.kind],
        phase=_PHASES[attempt.phase],
        reason=texts.shorten(attempt.reason),
        assigned=sum(counts.values()),
        reported=_count_reported(attempt.phase, counts),
        late=counts[AssignmentState.LATE],
        failed=counts[AssignmentState.FAILED],
        rejected=counts[AssignmentState.REJECTED],
        surplus=counts[AssignmentState.SURPLUS],
        dropped=counts[AssignmentState.DROPPED],
        opened_unix_s=record.opened_unix_s,
        seconds=ended - record.opened_unix_s if ended is not None else 0.0,
        client_metrics=dict(attempt.metrics),
        server_metrics=dict(server_metrics),
        update_bytes=tally.update_bytes,
        mean_staleness=tally.staleness.mean,
        max_staleness=tally.staleness.most,
        largest_norm=tally.largest_norm,
        progress=progress(summary) if summary is not None else None,
        checked_in=attempt.num_checked_in,
        eligible=attempt.num_eligible,
        downloaded=tally.num_downloaded,
        trained=tally.num_trained,
        merged=counts[AssignmentState.MERGED],
        busy=sum(counts[state] for state in BUSY_STATES),
        **{name: getattr(attempt, name) for name in _NUMBERS},
    )


def _count_reported(phase: AttemptPhase, counts: Mapping[AssignmentState, int]) -> int:
    """Return how many clients have reported; silos of a decentralised job have announced their model."""
    states = [AssignmentState.REPORTED, AssignmentState.MERGED]
    if phase in _ANNOUNCED_PHASES:
        states.append(AssignmentState.ADVERTISED)
    return sum(counts[state] for state in states)


def version(record: records.VersionRecord, spec: JobSpec) -> admin_pb2.ModelVersion:
    """Encode a model version; for a private job without the total weight, which depends on the clients' examples."""
    return admin_pb2.ModelVersion(
        model=model_ref(record.version),
        round=record.version.round,
        created_unix_s=record.created_unix_s,
        num_updates=record.version.num_updates,
        total_weight=record.version.total_weight if privacy_rules.disclosure_of(spec).shows_clients else 0.0,
        delta_size_bytes=record.version.delta_size_bytes,
        metrics=dict(record.metrics),
        restored_from=record.version.restored_from,
        model_removed_unix_s=record.model_removed_unix_s or 0.0,
        state_removed_unix_s=record.state_removed_unix_s or 0.0,
        held_by_clients=record.version.is_held_by_clients,
        has_state=bool(record.version.state_digest) and record.state_removed_unix_s is None,
    )


def without_state(version: rounds.ModelVersion) -> rounds.ModelVersion:
    """Return a version without the rule's state, whose file was removed."""
    return structs.replace(version, state_digest="")


def event(record: records.HistoryRecord) -> admin_pb2.JobEvent:
    """Encode a row of the history."""
    row = record.row
    return encode(
        admin_pb2.JobEvent,
        row,
        sequence=record.sequence,
        unix_s=record.unix_s,
        reason=texts.shorten(row.reason),
        kind=KINDS[AttemptKind(row.kind)] if row.kind else admin_pb2.ATTEMPT_KIND_UNSPECIFIED,
    )
