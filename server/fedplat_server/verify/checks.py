"""All checks of the rows of a database, what they read besides jobs, and their report."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedplat.job import find_mechanism, plan_charge, privacy, secure
from fedplat.rounds import invariants
from fedplat.rounds.invariants import Check, attempts, jobs
from fedplat.rounds.invariants.records import JobUnit, Location, StoredJob, Violation
from fedplat_server.database.records import encode_mechanism
from fedplat_server.records import audit
from fedplat_server.records.audit import AuditHead, AuditRow


@dataclasses.dataclass(frozen=True)
class AuditPart:
    """Some rows of the audit log, and its head before them."""

    before: AuditHead
    rows: tuple[AuditRow, ...]


@dataclasses.dataclass(frozen=True)
class AuditEnd:
    """The head of the audit log according to its rows, and the stored head; None if that is missing."""

    end: AuditHead
    head: AuditHead | None


Unit = JobUnit | AuditPart | AuditEnd
"""A part of the database that is read and checked at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A violated invariant: its place, what was found and expected, and advice for the operator.

    `check` is the name of the function that found it.
    """

    invariant: str
    check: str
    place: Location
    found: str
    expected: str
    advice: str

    def __str__(self) -> str:
        where = f"{self.place}: " if str(self.place) else ""
        return f"{self.invariant}: {where}{self.found}; expected {self.expected}. {self.advice}"


@dataclasses.dataclass
class Report:
    """The result of `verify`. `notes` are not violations; `checked` has the numbers of checked items by name."""

    findings: list[Finding] = dataclasses.field(default_factory=list[Finding])
    notes: list[str] = dataclasses.field(default_factory=list[str])
    checked: Counter[str] = dataclasses.field(default_factory=Counter[str])


def releases_are_charged(job: StoredJob) -> Iterator[Violation]:
    """Check I5: each version of a private job's round has its row in the ledger, and no other version has one."""
    if job.spec is None:
        return
    is_private = find_mechanism(job.spec) is not None
    made = {version.version: version for version in job.versions if version.is_aggregate and is_private}
    survivors = {(row.round, row.number): row.num_survivors for row in job.attempts}
    charged = {row.version: row for row in job.ledger}
    for number in made.keys() - charged.keys():
        place = Location(job.row.job_id, version=number)
        yield Violation(place, "it is not in the ledger", "a row for each private release")
    for number, row in charged.items():
        place, version = Location(job.row.job_id, version=number), made.get(number)
        if version is None:
            yield Violation(place, "it is in the ledger", "rows for the releases of private jobs only")
            continue
        mechanism = privacy.find_mechanism_of(job.spec, survivors.get((version.round, version.attempt), 0))
        if row.round != version.round:
            found = f"the ledger has it in round {row.round}"
            yield Violation(place, found, f"round {version.round}, that of the version")
        elif mechanism is not None and row.mechanism != encode_mechanism(mechanism):
            expected = f"the job's mechanism, {encode_mechanism(mechanism)}"
            yield Violation(place, f"the ledger has {row.mechanism[:300]}", expected)


def releases_are_within_the_plan(job: StoredJob) -> Iterator[Violation]:
    """Check I5: a private job has no more releases than were planned when it was created."""
    planned = plan_charge(job.spec) if job.spec is not None else None
    if job.spec is None or planned is None:
        return
    place, expected = Location(job.row.job_id), f"at most {planned.releases}, as its budget allows"
    if len(job.ledger) > planned.releases:
        yield Violation(place, f"the ledger has {len(job.ledger)} releases", expected)
    if planned.mechanism.kind == "skellam":
        unmasked = [row.num_survivors for row in job.attempts if row.num_survivors]
        if (spent := secure.spent_releases(job.spec, unmasked)) > planned.releases * (1.0 + 1e-9):
            found = f"its {len(unmasked)} unmasked attempts cost as much as {spent:g} releases of the fewest survivors"
            yield Violation(place, found, expected)


def audit_chain(part: AuditPart) -> Iterator[Violation]:
    """Check that each row of the audit log is unchanged and follows the row before it."""
    for problem in audit.check_rows(part.rows, part.before):
        yield Violation(Location(), problem, "the chain of hashes that the daemon wrote")


def audit_end(log: AuditEnd) -> Iterator[Violation]:
    """Check that the audit log ends with the row of its head."""
    if log.head is None:
        yield Violation(Location(), "the audit log has no head", "one row in audit_head")
        return
    for problem in audit.check_end(log.end, log.head):
        yield Violation(Location(), problem, "a log that ends with the row of its head")


CHECKS: Sequence[Check] = (
    *invariants.CHECKS,
    Check("I5", StoredJob, releases_are_charged),
    Check("I5", StoredJob, releases_are_within_the_plan),
    Check("audit", AuditPart, audit_chain),
    Check("audit", AuditEnd, audit_end),
)
"""All checks of the rows."""

RESTORE = "Stop the daemon, restore the database from a backup, and report this."
RESTART = "Restart the daemon, which ends what was left open. If the finding remains, report this."
KEEP = "Keep a copy of the database, find out who may write to it, and compare the heads that the daemon has logged."
UPGRADE = "Run the version of fedplat that wrote it, or cancel the job (fedplat job cancel) if it cannot go on here."
ACCOUNT = (
    "Report this. If the job is private, its epsilon is larger than stated: compute it again, or do not publish models."
)
ADVICE: Mapping[Callable[[Any], Iterator[Violation]], str] = {
    attempts.nothing_open_in_the_ended: RESTART,
    attempts.overdue: RESTART,
    jobs.one_open_attempt: RESTART,
    jobs.open_attempts_belong_to_jobs_at_work: RESTART,
    jobs.job_file_is_readable: UPGRADE,
    jobs.takes_part_seldom_enough: ACCOUNT,
    audit_chain: KEEP,
    audit_end: KEEP,
}
"""Advice for the operator, by check; `RESTORE` for all others."""


def findings(unit: Unit, *, live: bool) -> Iterator[Finding]:
    """Yield the findings in a part of the database; `live`: a daemon is running on it."""
    for check, violation in invariants.run(CHECKS, unit, live=live):
        advice = ADVICE.get(check.find, RESTORE)
        yield Finding(check.invariant, check.name, violation.place, violation.found, violation.expected, advice)
