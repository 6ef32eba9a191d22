"""Invariants I2, I7 and I9 of the design, for a job, its versions, the order of its attempts, and its history.

Also the limits on which privacy accounting depends: how often, and how close together, clients take part.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from fedplat.config.plugins import has_absent
from fedplat.gossip.state import GossipState
from fedplat.job import build_rule
from fedplat.rounds.invariants.records import (
    Location,
    ParticipationRounds,
    StepRow,
    StoredAttempt,
    StoredJob,
    StrayHistory,
    Violation,
    attempt_location,
    version_location,
)
from fedplat.rounds.protocols import ssp, warm_start
from fedplat.rounds.protocols.base import find_training
from fedplat.rounds.states import (
    ASSIGNMENT_TRANSITIONS,
    ATTEMPT_TRANSITIONS,
    ENDED_JOBS,
    FIRST_PHASES,
    JOB_TRANSITIONS,
    MAKE_VERSIONS,
    AssignmentState,
    AttemptKind,
    AttemptPhase,
    JobStatus,
)


def versions_are_dense(job: StoredJob) -> Iterator[Violation]:
    """Check I2: versions are 0, 1, 2, ..."""
    numbers = [version.version for version in job.versions]
    if numbers != list(range(len(numbers))) or not numbers:
        missing = sorted(set(range(max(numbers, default=0) + 1)) - set(numbers))
        found = f"version {', '.join(map(str, missing))} is missing"
        yield Violation(Location(job.row.job_id), found, "dense versions from 0 on")


def versions_have_one_attempt(job: StoredJob) -> Iterator[Violation]:
    """Check I2: each version but the first and those of rollbacks has one committed attempt, based on the last."""
    made = {(version.round, version.attempt): version for version in job.versions if version.is_made}
    committed: Counter[int] = Counter()
    for row in job.attempts:
        if row.kind not in MAKE_VERSIONS or row.phase != AttemptPhase.COMMITTED:
            continue
        version = made.get((row.round, row.number))
        if version is None and not job.protocol.makes_versions:
            continue
        if version is None:
            yield Violation(attempt_location(row), "it is COMMITTED and has no version", "one version of its own")
            continue
        committed[version.version] += 1
        if row.base_version != version.version - 1:
            found = f"version {version.version} was made from version {row.base_version}"
            yield Violation(attempt_location(row), found, f"version {version.version - 1} as its base")
    for version in made.values():
        if committed[version.version] != 1:
            found = f"{committed[version.version]} COMMITTED attempts of round {version.round} made it"
            yield Violation(version_location(job, version), found, f"one, attempt {version.attempt}")


def warm_starts_come_first(job: StoredJob) -> Iterator[Violation]:
    """Check I2: round 0 has the initial model and warm starts; a warm start makes version 1."""
    if job.spec is None:
        return
    begins_warm = warm_start.is_wanted(job.spec)
    for row in job.attempts:
        is_one = row.kind == AttemptKind.WARM_START
        if is_one != (row.round == 0) or (is_one and not begins_warm):
            expected = "a WARM_START only in round 0, of a job that has a warm start"
            yield Violation(attempt_location(row), f"it is a {row.kind} in round {row.round}", expected)
    for version in job.versions:
        if version.is_made and version.is_aggregate == (begins_warm and version.version == 1):
            found = f"it is of round {version.round}"
            yield Violation(
                version_location(job, version), found, "version 1 in round 0, after a warm start and only then"
            )


def optimizer_state_is_kept(job: StoredJob) -> Iterator[Violation]:
    """Check I2: each version that a round of a rule with state made has that state; no other version has a state."""
    if job.spec is None or has_absent(job.spec):
        return
    if not find_training(job.spec).has_rule:
        return  # the state of a program is kept with each version that it continues from, but not with its last one
    rule = build_rule(job.spec)
    is_stateful = job.spec.compression.downlink is not None or bool(rule.init(1)) or bool(rule.start(1).scalars)
    for version in job.versions:
        is_expected = is_stateful and version.is_aggregate
        if version.restored_from is not None and is_stateful:
            continue  # it has the state of the older version, or no state if that was not kept
        if bool(version.state_digest) != is_expected:
            found = f"the optimizer's state {'exists' if version.state_digest else 'is missing'}"
            expected = "a state" if is_expected else "no state for this version"
            yield Violation(version_location(job, version), found, expected)


def deltas_are_kept(job: StoredJob) -> Iterator[Violation]:
    """Check I2: in a job with a downlink each version that a round made has a delta; no other version has one."""
    if job.spec is None:
        return
    digests = {version.version: version.digest for version in job.versions}
    for version in job.versions:
        is_expected = job.spec.compression.downlink is not None and version.is_aggregate
        if bool(version.delta_digest) != is_expected:
            found = f"the delta {'exists' if version.delta_digest else 'is missing'}"
            expected = "a delta" if is_expected else "no delta for this version"
            yield Violation(version_location(job, version), found, expected)
        base = digests.get(version.version - 1)
        if version.delta_digest and base is not None and version.delta_base != base:
            found = f"the delta's base is {version.delta_base[:100]!r}"
            yield Violation(version_location(job, version), found, f"{base}, the previous version")


def counters_agree(job: StoredJob) -> Iterator[Violation]:
    """Check I2: the counters of a job match its last version, or the last round of a decentralised job."""
    if not job.versions:
        return
    last = job.versions[-1]
    if job.row.latest_version != last.version:
        found = f"the job's latest version is {job.row.latest_version}"
        yield Violation(Location(job.row.job_id), found, f"{last.version}, the last stored version")
    committed = max(version.round for version in job.versions)
    if not job.protocol.makes_versions:
        ended = [row.round for row in job.attempts if row.phase == AttemptPhase.COMMITTED]
        committed = max([committed, *ended])
    if job.row.round != committed:
        found = f"the job's round is {job.row.round}"
        yield Violation(Location(job.row.job_id), found, f"{committed}, the last committed round")


def rollbacks_repeat_a_version(job: StoredJob) -> Iterator[Violation]:
    """Check I2: the version of a rollback has the bytes of an earlier version, and belongs to round 0."""
    known = {version.version: version for version in job.versions}
    for version in job.versions:
        if version.restored_from is None:
            continue
        source = known.get(version.restored_from)
        if source is None or source.version >= version.version or source.digest != version.digest or version.round:
            found = f"it belongs to round {version.round} and has the bytes {version.digest[:16]}"
            expected = f"the bytes of version {version.restored_from}, in round 0"
            yield Violation(version_location(job, version), found, expected)


def what_is_needed_is_kept(job: StoredJob) -> Iterator[Violation]:
    """Check I2: the models of version 0 and of the latest are kept, and the latest state until the job ends."""
    if not job.versions:
        return
    last = job.versions[-1]
    for version in {job.versions[0], last}:
        if version.model_removed_unix_s is not None:
            expected = "the models of the first and the last version"
            yield Violation(version_location(job, version), "its model was removed", expected)
    if last.state_digest and last.state_removed_unix_s is not None and job.row.status not in ENDED_JOBS:
        expected = "the latest state, until the job ends"
        yield Violation(version_location(job, last), "its optimizer's state was removed", expected)


def attempts_are_numbered(job: StoredJob) -> Iterator[Violation]:
    """Check I2: the attempts of a round are 1, 2, 3, ..., and no round is left out."""
    rounds: dict[int, list[int]] = {}
    for row in job.attempts:
        rounds.setdefault(row.round, []).append(row.number)
    for number, attempts in rounds.items():
        if sorted(attempts) != list(range(1, len(attempts) + 1)):
            found = f"its attempts are {', '.join(map(str, sorted(attempts)))}"
            yield Violation(Location(job.row.job_id, number), found, "attempts 1, 2, 3, ...")
    if missing := sorted(set(range(1, max(rounds, default=0) + 1)) - set(rounds)):
        found = f"round {', '.join(map(str, missing))} has no attempt"
        yield Violation(Location(job.row.job_id), found, "attempts in every round up to the last")


def one_open_attempt(job: StoredJob) -> Iterator[Violation]:
    """Check I7: at most one attempt of a job is open, and it is the last."""
    ordered = sorted(job.attempts, key=lambda row: (row.round, row.number))
    for row in ordered[:-1]:
        if row.is_open:
            yield Violation(attempt_location(row), f"it is {row.phase}", "an open attempt only as the last of its job")


def open_attempts_belong_to_jobs_at_work(job: StoredJob) -> Iterator[Violation]:
    """Check I7: a job that is not running has no open attempt; a paused job may finish a commit."""
    for row in job.attempts:
        finishing = job.row.status == JobStatus.PAUSED and row.phase == AttemptPhase.COMMITTING
        if row.is_open and job.row.status != JobStatus.RUNNING and not finishing:
            yield Violation(
                attempt_location(row), f"it is {row.phase} while the job is {job.row.status}", "no open attempt"
            )


def state_is_of_its_kind(job: StoredJob) -> Iterator[Violation]:
    """Check that what a job keeps between its attempts can be read as the state of its kind."""
    try:
        _read_state(job)
    except msgspec.ValidationError as exc:
        expected = "the state of a job of its kind, or none"
        yield Violation(Location(job.row.job_id), f"its state cannot be read ({exc})", expected)


def _read_state(job: StoredJob) -> object:
    return find_training(job.spec).read_state(job.row.protocol, job.spec) if job.spec is not None else None


def _find_state(job: StoredJob) -> object:
    """Return what a job keeps; None if it cannot be read, for which there is a check of its own."""
    with contextlib.suppress(msgspec.ValidationError):
        return _read_state(job)
    return None


def clocks_are_close(job: StoredJob) -> Iterator[Violation]:
    """Check that no clock of a stale synchronous parallel job is further ahead of the slowest than the slack allows.

    A client begins at most `slack` clocks ahead and finishes one clock later (Ho et al. 2013, section 3).
    """
    mode, found = job.spec.stale_synchronous if job.spec is not None else None, _find_state(job)
    if mode is None or not isinstance(found, ssp.ClockSet):
        return
    most = found.minimum + mode.slack + 1
    for client_id, clock in (found.clocks | found.ahead).items():
        if not found.minimum <= clock <= most:
            expected = f"from {found.minimum}, the minimum, to {most}, the minimum + slack + 1"
            yield Violation(Location(job.row.job_id, client=client_id), f"its clock is {clock}", expected)
    if len(found.clocks) > mode.concurrency:
        text = f"its clock set has {len(found.clocks)} members"
        yield Violation(Location(job.row.job_id), text, f"at most mode.concurrency = {mode.concurrency}")


def gossip_agrees(job: StoredJob) -> Iterator[Violation]:
    """Check that the state of a decentralised job is that of its last attempt, and that its version is the mean."""
    place, state = Location(job.row.job_id), _find_state(job)
    if not isinstance(state, GossipState):
        return
    last = max((row.round for row in job.attempts), default=0)
    begins = not any(row.is_open for row in job.attempts)
    if state.round not in ((last, last + 1) if begins else (last,)):
        yield Violation(place, f"its exchange is in round {state.round}", f"round {last}, that of its last attempt")
    mean = state.outcome.digest if state.outcome is not None else ""
    found = [version.digest for version in job.versions if version.is_held_by_clients]
    if found != ([mean] if mean else []):
        expected = f"one with the digest {mean}" if mean else "none before the silos agree"
        yield Violation(place, f"it has {len(found)} versions that clients hold", expected)


def job_file_is_readable(job: StoredJob) -> Iterator[Violation]:
    """Check I9: this version of fedplat can read every job file, so that a restart needs no operator.

    A restart does not need the file of a job that has ended under another version.
    """
    if job.spec is None and not (job.is_foreign and job.row.status in ENDED_JOBS):
        yield Violation(Location(job.row.job_id), job.unreadable, "a job file that this version of fedplat can read")


def takes_part_seldom_enough(participations: ParticipationRounds) -> Iterator[Violation]:
    """Check that clients take part no more often, and in rounds no closer together, than the job allows.

    The guarantee of a private job depends on it. Abandoned attempts count, but those of one round count once.
    """
    rest, most = participations.spec.selection.min_separation, participations.spec.max_participations
    for client_id, rounds in participations.rounds.items():
        for before, after in itertools.pairwise(rounds):
            if after - before <= rest:
                found = f"it also took part in round {before}"
                expected = f"{rest} rounds in between (selection.min_separation)"
                yield Violation(Location(participations.job.job_id, after, client=client_id), found, expected)
        if 0 < most < len(rounds):
            found, expected = f"it took part in {len(rounds)} rounds", f"{most} at most (privacy.max_participations)"
            yield Violation(Location(participations.job.job_id, client=client_id), found, expected)


Steps = Mapping[str, frozenset[str]]


def _steps(transitions: Mapping[Any, frozenset[Any]], first: str) -> Steps:
    """Convert a transition table to text, and add the first step of each entity."""
    return {str(state): frozenset(map(str, after)) for state, after in transitions.items()} | {"": frozenset({first})}


_JOB = _steps(JOB_TRANSITIONS, JobStatus.DRAFT)
_ATTEMPT = {str(kind): _steps(ATTEMPT_TRANSITIONS, first) for kind, first in FIRST_PHASES.items()}
_ASSIGNMENT = _steps(ASSIGNMENT_TRANSITIONS, AssignmentState.TRAINING)


def job_history(job: StoredJob) -> Iterator[Violation]:
    """Check that the history of the job leads to its status."""
    rows = [row for row in job.history if row.entity == "job"]
    yield from _chain(rows, _JOB, job.row.status, Location(job.row.job_id))


def version_histories(job: StoredJob) -> Iterator[Violation]:
    """Check that the history has each version but the first once, in order; metrics rows do not change the version."""
    place = Location(job.row.job_id)
    rows = [row for row in job.history if row.entity == "version"]
    made = [row.to_state for row in rows if row.to_state != row.from_state]
    expected = [str(version.version) for version in job.versions if version.version > 0]
    if made != expected:
        yield Violation(
            place,
            f"the history has versions {_join_numbers(made)}",
            f"{_join_numbers(expected)}, each once and in order",
        )
    for row in rows:
        if row.to_state != row.from_state and row.to_state != str(int(row.from_state) + 1):
            found = f"row {row.sequence} of the history leads from version {row.from_state} to {row.to_state}"
            yield Violation(place, found, "the next version")


def attempt_history(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check that the history of the attempt leads to its phase."""
    row = attempt.row
    if row.history_removed_unix_s is not None:
        return
    rows = [one for one in attempt.history if one.entity == "attempt"]
    steps = _ATTEMPT.get(row.kind, _ATTEMPT[AttemptKind.TRAIN])
    yield from _chain(rows, steps, row.phase, Location(row.job_id, row.round, row.number))


def assignment_histories(attempt: StoredAttempt) -> Iterator[Violation]:
    """Check that the history of each assignment leads to its state."""
    by_client: dict[str, list[StepRow]] = {one.client_id: [] for one in attempt.made}
    states = {one.client_id: one.state for one in attempt.made}
    for row in attempt.history:
        if row.entity == "assignment":
            by_client.setdefault(row.client_id, []).append(row)
    if attempt.row.history_removed_unix_s is not None:
        return
    for client_id, rows in by_client.items():
        place = Location(attempt.row.job_id, attempt.row.round, attempt.row.number, client_id)
        if client_id in states:
            yield from _chain(rows, _ASSIGNMENT, states[client_id], place)
        else:
            yield Violation(place, "the history has an assignment that is not stored", "a stored assignment")


def stray_histories(strays: StrayHistory) -> Iterator[Violation]:
    """Report history rows of attempts that are not stored, or of unknown entities."""
    for row in strays.history:
        found = f"row {row.sequence} of the history is about the {row.entity} {row.from_state} -> {row.to_state}"
        place = Location(strays.job.job_id, row.round, row.attempt, row.client_id or None)
        yield Violation(place, found, "a stored entity")


def _chain(rows: Iterable[StepRow], steps: Steps, state: str, place: Location) -> Iterator[Violation]:
    """Yield rows that do not begin in the previous row's state, forbidden transitions, and a wrong last state."""
    at = ""
    for row in rows:
        if row.from_state != at:
            found = f"row {row.sequence} of the history begins at {_name_state(row.from_state)}"
            yield Violation(place, found, f"{_name_state(at)}, the state after the previous row")
        if row.to_state not in steps.get(row.from_state, frozenset()):
            before, after = _name_state(row.from_state), _name_state(row.to_state)
            found = f"row {row.sequence} of the history leads from {before} to {after}"
            allowed = sorted(steps.get(row.from_state, frozenset()))
            yield Violation(place, found, f"one of {', '.join(allowed)}" if allowed else "no transition from there")
        at = row.to_state
    if at != state:
        yield Violation(place, f"its state is {state}", f"{_name_state(at)}, the last state of its history")


def _name_state(state: str) -> str:
    return state or "nothing"


def _join_numbers(numbers: list[str]) -> str:
    return ", ".join(numbers) or "none"
