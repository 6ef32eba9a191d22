"""Invariants of the stored state of a job, as pure checks. Read `CHECKS`: it has one row for each.

I1 to I7 and I9 are numbered as in the design. `fedplat-server verify` runs the checks on a database; tests run them
after every step of a coordinator. The server checks files, the ledger and the audit log. I8 (memory) is not visible in
stored state. I10 (an offline recomputation gives the same bits) requires the updates, which are removed after a commit:
crash tests check it, except for private jobs, whose noise is not stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedplat.rounds.invariants import attempts, jobs
from fedplat.rounds.invariants.records import ParticipationRounds, StoredAttempt, StoredJob, StrayHistory, Violation


@dataclasses.dataclass(frozen=True)
class Check:
    """A check: the invariant, the kind of unit that it examines, and the function that finds violations.

    `is_live`: the invariant holds only while a server is running.
    """

    invariant: str
    unit: type[Any]
    find: Callable[[Any], Iterator[Violation]]
    is_live: bool = False

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.find.__name__


CHECKS: Sequence[Check] = (
    Check("I1", StoredAttempt, attempts.merged_once),
    Check("I2", StoredJob, jobs.versions_are_dense),
    Check("I2", StoredJob, jobs.versions_have_one_attempt),
    Check("I2", StoredJob, jobs.warm_starts_come_first),
    Check("I2", StoredJob, jobs.optimizer_state_is_kept),
    Check("I2", StoredJob, jobs.deltas_are_kept),
    Check("I2", StoredJob, jobs.counters_agree),
    Check("I2", StoredJob, jobs.rollbacks_repeat_a_version),
    Check("I2", StoredJob, jobs.what_is_needed_is_kept),
    Check("I2", StoredJob, jobs.attempts_are_numbered),
    Check("I3", StoredAttempt, attempts.acknowledged_has_an_end),
    Check("I3", StoredAttempt, attempts.ended_for_a_reason),
    Check("I3", StoredAttempt, attempts.reports_are_complete),
    Check("I4", StoredAttempt, attempts.above_the_minimum),
    Check("I6", StoredAttempt, attempts.weights_add_up),
    Check("I6", StoredAttempt, attempts.weights_are_right),
    Check("I7", StoredAttempt, attempts.nothing_open_in_the_ended),
    Check("I7", StoredAttempt, attempts.overdue, is_live=True),
    Check("I7", StoredAttempt, attempts.end_is_noted),
    Check("I7", StoredJob, jobs.one_open_attempt),
    Check("I7", StoredJob, jobs.open_attempts_belong_to_jobs_at_work),
    Check("I9", StoredJob, jobs.job_file_is_readable),
    Check("secure", StoredAttempt, attempts.positions_are_unique),
    Check("secure", StoredAttempt, attempts.unmasked_above_the_minimum),
    Check("secure", StoredAttempt, attempts.messages_are_removed),
    Check("I9", StoredJob, jobs.state_is_of_its_kind),
    Check("clocks", StoredJob, jobs.clocks_are_close),
    Check("gossip", StoredJob, jobs.gossip_agrees),
    Check("limits", ParticipationRounds, jobs.takes_part_seldom_enough),
    Check("history", StoredJob, jobs.job_history),
    Check("history", StoredJob, jobs.version_histories),
    Check("history", StoredAttempt, jobs.attempt_history),
    Check("history", StoredAttempt, jobs.assignment_histories),
    Check("history", StrayHistory, jobs.stray_histories),
)
"""All checks of the stored state of a job."""


def run(checks: Sequence[Check], unit: object, *, live: bool) -> Iterator[tuple[Check, Violation]]:
    """Yield the violations of the checks in a unit, each with its check. `live`: a server is running."""
    for check in checks:
        if isinstance(unit, check.unit) and (live or not check.is_live):
            for violation in check.find(unit):
                yield check, violation
