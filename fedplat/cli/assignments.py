"""Lists of assignments: of a job (`fedplat job assignments`) and of a client (`fedplat client assignments`)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated

import typer

from fedplat.admin import AdminClient
from fedplat.cli import formats, lists
from fedplat.cli.tables import ListColumn, ListLayout
from fedplat.wire.v1 import admin_pb2


class AssignmentStateChoice(enum.StrEnum):
    """A state of an assignment, as `AssignmentDetails.state` names it."""

    TRAINING = "TRAINING"
    ADVERTISED = "ADVERTISED"
    SHARED = "SHARED"
    UPLOADING = "UPLOADING"
    REPORTED = "REPORTED"
    MERGED = "MERGED"
    LATE = "LATE"
    FAILED = "FAILED"
    REJECTED = "REJECTED"
    SURPLUS = "SURPLUS"
    DROPPED = "DROPPED"


StateOption = Annotated[
    list[AssignmentStateChoice] | None,
    typer.Option("--state", case_sensitive=False, help="Only assignments in this state; repeatable."),
]
_Details = admin_pb2.AssignmentDetails


def _time(details: _Details) -> str:
    if not details.ended_unix_s or not details.assigned_unix_s:
        return formats.NOTHING
    return formats.duration(details.ended_unix_s - details.assigned_unix_s)


def outcome(details: _Details) -> str:
    """Format why an assignment ended, or how far it is."""
    if details.HasField("progress"):
        return f"{details.progress:.0%} done"
    name = details.reason if details.reason != details.state else ""
    reason = ": ".join(part for part in (name, details.text) if part)
    if details.into_round and (details.into_round, details.into_attempt) != (details.round, details.attempt):
        reason = f"merged in round {details.into_round}" + (f"; {reason}" if reason else "")
    return reason


def _optional(details: _Details, field: str) -> str:
    return f"{getattr(details, field):.4g}" if details.HasField(field) else formats.NOTHING  # pyright: ignore[reportArgumentType]


_COMMON: Sequence[ListColumn[_Details]] = (
    ListColumn("#ROUND", lambda one: str(one.round)),
    ListColumn("#TRY", lambda one: str(one.attempt)),
    ListColumn("KIND", lambda one: formats.attempt_kind(one.kind), is_wide=True),
    ListColumn("STATE", lambda one: one.state),
    ListColumn("ASSIGNED", lambda one: formats.moment(one.assigned_unix_s)),
    ListColumn("DOWNLOADED", lambda one: formats.moment(one.downloaded_unix_s), is_wide=True),
    ListColumn("UPLOADING", lambda one: formats.moment(one.uploading_unix_s), is_wide=True),
    ListColumn("#TIME", _time),
    ListColumn("#BASE", lambda one: str(one.base_version), is_wide=True),
    ListColumn("#RECEIVED", lambda one: formats.size(one.update_bytes) if one.update_bytes else "-", is_wide=True),
    ListColumn("#EXAMPLES", lambda one: _optional(one, "num_examples"), is_wide=True),
    ListColumn("#NORM", lambda one: _optional(one, "norm"), is_wide=True),
    ListColumn("#STALE", lambda one: _optional(one, "staleness"), is_wide=True),
    ListColumn("METRICS", lambda one: formats.metrics(one.metrics, {}), is_wide=True),
    ListColumn("REASON", outcome),
)
OF_JOB = ListLayout[_Details](lambda one: one.client_id, (ListColumn("CLIENT", lambda one: one.client_id), *_COMMON))
OF_CLIENT = ListLayout[_Details](
    lambda one: one.job_id,
    (
        ListColumn("JOB", lambda one: one.job_id, is_wide=True),
        ListColumn("NAME", lambda one: one.job_name),
        *_COMMON,
    ),
)


def names(states: Sequence[AssignmentStateChoice] | None) -> list[str]:
    """Return the names of the states that an option was given with."""
    return [state.value for state in states or ()]


def query(client: AdminClient, request: admin_pb2.ListAssignmentsRequest, empty: str) -> lists.Query[_Details]:
    """Return the query of a list of assignments. The server sends the latest attempt first."""
    return lists.Query(client.page, request, lambda page: page.assignments, empty)
