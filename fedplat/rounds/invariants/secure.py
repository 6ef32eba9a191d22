"""Invariants of attempts with secure aggregation: positions, survivors and stored messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fedplat.job.secure import group_minimum
from fedplat.rounds.invariants.records import StoredAttempt, Violation, attempt_location
from fedplat.rounds.states import AssignmentState, AttemptPhase

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
