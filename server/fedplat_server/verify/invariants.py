"""What must hold of a database at rest. Read `CHECKS` first: one row for each invariant, one function for each row.

The numbers I1 to I10 are those of the design. I8 (memory) cannot be seen in a database, I10 (an offline recomputation
gives the same bits) needs the updates, which are gone after a commit: the crash tests check it, but of private jobs,
whose noise nobody has any more.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedplat.job import JobSpec, build_rule
from fedplat.rounds import influence
from fedplat.rounds.states import (
    BUSY_STATES,
    ENDED_JOBS,
    MAKE_VERSIONS,
    OPEN_PHASES,
    OPEN_STATES,
    AssignmentState,
    AttemptKind,
    AttemptPhase,
    JobStatus,
)
from fedplat_server import audit
from fedplat_server.verify import histories, ledger, limits
from fedplat_server.verify.records import (
    AssignmentRow,
    Attempt,
    AttemptRow,
    AuditEnd,
    AuditPart,
    Finding,
    Job,
    Place,
    Strays,
    Turns,
    Unit,
    VersionRow,
    Wrong,
)

RESTORE = "Stop the daemon, restore the database from a backup, and report this."
RESTART = "Restart the daemon: its start ends what was left open. If it stays, report this."
KEEP = "Keep a copy of the database, find out who may write to it, and compare the heads that the daemon has logged."
GRACE_S = 60.0
"""How long after its deadline an assignment may be open beside a running daemon: a busy one, and clocks that differ."""


def attempt_place(row: AttemptRow, client_id: str | None = None) -> Place:
    """Names an attempt, or an assignment."""
    return Place(row.job_id, row.round, row.number, client_id)


def version_place(job: Job, version: VersionRow) -> Place:
    """Names a version."""
    return Place(job.row.job_id, version=version.version)


def is_open(row: AttemptRow) -> bool:
    """Whether an attempt has not ended."""
    return row.phase in OPEN_PHASES


# --- attempts ----------------------------------------------------------------------------------------------


def merged_once(attempt: Attempt) -> Iterator[Wrong]:
    """I1: an update is merged at most once, into one committed version."""
    merged = [one.client_id for one in attempt.assignments if one.state == AssignmentState.MERGED]
    if attempt.row.phase != AttemptPhase.COMMITTED:
        for client_id in merged:
            expected = "merged updates in COMMITTED attempts only"
            yield Wrong(
                attempt_place(attempt.row, client_id), f"it is MERGED in a {attempt.row.phase} attempt", expected
            )
    elif attempt.version is not None and len(merged) != attempt.version.num_updates:
        found = f"{len(merged)} assignments are MERGED"
        yield Wrong(attempt_place(attempt.row), found, f"{attempt.version.num_updates}, as its version says")


def acknowledged_has_an_end(attempt: Attempt) -> Iterator[Wrong]:
    """I3: an acknowledged report is merged or has a terminal reason; or it waits for the next attempt."""
    if is_open(attempt.row):
        return
    for one in attempt.assignments:
        if one.state == AssignmentState.REPORTED and not (attempt.carries and one.staleness is None):
            found = f"it is REPORTED in a {attempt.row.phase} attempt"
            yield Wrong(attempt_place(attempt.row, one.client_id), found, "MERGED, or DROPPED with a reason")


def ended_for_a_reason(attempt: Attempt) -> Iterator[Wrong]:
    """I3: whatever ended without being merged says why; whatever did not end so says nothing."""
    without = {*BUSY_STATES, AssignmentState.REPORTED, AssignmentState.MERGED}
    for one in attempt.made:
        place = attempt_place(attempt.row, one.client_id)
        if one.state not in without and not one.reason:
            yield Wrong(place, f"it is {one.state} without a reason", "a reason for every end but MERGED")
        elif one.state in without and one.reason:
            yield Wrong(place, f"it is {one.state} with the reason {one.reason}", "a reason only for other ends")


def reports_are_complete(attempt: Attempt) -> Iterator[Wrong]:
    """I3: a report says what it is a report of, and when it came."""
    for one in attempt.made:
        place = attempt_place(attempt.row, one.client_id)
        reported = one.state in (AssignmentState.REPORTED, AssignmentState.MERGED)
        if reported and (one.took_s is None or one.reported_revision is None):
            yield Wrong(place, f"it is {one.state} without the moment of its report", "took_s and reported_revision")
        if reported and attempt.row.kind == AttemptKind.TRAIN and not one.digest:
            yield Wrong(place, f"it is {one.state} without a digest", "the digest of the update")
        if one.reported_revision is not None and one.reported_revision > attempt.job.revision:
            found = f"it was reported in revision {one.reported_revision}"
            yield Wrong(place, found, f"at most the job's revision, {attempt.job.revision}")


def above_the_minimum(attempt: Attempt) -> Iterator[Wrong]:
    """I4: nothing is published below the minimum."""
    merged = sum(one.state == AssignmentState.MERGED for one in attempt.assignments)
    # A minimum of reports would tell of who took part: a private attempt has none.
    minimum = 0 if attempt.releases or not attempt.has_cohort else max(attempt.row.minimum, 1)
    if attempt.row.phase == AttemptPhase.COMMITTED and merged < minimum:
        found = f"it was committed with {merged} merged updates"
        yield Wrong(attempt_place(attempt.row), found, f"at least the minimum, {minimum}")


def weights_add_up(attempt: Attempt) -> Iterator[Wrong]:
    """I6: the weights of the merged updates add up to the version's total weight.

    The server adds them in the order of acceptance, in double precision: each of n additions rounds by at most half
    a unit in the last place of the running sum, so n units of the exact sum bound the difference.
    """
    if attempt.version is None:
        return
    weights = [one.weight for one in attempt.assignments if one.state == AssignmentState.MERGED]
    total = math.fsum(weights)
    tolerance = len(weights) * sys.float_info.epsilon * abs(total)
    if not abs(total - attempt.version.total_weight) <= tolerance:
        found = f"the weights of the merged updates add up to {total!r}"
        yield Wrong(attempt_place(attempt.row), found, f"{attempt.version.total_weight!r}, as its version says")


def weights_are_right(attempt: Attempt) -> Iterator[Wrong]:
    """I6: an update that was taken in counts for what the job says, by its examples, its staleness and its cohort."""
    if attempt.spec is None:
        return
    mode, (least, most) = attempt.spec.buffered, _bounds(attempt, attempt.spec)
    for one in attempt.assignments:
        if one.staleness is None or one.state not in (AssignmentState.REPORTED, AssignmentState.MERGED):
            continue
        place = attempt_place(attempt.row, one.client_id)
        behind = attempt.row.base_version - one.base_version
        if one.staleness != behind or (mode is not None and mode.is_too_stale(behind)):
            bound = "" if mode is None or mode.max_staleness is None else f", and at most {mode.max_staleness}"
            yield Wrong(place, f"its staleness is {one.staleness}", f"{behind}, by its base version{bound}")
        weights = [attempt.spec.weight(one.num_examples, behind, bound) for bound in (least, most)]
        low, high = (weights[0] * (1 - 1e-12), weights[1] * (1 + 1e-12)) if behind >= 0 else (math.nan, math.nan)
        if not low <= one.weight <= high:
            expected = f"{weights[1]!r}" if least == most else f"at most {weights[1]!r}"
            yield Wrong(place, f"its weight is {one.weight!r}", f"{expected}, by its examples and its staleness")


def _bounds(attempt: Attempt, spec: JobSpec) -> tuple[float, float]:
    """For how many examples an update of the attempt may count at most: the least and the largest bound there may be.

    The cohort's median decides once the attempt closes, if it decides alone; else the job's latest reports do, too.
    """
    if not spec.max_weight_factor:
        return math.inf, math.inf
    counted = (AssignmentState.REPORTED, AssignmentState.MERGED)
    claims = [one.num_examples for one in attempt.assignments if one.state in counted and one.staleness is not None]
    bound = influence.most_examples(spec, claims)
    is_training = attempt.row.kind == AttemptKind.TRAIN
    if attempt.row.phase == AttemptPhase.COLLECTING:
        return (0.0 if is_training and influence.looks_back(spec) else math.inf), math.inf
    if not is_training or all(one.norm is None for one in attempt.assignments):
        return bound, math.inf  # it may be older than the bound
    return (bound, bound) if influence.is_judged_alone(spec, len(claims)) else (0.0, math.inf)


def still_open(attempt: Attempt) -> list[AssignmentRow]:
    """The assignments that outlive an attempt, if its job is one in which they may."""
    return [one for one in attempt.made if attempt.carries and one.state in OPEN_STATES]


def nothing_open_in_the_ended(attempt: Attempt) -> Iterator[Wrong]:
    """I7: no client works for an attempt that has ended, or that commits already; but it may work for the next one."""
    if attempt.row.phase in (AttemptPhase.SELECTING, AttemptPhase.COLLECTING) or attempt.carries:
        return
    for one in attempt.made:
        if one.state in BUSY_STATES:
            found = f"it is {one.state} in a {attempt.row.phase} attempt"
            yield Wrong(attempt_place(attempt.row, one.client_id), found, "no open assignment there")


def overdue(attempt: Attempt) -> Iterator[Wrong]:
    """I7: a daemon that runs ends an assignment when its deadline is over."""
    for one in attempt.made if is_open(attempt.row) else still_open(attempt):
        late_s = attempt.seen_unix_s - one.deadline_unix_s
        if one.state in BUSY_STATES and late_s > GRACE_S:
            found = f"it is {one.state} {late_s:.0f} s after its deadline"
            yield Wrong(attempt_place(attempt.row, one.client_id), found, f"its end within {GRACE_S:g} s")


def end_is_noted(attempt: Attempt) -> Iterator[Wrong]:
    """I7: an attempt has an end exactly if it has ended."""
    if is_open(attempt.row) and attempt.row.ended_unix_s is not None:
        yield Wrong(attempt_place(attempt.row), f"it is {attempt.row.phase} and has an end", "no end")
    if not is_open(attempt.row) and attempt.row.ended_unix_s is None:
        yield Wrong(attempt_place(attempt.row), f"it is {attempt.row.phase} and has no end", "the time of its end")


# --- jobs --------------------------------------------------------------------------------------------------


def versions_are_dense(job: Job) -> Iterator[Wrong]:
    """I2: versions are 0, 1, 2, ..."""
    numbers = [version.version for version in job.versions]
    if numbers != list(range(len(numbers))) or not numbers:
        missing = sorted(set(range(max(numbers, default=0) + 1)) - set(numbers))
        found = f"version {', '.join(map(str, missing))} is missing"
        yield Wrong(Place(job.row.job_id), found, "dense versions from 0 on")


def versions_have_one_attempt(job: Job) -> Iterator[Wrong]:
    """I2: every version but the first, and a rollback's, has one committed attempt, which began with the one before."""
    made = {(version.round, version.attempt): version for version in job.versions if version.is_made}
    committed: Counter[int] = Counter()
    for row in job.attempts:
        if row.kind not in MAKE_VERSIONS or row.phase != AttemptPhase.COMMITTED:
            continue
        version = made.get((row.round, row.number))
        if version is None:
            yield Wrong(attempt_place(row), "it is COMMITTED and has no version", "one version of its own")
            continue
        committed[version.version] += 1
        if row.base_version != version.version - 1:
            found = f"version {version.version} was made from version {row.base_version}"
            yield Wrong(attempt_place(row), found, f"version {version.version - 1} as its base")
    for version in made.values():
        if committed[version.version] != 1:
            found = f"{committed[version.version]} COMMITTED attempts of round {version.round} made it"
            yield Wrong(version_place(job, version), found, f"one, attempt {version.attempt}")


def warm_starts_come_first(job: Job) -> Iterator[Wrong]:
    """I2: round 0 is that of the initial model and of warm starts, which lead to version 1 of jobs that have them."""
    if job.spec is None:
        return
    begins_warm = job.spec.warm_start is not None
    for row in job.attempts:
        is_one = row.kind == AttemptKind.WARM_START
        if is_one != (row.round == 0) or (is_one and not begins_warm):
            expected = "a WARM_START in round 0 only, of a job that has one"
            yield Wrong(attempt_place(row), f"it is a {row.kind} in round {row.round}", expected)
    for version in job.versions:
        if version.is_made and version.is_aggregate == (begins_warm and version.version == 1):
            found = f"it is of round {version.round}"
            yield Wrong(version_place(job, version), found, "version 1 in round 0, after a warm start and only then")


def optimizer_state_is_kept(job: Job) -> Iterator[Wrong]:
    """I2: a rule that remembers something has its state beside each version that it made; no other version has one."""
    if job.spec is None:
        return
    rule = build_rule(job.spec)
    remembers = job.spec.compression.downlink is not None or bool(rule.init(1)) or bool(rule.start(1).scalars)
    for version in job.versions:
        wanted = remembers and version.is_aggregate
        if version.restored_from is not None and remembers:
            continue  # the state of the older version, or none: the rule begins anew
        if bool(version.state_digest) != wanted:
            found = f"the optimizer's state is {'there' if version.state_digest else 'not there'}"
            yield Wrong(version_place(job, version), found, "one" if wanted else "none for this rule")


def deltas_are_kept(job: Job) -> Iterator[Wrong]:
    """I2: a job with a downlink has a delta to each version that a round made; no other version has one."""
    if job.spec is None:
        return
    digests = {version.version: version.digest for version in job.versions}
    for version in job.versions:
        wanted = job.spec.compression.downlink is not None and version.is_aggregate
        if bool(version.delta_digest) != wanted:
            found = f"the delta is {'there' if version.delta_digest else 'not there'}"
            yield Wrong(version_place(job, version), found, "one" if wanted else "none for this version")
        base = digests.get(version.version - 1)
        if version.delta_digest and base is not None and version.delta_base != base:
            found = f"the delta's base is {version.delta_base[:100]!r}"
            yield Wrong(version_place(job, version), found, f"{base}, the version before")


def counters_agree(job: Job) -> Iterator[Wrong]:
    """I2: the job's own numbers are those of its last version."""
    if not job.versions:
        return
    last = job.versions[-1]
    if job.row.latest_version != last.version:
        found = f"the job's latest version is {job.row.latest_version}"
        yield Wrong(Place(job.row.job_id), found, f"{last.version}, the last that is there")
    committed = max(version.round for version in job.versions)
    if job.row.round != committed:
        found = f"the job's round is {job.row.round}"
        yield Wrong(Place(job.row.job_id), found, f"{committed}, the last that made a version")


def rollbacks_repeat_a_version(job: Job) -> Iterator[Wrong]:
    """I2: a version that a rollback made has the bytes of an earlier one, and is no round's."""
    known = {version.version: version for version in job.versions}
    for version in job.versions:
        if version.restored_from is None:
            continue
        source = known.get(version.restored_from)
        if source is None or source.version >= version.version or source.digest != version.digest or version.round:
            found = f"it is of round {version.round} and has the bytes {version.digest[:16]}"
            yield Wrong(version_place(job, version), found, f"those of version {version.restored_from}, in round 0")


def what_is_needed_is_kept(job: Job) -> Iterator[Wrong]:
    """I2: the models of version 0 and of the latest are kept, and the latest state of a job that goes on."""
    if not job.versions:
        return
    last = job.versions[-1]
    for version in {job.versions[0], last}:
        if version.model_removed_unix_s is not None:
            yield Wrong(version_place(job, version), "its model was removed", "the first and the last to be kept")
    if last.state_digest and last.state_removed_unix_s is not None and job.row.status not in ENDED_JOBS:
        yield Wrong(version_place(job, last), "its optimizer's state was removed", "it to be kept until the job ends")


def attempts_are_numbered(job: Job) -> Iterator[Wrong]:
    """I2: the attempts of a round are 1, 2, 3, ..., and no round is left out."""
    rounds: dict[int, list[int]] = {}
    for row in job.attempts:
        rounds.setdefault(row.round, []).append(row.number)
    for number, attempts in rounds.items():
        if sorted(attempts) != list(range(1, len(attempts) + 1)):
            found = f"its attempts are {', '.join(map(str, sorted(attempts)))}"
            yield Wrong(Place(job.row.job_id, number), found, "attempts 1, 2, 3, ...")
    if missing := sorted(set(range(1, max(rounds, default=0) + 1)) - set(rounds)):
        found = f"round {', '.join(map(str, missing))} has no attempt"
        yield Wrong(Place(job.row.job_id), found, "attempts in every round up to the last")


def one_open_attempt(job: Job) -> Iterator[Wrong]:
    """I7: at most one attempt of a job is open, and it is the last."""
    ordered = sorted(job.attempts, key=lambda row: (row.round, row.number))
    for row in ordered[:-1]:
        if is_open(row):
            yield Wrong(attempt_place(row), f"it is {row.phase}", "only a job's last attempt to be open")


def open_attempts_belong_to_jobs_at_work(job: Job) -> Iterator[Wrong]:
    """I7: jobs that do not run have no open attempt; a paused one may finish a commit."""
    for row in job.attempts:
        finishing = job.row.status == JobStatus.PAUSED and row.phase == AttemptPhase.COMMITTING
        if is_open(row) and job.row.status != JobStatus.RUNNING and not finishing:
            yield Wrong(attempt_place(row), f"it is {row.phase} while the job is {job.row.status}", "no open attempt")


def job_file_is_readable(job: Job) -> Iterator[Wrong]:
    """I9: a restart needs no operator, so this version of fedplat can read every job file."""
    if job.spec is None:
        yield Wrong(Place(job.row.job_id), job.unreadable, "a job file that this version of fedplat can read")


# --- the audit log -----------------------------------------------------------------------------------------


def audit_chain(part: AuditPart) -> Iterator[Wrong]:
    """Each row of the audit log is as it was written, and continues the one before."""
    for problem in audit.check_rows(part.rows, part.before):
        yield Wrong(Place(), problem, "the chain of hashes that the daemon wrote")


def audit_end(log: AuditEnd) -> Iterator[Wrong]:
    """The audit log ends where its head says."""
    if log.head is None:
        yield Wrong(Place(), "the audit log has no head", "one row in audit_head")
        return
    for problem in audit.check_end(log.end, log.head):
        yield Wrong(Place(), problem, "a log that ends with the row that its head names")


# --- the table ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Check:
    """One row: which invariant, of what, how it is checked, and what an operator does when it is broken."""

    invariant: str
    unit: type[Any]
    find: Callable[[Any], Iterator[Wrong]]
    advice: str = RESTORE
    live: bool = False
    """Whether it must hold only while a daemon runs."""


CHECKS: Sequence[Check] = (
    Check("I1", Attempt, merged_once),
    Check("I2", Job, versions_are_dense),
    Check("I2", Job, versions_have_one_attempt),
    Check("I2", Job, warm_starts_come_first),
    Check("I2", Job, optimizer_state_is_kept),
    Check("I2", Job, deltas_are_kept),
    Check("I2", Job, counters_agree),
    Check("I2", Job, rollbacks_repeat_a_version),
    Check("I2", Job, what_is_needed_is_kept),
    Check("I2", Job, attempts_are_numbered),
    Check("I3", Attempt, acknowledged_has_an_end),
    Check("I3", Attempt, ended_for_a_reason),
    Check("I3", Attempt, reports_are_complete),
    Check("I4", Attempt, above_the_minimum),
    Check("I5", Job, ledger.releases_are_charged),
    Check("I5", Job, ledger.releases_are_within_the_plan),
    Check("I6", Attempt, weights_add_up),
    Check("I6", Attempt, weights_are_right),
    Check("I7", Attempt, nothing_open_in_the_ended, RESTART),
    Check("I7", Attempt, overdue, RESTART, live=True),
    Check("I7", Attempt, end_is_noted),
    Check("I7", Job, one_open_attempt, RESTART),
    Check("I7", Job, open_attempts_belong_to_jobs_at_work, RESTART),
    Check("I9", Job, job_file_is_readable, "Run the version of fedplat that wrote it, or cancel the job there."),
    Check("limits", Turns, limits.takes_part_seldom_enough, limits.ADVICE),
    Check("history", Job, histories.of_job),
    Check("history", Job, histories.of_versions),
    Check("history", Attempt, histories.of_attempt),
    Check("history", Attempt, histories.of_assignments),
    Check("history", Strays, histories.of_nothing),
    Check("audit", AuditPart, audit_chain, KEEP),
    Check("audit", AuditEnd, audit_end, KEEP),
)
"""Everything that is checked of the rows."""


def findings(unit: Unit, *, live: bool) -> Iterator[Finding]:
    """What is broken in a part of the database; `live`: a daemon has been at work on it."""
    for check in CHECKS:
        if isinstance(unit, check.unit) and (live or not check.live):
            for wrong in check.find(unit):
                yield Finding(
                    check.invariant, check.find.__name__, wrong.place, wrong.found, wrong.expected, check.advice
                )
