"""The difference of two job states, and its history, as rows for a store."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fedplat.rounds.persistent_map import to_persistent
from fedplat.rounds.privacy_rules import disclosure_of
from fedplat.rounds.protocols.base import protocol_of
from fedplat.rounds.records import Assignment, AssignmentId, Attempt, AttemptKey, JobState, ModelVersion

MESSAGE_KINDS = ("keys", "shares", "confirmation", "answer")
"""The fields of `SecureMessages` that hold a message."""


@dataclasses.dataclass(frozen=True, slots=True)
class HistoryRow:
    """One change of one state.

    `entity` is "job", "attempt", "assignment" or "version"; `kind` is that of an attempt. `update_bytes` and `norm` are
    those of a reported assignment.
    """

    entity: str
    from_state: str
    to_state: str
    round: int = 0
    attempt: int = 0
    client_id: str = ""
    reason: str = ""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    kind: str = ""
    update_bytes: int = 0
    norm: float | None = None


class SentMessage(NamedTuple):
    """A message of secure aggregation that an assignment's client has sent; `kind` is one of `MESSAGE_KINDS`."""

    id: AssignmentId
    kind: str
    content: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """All changes of one step. A store writes them in one transaction, if it still holds `expected_revision`.

    `messages` are those that the assignments have gained: a store keeps each until its attempt ends.
    """

    job: JobState
    expected_revision: int
    attempt: Attempt | None
    assignments: tuple[Assignment, ...]
    version: ModelVersion | None
    history: tuple[HistoryRow, ...]
    messages: tuple[SentMessage, ...] = ()

    @property
    def committed(self) -> AttemptKey | None:
        """The attempt whose version is stored with this change; None if there is no version, or it was restored."""
        if self.version is None or self.attempt is None or self.version.restored_from is not None:
            return None
        return self.attempt.key


def difference(before: JobState, after: JobState) -> Change:
    """Return the change that leads from one state to another; `after.revision` must be one more."""
    assert after.revision == before.revision + 1
    attempt = after.attempt if after.attempt is not before.attempt else None
    changed = tuple(find_changed(before, after))
    version = after.latest if after.latest is not before.latest else None
    return Change(
        job=after,
        expected_revision=before.revision,
        attempt=attempt,
        assignments=changed,
        version=version,
        history=_history(before, after, attempt, changed),
        messages=tuple(_find_messages(before, changed)),
    )


def find_changed(before: JobState, after: JobState) -> Iterator[Assignment]:
    """Yield new and modified assignments; moving from the attempt to those carried over is not a modification."""
    same_attempt = before.attempt is not None and after.attempt is not None and before.attempt.key == after.attempt.key
    for was, group in (
        (before.attempt if same_attempt else None, after.attempt),
        (before.carried_over, after.carried_over),
    ):
        if group is None or (was is not None and group.assignments is was.assignments):
            continue
        for each in to_persistent(group.assignments).changed_since(was.assignments if was is not None else {}):
            earlier = before.find(each.key, each.client_id)
            # An assignment that has ended does not change: only its messages are forgotten with the end of its attempt.
            if earlier is not each and (earlier is None or earlier.is_open):
                yield each


def _find_messages(before: JobState, changed: tuple[Assignment, ...]) -> Iterator[SentMessage]:
    """Yield the messages that changed assignments did not have before, each once however often its client changes."""
    for each in changed:
        if messages := protocol_of(before, each.kind).list_messages(each):
            earlier = before.find(each.key, each.client_id)
            was = protocol_of(before, each.kind).list_messages(earlier) if earlier is not None else {}
            for kind, content in messages.items():
                if content is not was.get(kind) and content != was.get(kind):
                    yield SentMessage(each.id, kind, content)


def _history(
    before: JobState, after: JobState, attempt: Attempt | None, changed: tuple[Assignment, ...]
) -> tuple[HistoryRow, ...]:
    rows: list[HistoryRow] = []
    for assignment in changed:
        earlier = before.find(assignment.key, assignment.client_id)
        if earlier is None or earlier.state is not assignment.state:  # otherwise only its token changed
            metrics = disclosure_of(after.spec).shown_metrics(assignment.metrics)
            rows.append(_assignment_row(earlier, assignment, metrics))
    if attempt is not None:
        same = before.attempt is not None and before.attempt.key == attempt.key
        phase = before.attempt.phase if same and before.attempt is not None else ""
        if phase != attempt.phase:
            rows.append(_attempt_row(phase, attempt))
    if after.latest is not before.latest:
        new = after.latest
        text = f"rolled back to version {new.restored_from}" if new.restored_from is not None else ""
        numbers = str(before.latest.version), str(new.version)
        rows.append(HistoryRow("version", *numbers, new.round, new.attempt, reason=text))
    if after.status is not before.status:
        rows.append(HistoryRow("job", before.status, after.status, after.round, reason=after.reason))
    return tuple(rows)


def _attempt_row(phase: str, attempt: Attempt) -> HistoryRow:
    return HistoryRow(
        entity="attempt",
        from_state=phase,
        to_state=attempt.phase,
        round=attempt.key.round,
        attempt=attempt.key.number,
        reason=attempt.reason,
        metrics=attempt.metrics,
        kind=attempt.kind,
    )


def _assignment_row(earlier: Assignment | None, assignment: Assignment, metrics: Mapping[str, float]) -> HistoryRow:
    return HistoryRow(
        entity="assignment",
        from_state=earlier.state if earlier is not None else "",
        to_state=assignment.state,
        round=assignment.key.round,
        attempt=assignment.key.number,
        client_id=assignment.client_id,
        reason=assignment.text or (assignment.reason or ""),
        metrics=metrics,
        update_bytes=assignment.update_bytes,
        norm=assignment.norm,
    )
