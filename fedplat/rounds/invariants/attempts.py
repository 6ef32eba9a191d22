"""Invariants I1, I3, I4, I6 and I7 of the design, for an attempt, its assignments and its secure aggregation."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator

from fedplat.job import JobSpec
from fedplat.job.secure import group_minimum
from fedplat.rounds import influence
from fedplat.rounds.invariants.records import AssignmentRow, StoredAttempt, Violation, attempt_location
from fedplat.rounds.states import BUSY_STATES, OPEN_STATES, WORKING_PHASES, AssignmentState, AttemptPhase

GRACE_S = 60.0
"""Tolerance for open assignments after their deadline while a server runs: it may be busy, and clocks may differ."""


def merged_once(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check I1: an update is merged at most once, into one committed version."""
    merged = [one.client_id for one in attempt.assignments if one.state == AssignmentState.MERGED]
    if attempt.row.phase != AttemptPhase.COMMITTED:
        for client_id in merged:
            expected = "merged updates in COMMITTED attempts only"
            yield Violation(
                attempt_location(attempt.row, client_id), f"it is MERGED in a {attempt.row.phase} attempt", expected
            )
    elif attempt.version is not None and len(merged) != attempt.version.num_updates:
        found = f"{len(merged)} assignments are MERGED"
        yield Violation(
            attempt_location(attempt.row), found, f"{attempt.version.num_updates}, the number of its version"
        )


def acknowledged_has_an_end(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check I3: an acknowledged report is merged, has a terminal reason, or waits for the next attempt."""
    if attempt.row.is_open:
        return
    for one in attempt.assignments:
        if one.state == AssignmentState.REPORTED and not (attempt.carries_over and one.staleness is None):
            found = f"it is REPORTED in a {attempt.row.phase} attempt"
            yield Violation(attempt_location(attempt.row, one.client_id), found, "MERGED, or DROPPED with a reason")


def ended_for_a_reason(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check I3: an assignment has a reason exactly if it has ended without being merged."""
    without = {*BUSY_STATES, AssignmentState.REPORTED, AssignmentState.MERGED}
    for one in attempt.made:
        place = attempt_location(attempt.row, one.client_id)
        if one.state not in without and not one.reason:
            yield Violation(place, f"it is {one.state} without a reason", "a reason for every end but MERGED")
        elif one.state in without and one.reason:
            yield Violation(place, f"it is {one.state} with the reason {one.reason}", "a reason only for other ends")


def reports_are_complete(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check I3: a report has a digest and a time."""
    for one in attempt.made:
        place = attempt_location(attempt.row, one.client_id)
        reported = one.state in (AssignmentState.REPORTED, AssignmentState.MERGED)
        if reported and (one.took_s is None or one.reported_revision is None):
            yield Violation(place, f"it is {one.state} without the time of its report", "took_s and reported_revision")
        if reported and attempt.protocol.folds and not one.digest:
            yield Violation(place, f"it is {one.state} without a digest", "the digest of the update")
        if one.reported_revision is not None and one.reported_revision > attempt.job.revision:
            found = f"it was reported in revision {one.reported_revision}"
            yield Violation(place, found, f"at most the job's revision, {attempt.job.revision}")


def above_the_minimum(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check I4: no version is published with fewer reports than the minimum."""
    merged = sum(one.state == AssignmentState.MERGED for one in attempt.assignments)
    minimum = 0 if attempt.protocol.may_be_empty else max(attempt.row.minimum, 1)
    if attempt.row.phase == AttemptPhase.COMMITTED and merged < minimum:
        found = f"it was committed with {merged} merged updates"
        yield Violation(attempt_location(attempt.row), found, f"at least the minimum, {minimum}")


def weights_add_up(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check I6: the weights of the merged updates add up to the version's total weight.

    The server adds them in the order of acceptance, in double precision: each of n additions rounds by at most half
    a unit in the last place of the running sum, so n units of the exact sum bound the difference.
    """
    if attempt.version is None or attempt.protocol.has_masks:  # masked updates have their weights inside
        return
    weights = [one.weight for one in attempt.assignments if one.state == AssignmentState.MERGED]
    total = math.fsum(weights)
    tolerance = len(weights) * sys.float_info.epsilon * abs(total)
    if not abs(total - attempt.version.total_weight) <= tolerance:
        found = f"the weights of the merged updates add up to {total!r}"
        expected = f"{attempt.version.total_weight!r}, the total weight of its version"
        yield Violation(attempt_location(attempt.row), found, expected)


def weights_are_right(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check I6: the weight of an accepted update follows from its examples, its staleness and its cohort."""
    if attempt.spec is None:
        return
    mode, (least, most) = attempt.spec.buffered, _bounds(attempt, attempt.spec)
    for one in attempt.assignments:
        if one.staleness is None or one.state not in (AssignmentState.REPORTED, AssignmentState.MERGED):
            continue
        place = attempt_location(attempt.row, one.client_id)
        behind = attempt.row.base_version - one.base_version
        if one.staleness != behind or (mode is not None and mode.is_too_stale(behind)):
            bound = "" if mode is None or mode.max_staleness is None else f", and at most {mode.max_staleness}"
            yield Violation(place, f"its staleness is {one.staleness}", f"{behind}, by its base version{bound}")
        weights = [attempt.spec.weight(one.num_examples, behind, bound) for bound in (least, most)]
        weights = [1.0, 1.0] if attempt.protocol.has_masks else weights
        low, high = (weights[0] * (1 - 1e-12), weights[1] * (1 + 1e-12)) if behind >= 0 else (math.nan, math.nan)
        if not low <= one.weight <= high:
            expected = f"{weights[1]!r}" if least == most else f"at most {weights[1]!r}"
            yield Violation(place, f"its weight is {one.weight!r}", f"{expected}, by its examples and its staleness")


def _bounds(attempt: StoredAttempt, spec: JobSpec) -> tuple[float, float]:
    """Return the smallest and the largest possible limit for the examples of an update of the attempt.

    The limit follows from the cohort's median once the attempt closes, unless the job's latest reports count as well.
    """
    if not spec.max_weight_factor:
        return math.inf, math.inf
    counted = (AssignmentState.REPORTED, AssignmentState.MERGED)
    claims = [one.num_examples for one in attempt.assignments if one.state in counted and one.staleness is not None]
    bound = influence.limit_examples(spec, claims)
    is_training = attempt.protocol.folds
    if attempt.row.phase == AttemptPhase.COLLECTING:
        return (0.0 if is_training and influence.looks_back(spec) else math.inf), math.inf
    if not is_training or all(one.norm is None for one in attempt.assignments):
        return bound, math.inf  # its attempt may be older than the limit
    return (bound, bound) if influence.judges_each_update(spec, len(claims)) else (0.0, math.inf)


def still_open(attempt: StoredAttempt) -> list[AssignmentRow]:
    """Return the open assignments that may outlive the attempt."""
    return [one for one in attempt.made if attempt.carries_over and one.state in OPEN_STATES]


def nothing_open_in_the_ended(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check I7: no client works for an attempt that commits or has ended, unless its assignment is carried over."""
    if attempt.row.phase in {AttemptPhase.SELECTING, *WORKING_PHASES} or attempt.carries_over:
        return
    for one in attempt.made:
        if one.state in BUSY_STATES:
            found = f"it is {one.state} in a {attempt.row.phase} attempt"
            yield Violation(attempt_location(attempt.row, one.client_id), found, "no open assignment there")


def overdue(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check I7: a running server ends an assignment after its deadline."""
    for one in attempt.made if attempt.row.is_open else still_open(attempt):
        late_s = attempt.seen_unix_s - one.deadline_unix_s
        if one.state in BUSY_STATES and late_s > GRACE_S:
            found = f"it is {one.state} {late_s:.0f} s after its deadline"
            yield Violation(attempt_location(attempt.row, one.client_id), found, f"its end within {GRACE_S:g} s")


def end_is_noted(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check I7: an attempt has an end time exactly if it has ended."""
    if attempt.row.is_open and attempt.row.ended_unix_s is not None:
        yield Violation(attempt_location(attempt.row), f"it is {attempt.row.phase} and has an end", "no end")
    if not attempt.row.is_open and attempt.row.ended_unix_s is None:
        yield Violation(
            attempt_location(attempt.row), f"it is {attempt.row.phase} and has no end", "the time of its end"
        )


_UNMASKED = frozenset({AttemptPhase.UNMASKING, AttemptPhase.COMMITTING, AttemptPhase.COMMITTED})
"""Phases of an attempt whose clients were asked for the shares with which masks are removed."""
_SURVIVED = frozenset({AssignmentState.REPORTED, AssignmentState.MERGED})


def positions_are_unique(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check that each position of a group's roster is that of one client, and that positions are 0, 1, 2, ..."""
    groups: dict[int, list[int]] = {}
    for one in attempt.made:
        if one.secure_group is not None and one.secure_group >= 0:
            groups.setdefault(one.secure_group, []).append(-1 if one.secure_position is None else one.secure_position)
    for group, positions in groups.items():
        if sorted(positions) != list(range(len(positions))):
            found = f"the positions of group {group} are {', '.join(map(str, sorted(positions)))}"
            yield Violation(attempt_location(attempt.row), found, f"0 to {len(positions) - 1}, each once")


def unmasked_above_the_minimum(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check that no sum is unmasked of fewer updates than the minimum of a group."""
    row = attempt.row
    if attempt.spec is None:
        return
    if not attempt.protocol.has_masks:
        if row.num_survivors:
            yield Violation(attempt_location(row), f"it has {row.num_survivors} survivors", "0 without masks")
        return
    fewest = group_minimum(attempt.spec)
    if (row.num_survivors or row.phase in _UNMASKED) and row.num_survivors < fewest:
        found = f"it is {row.phase} with {row.num_survivors} survivors in a group"
        yield Violation(attempt_location(row), found, f"at least the minimum of a group, {fewest}")
    if row.phase not in _UNMASKED:
        return
    members = Counter(one.secure_group for one in attempt.made if (one.secure_group or 0) >= 0)
    survivors = Counter(one.secure_group for one in attempt.made if one.state in _SURVIVED)
    smallest = min((survivors[group] for group in members), default=0)
    if row.num_survivors != smallest:
        found = f"its number of survivors is {row.num_survivors}"
        yield Violation(attempt_location(row), found, f"{smallest}, the reports of its smallest group")


def messages_are_removed(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check that an attempt that has ended keeps no message: keys and shares are of use to an attacker only."""
    if attempt.num_messages and not attempt.row.is_open:
        found = f"it is {attempt.row.phase} and has {attempt.num_messages} messages of secure aggregation"
        yield Violation(attempt_location(attempt.row), found, "none after its end")
