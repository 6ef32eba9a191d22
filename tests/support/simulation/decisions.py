"""What the coordinator decides in a simulation, as lines of JSON, and their digest.

The lines name values and not records: a value that moves to another record, or gets another type, is still written
here as before. What a kind of job keeps for itself is in `_describe_kind`. Only a new decision adds lines or values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
from typing_extensions import override

from fedplat.rounds import Assignment, Attempt, AttemptKey, Change, JobState, ModelVersion, Proposal, Verdict
from fedplat.rounds.changes import HistoryRow
from fedplat.rounds.commands import (
    Abandon,
    Abort,
    Assign,
    Command,
    Commit,
    Fold,
    NextStep,
    Refuse,
    Restart,
    RunWarmStart,
)
from fedplat.rounds.events import Event
from fedplat.rounds.protocols.flower_app import cohort_of
from fedplat.rounds.protocols.gossip import find_state
from fedplat.rounds.protocols.ssp import clocks_of

Line = list[Any]
_encode = msgspec.json.Encoder(order="deterministic").encode


class Decisions:
    """The lines of a run, one for each decision in order. `record` is the trace of a simulation (`Hooks.trace`)."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def record(self, events: Sequence[Event], now: float, proposal: Proposal) -> None:
        """Write what a batch of events led to."""
        assert len(events) == len(proposal.verdicts)
        lines: list[Line] = [["at", float(now)]]
        lines += map(_describe_verdict, proposal.verdicts)
        lines += map(_describe_command, proposal.commands)
        lines += [["timer", job, _number(moment)] for job, moment in sorted(proposal.timers.items())]
        for change in proposal.changes:
            lines += _describe_change(change)
        for line in lines:
            self.write(*line)

    def write(self, sort: str, *values: object) -> None:
        """Write one line."""
        self.lines.append(_encode([sort, *values]))

    @property
    def digest(self) -> str:
        """The first half of the SHA-256 of all lines."""
        return hashlib.sha256(b"\n".join(self.lines)).hexdigest()[:32]


class RoundedDecisions(Decisions):
    """Decisions about models: metrics are sums over their entries, whose last bits depend on the processor."""

    @override
    def write(self, sort: str, *values: object) -> None:
        super().write(sort, *map(_round, values))


def _round(value: object) -> object:
    if isinstance(value, dict):
        return {name: f"{number:.2e}" for name, number in cast(dict[str, float], value).items()}
    return value


def _describe_verdict(verdict: Verdict) -> Line:
    return ["verdict", _text(verdict.reason), verdict.text]


def _describe_command(command: Command) -> Line:
    match command:
        case Assign():
            times = _number(command.training_timeout_s), _number(command.upload_timeout_s)
            base = command.base_version
            return ["assign", *command.key, command.client_id, str(command.kind), base, command.token, *times]
        case Refuse():
            window = _number(command.retry.min_s), _number(command.retry.max_s)
            return ["refuse", command.client_id, str(command.reason), *window]
        case Abort():
            return ["abort", *command.key, command.client_id, str(command.reason)]
        case Fold():
            given = command.contribution
            claims = _number(given.weight), _number(given.num_examples), _numbers(given.metrics), given.staleness
            base = command.base_version
            return ["fold", *command.key, *_flatten(command.assignment.attempt), given.client_id, base, *claims]
        case NextStep():
            return ["next step", *command.key, str(command.phase)]
        case Commit():
            return ["commit", *command.key, command.base_version, command.num_updates]
        case RunWarmStart():
            return ["begin alone", *command.key, command.base_version]
        case Restart():
            return ["fold again", *command.key]
        case Abandon():
            return ["abandon", *command.key]


def _describe_change(change: Change) -> Iterator[Line]:
    job = change.job
    counters = job.revision, job.round, job.failures
    yield ["job", change.expected_revision, *counters, str(job.status), job.reason, list(map(_number, job.durations))]
    yield ["claims", [[each.client_id, _number(each.norm), _number(each.num_examples)] for each in job.claims]]
    yield ["carried over", sorted([each.client_id, *each.key] for each in job.carried_over.assignments.values())]
    yield ["kind", *_describe_kind(job)]
    if change.attempt is not None:
        yield ["attempt", *_describe_attempt(change.attempt)]
    if change.version is not None:
        yield ["version", *_describe_version(change.version)]
    yield from (["assignment", *_describe_assignment(each)] for each in change.assignments)
    yield from (["history", *_describe_row(row)] for row in change.history)
    for each in change.messages:
        content = hashlib.sha256(each.content).hexdigest()
        yield ["message", *_flatten(each.id.attempt), each.id.client_id, each.kind, len(each.content), content]


def _describe_kind(job: JobState) -> Iterator[object]:
    """Yield what jobs of some kinds keep from attempt to attempt: write here where it is now."""
    clocks = clocks_of(job)
    yield [sorted(cohort_of(job)), sorted(job.barred), list(job.unmasked)]
    yield [clocks.minimum, clocks.clocks, clocks.ahead, _numbers(clocks.expected)]
    yield [[name, lapse.times, lapse.at] for name, lapse in clocks.lapses.items()]
    if (state := find_state(job)) is not None:
        yield [state.phase.value, state.round, state.attempt, state.timer, state.failures, state.reason]
        yield [sorted(state.announced), sorted(state.away), sorted(state.members), sorted(state.edges)]


def _describe_attempt(attempt: Attempt) -> Iterator[object]:
    yield from (*attempt.key, str(attempt.kind), str(attempt.phase), attempt.base_version, attempt.reason)
    yield from (attempt.goal, attempt.minimum, attempt.target, _numbers(attempt.metrics))
    moments = attempt.opened_at, attempt.selection_ends_at, attempt.closes_at, attempt.step_ends_at, attempt.ended_at
    yield from map(_number, moments)
    yield from (attempt.num_checked_in, attempt.num_eligible, attempt.num_awaited, attempt.num_survivors)


def _describe_version(version: ModelVersion) -> Iterator[object]:
    yield from (version.version, version.round, version.attempt, version.num_updates, _number(version.total_weight))
    yield from (version.restored_from, version.is_held_by_clients)


def _describe_assignment(assignment: Assignment) -> Iterator[object]:
    yield from (*assignment.key, assignment.client_id, str(assignment.kind), str(assignment.state))
    yield from (_text(assignment.reason), assignment.text, assignment.base_version, assignment.staleness)
    yield from (assignment.report_number, assignment.update_bytes, _flatten(assignment.folded_into))
    moments = assignment.assigned_at, assignment.deadline_at, assignment.took_s
    yield from map(_number, (*moments, assignment.num_examples, assignment.weight, assignment.norm))
    yield _numbers(assignment.metrics)
    place = assignment.secure
    yield None if place is None else [place.group, place.position]


def _describe_row(row: HistoryRow) -> Iterator[object]:
    yield from (row.entity, row.kind, row.from_state, row.to_state, row.round, row.attempt, row.client_id, row.reason)
    yield from (_numbers(row.metrics), row.update_bytes, _number(row.norm))


def _flatten(key: AttemptKey | None) -> Line:
    return [] if key is None else [*key]


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _number(value: float | None) -> float | None:
    """Return a number with all its bits, without the type of an array's entry."""
    return None if value is None else float(value)


def _numbers(values: Any) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}
