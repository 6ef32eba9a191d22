"""Jobs under a real coordinator, every step of which is saved in a store and read back."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from msgspec import structs

from fedplat.job import calibrate, parse_job
from fedplat.rounds import (
    Assignment,
    AssignmentSet,
    Attempt,
    AttemptKey,
    Context,
    Coordinator,
    JobState,
    ModelVersion,
    ParticipationHistory,
    Proposal,
    Verdict,
    rebuild_attempt,
)
from fedplat.rounds.commands import Assign
from fedplat.rounds.events import (
    AssignmentFailed,
    AttemptAggregated,
    ClientCheckedIn,
    Event,
    JobAction,
    OperatorCommand,
    ServerRestarted,
    TimerFired,
    UpdateRejected,
    UpdateReported,
    UploadStarted,
)
from fedplat.rounds.records import NO_FUTILE, SecureMessages
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase, JobStatus, Reason
from fedplat_server.database.sql_jobs import recall_participations
from fedplat_server.database.store import Store
from fedplat_server.verify import checks, inspection

_Crew = TypeVar("_Crew", bound=AssignmentSet)
NOW = 1000.0
JOB_FILE = """
name = "digits"
population = "demo"
trainer = "digits"
rounds = 3
model.initial = "model.safetensors"
selection = { goal = 3, over_selection = 1.5, min_fraction = 0.6 }
deadlines = { selection_s = 10, training_s = 100, upload_s = 50 }
updates.weighting = "examples"
retry = { base_s = 1, max_s = 2 }
config = { lr = 0.1, epochs = 2, name = "π" }
[evaluation.clients]
evaluator = "digits"
goal = 2
"""


def digest_of(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def token_hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def draft(job_id: str, job_file: str = JOB_FILE) -> JobState:
    return JobState(job_id, calibrate(parse_job(job_file)), ModelVersion(0, 0, 0, digest_of(job_id, 0), 1000))


def as_stored(job: JobState) -> JobState:
    """Return what a store gives back of a job: without times but those of assignments, and `futile`."""
    attempt, carried = job.attempt, job.carried_over
    if attempt is not None:
        rows = [assignment for crew in job.assignment_sets for assignment in crew.assignments.values()]
        if not attempt.is_open:
            rows = [_without_messages(row) for row in rows]
        attempt, carried = rebuild_attempt(_bare(attempt), rows)
    return structs.replace(job, attempt=attempt, carried_over=carried, resume_at=None, futile=NO_FUTILE)


def _without_messages(row: Assignment) -> Assignment:
    secure = SecureMessages(row.secure.group, row.secure.position) if row.secure is not None else None
    return structs.replace(row, secure=secure)


def _bare(attempt: Attempt) -> Attempt:
    return structs.replace(
        attempt,
        opened_at=0.0,
        selection_ends_at=0.0,
        step_ends_at=None,
        num_awaited=0,
        ended_at=None,
        closes_at=None,
        next_deadline=None,
        assignments={},
        counts={},
        last_report=0,
    )


def without_moments(job: JobState) -> JobState:
    """A job without the values that depend on clocks, which have their own tests."""
    job = as_stored(job)
    if job.attempt is None:
        return job
    return structs.replace(job, attempt=_timeless(job.attempt), carried_over=_timeless(job.carried_over))


def _timeless(crew: _Crew) -> _Crew:
    bare = [structs.replace(one, assigned_at=0.0, deadline_at=0.0) for one in crew.assignments.values()]
    return structs.replace(crew.with_assignments(bare), next_deadline=None, last_report=0)


class Driver:
    """Does what the daemon does: propose, save, accept; `check` compares what the store gives back."""

    def __init__(self, store: Store, prefix: str = "", *, check: bool = True) -> None:
        self.store = store
        self.coordinator = Coordinator()
        self.now = NOW
        self.tokens: dict[str, str] = {}  # the last token of each client
        self._rng = np.random.default_rng(0)
        self._numbers = itertools.count()
        self._prefix = prefix
        self._check = check

    def context(self) -> Context:
        return Context(self.now, self._rng, self._new_token)

    def _new_token(self) -> tuple[str, bytes]:
        token = f"{self._prefix}token-{next(self._numbers)}"
        return token, token_hash(token)

    async def create(self, job_id: str, job_file: str = JOB_FILE) -> JobState:
        record = await self.store.jobs.create_job(draft(job_id, job_file), job_file, f"key of {job_id}")
        self.coordinator.add(record.state)
        await self.operate(job_id, JobAction.START)
        return self.coordinator.jobs[job_id]

    def propose(self, *events: Event) -> Proposal:
        return self.coordinator.propose(events, self.context())

    async def send(self, *events: Event) -> list[Verdict]:
        """Proposes, saves, accepts, and compares; aggregation follows at once."""
        proposal = self.propose(*events)
        await self.store.jobs.save(proposal.changes, self.now)
        self.coordinator.accept(proposal)
        self.tokens |= {c.client_id: c.token for c in proposal.commands if isinstance(c, Assign)}
        if self._check:
            await self.check()
        return proposal.verdicts

    async def warm_start(self, job_id: str) -> None:
        """The server has trained the initial model."""
        attempt = self.coordinator.jobs[job_id].open_attempt
        assert attempt is not None
        assert attempt.kind is AttemptKind.WARM_START
        await self.send(AttemptAggregated(attempt.key, self.next_version(job_id)))

    async def check(self) -> None:
        expected = {job_id: without_moments(job) for job_id, job in self.coordinator.jobs.items()}
        loaded = {record.state.job_id: without_moments(record.state) for record in await self.store.jobs.load_jobs()}
        assert {job_id: job for job_id, job in loaded.items() if job_id in expected} == expected
        for job_id, memory in self.coordinator.histories.items():
            job = self.coordinator.jobs[job_id]
            recalled = ParticipationHistory.recall(job.spec, await recall_participations(self.store.jobs, job))
            assert recalled is not None
            assert (memory.clients, memory.utilities) == (recalled.clients, recalled.utilities)

    async def operate(self, job_id: str, action: JobAction) -> None:
        (verdict,) = await self.send(OperatorCommand(job_id, action))
        assert verdict.accepted, verdict

    async def check_in(self, *client_ids: str) -> None:
        handlers = frozenset({"digits"})
        await self.send(*(ClientCheckedIn(c, "demo", {"region": "eu"}, handlers, handlers) for c in client_ids))

    def cohort(self, job_id: str) -> tuple[AttemptKey, list[str]]:
        attempt = self.coordinator.jobs[job_id].open_attempt
        assert attempt is not None
        return attempt.key, [name for name, one in attempt.assignments.items() if one.is_busy]

    async def report(self, job_id: str, client_ids: Iterable[str], took_s: float = 1.5) -> None:
        """Lets clients report; the attempt is aggregated when that closes it."""
        for client_id in client_ids:
            self.now += took_s
            key, _ = self.cohort(job_id)
            metrics = {"loss": 1 / 3 + self.now, "accuracy": 0.5}
            digest = digest_of("update", key, client_id)
            await self.send(UpdateReported(key, client_id, digest, 17.0, metrics, update_bytes=2**33))
        await self.aggregate(job_id)

    async def aggregate(self, job_id: str) -> None:
        job = self.coordinator.jobs[job_id]
        attempt = job.open_attempt
        if attempt is not None and attempt.phase is AttemptPhase.COMMITTING:
            await self.send(AttemptAggregated(attempt.key, self.next_version(job_id)))

    def next_version(self, job_id: str) -> ModelVersion:
        job = self.coordinator.jobs[job_id]
        attempt = job.attempt
        assert attempt is not None
        reported = [one for one in attempt.assignments.values() if one.state is AssignmentState.REPORTED]
        number = job.latest.version + 1
        return ModelVersion(
            version=number,
            round=attempt.key.round,
            attempt=attempt.key.number,
            digest=digest_of(job_id, number),
            size_bytes=2**40 + number,
            state_digest=digest_of(job_id, "state", number),
            delta_digest=digest_of(job_id, "delta", number),
            delta_size_bytes=2**39 + number,
            delta_base=job.latest.digest,
            num_updates=len(reported),
            total_weight=sum(one.weight for one in reported),
        )

    async def finish_attempt(self, job_id: str, names: str) -> None:
        """Lets enough new clients take part, and as many report as needed."""
        attempt = self.coordinator.jobs[job_id].open_attempt
        assert attempt is not None
        if attempt.phase is AttemptPhase.SELECTING:
            await self.check_in(*(f"{names}{number}" for number in range(attempt.target)))
        _, cohort = self.cohort(job_id)
        await self.report(job_id, cohort[: attempt.goal])

    async def tick(self, job_id: str, after_s: float) -> None:
        self.now += after_s
        await self.send(TimerFired(job_id))

    async def restart(self) -> None:
        """Forgets everything and continues with what the store holds."""
        mine = set(self.coordinator.jobs)
        self.now = 5.0
        records = await self.store.jobs.load_jobs(self.now)
        loaded = [record.state for record in records if record.state.job_id in mine]
        self.coordinator = Coordinator()
        for job in loaded:
            self.coordinator.add(job, await recall_participations(self.store.jobs, job))
        await self.send(*(ServerRestarted(job.job_id) for job in loaded))


async def eventful(driver: Driver, job_id: str = "eventful", job_file: str = JOB_FILE) -> None:
    """A job to which nearly everything happens that can happen; finally it is cancelled in round 3."""
    await driver.create(job_id, job_file)
    await _round_with_failures(driver, job_id)
    await driver.finish_attempt(job_id, "evaluator-")  # the federated evaluation of version 1
    await _round_with_retries(driver, job_id)
    await driver.check_in("e0", "e1")
    key, _ = driver.cohort(job_id)
    for name in ("e0", "e1"):
        await driver.send(AssignmentFailed(key, name, Reason.CLIENT_STOPPED))
    await driver.check_in(*(f"f{number}" for number in range(5)))
    await driver.report(job_id, ["f1"])
    await driver.operate(job_id, JobAction.CANCEL)


async def _round_with_failures(driver: Driver, job_id: str) -> None:
    await driver.check_in("a", "b", "c", "d", "e")
    key, cohort = driver.cohort(job_id)
    assert sorted(cohort) == ["a", "b", "c", "d", "e"]
    await driver.check_in("a")  # it lost its reply, and gets a new token
    await driver.send(AssignmentFailed(key, "b", Reason.TRAINER_ERROR, "ValueError: \N{SNOWMAN}"))
    await driver.send(UpdateRejected(key, "c", Reason.REJECTED_NONFINITE, "NaN in layer 2"))
    await driver.send(UploadStarted(key, "d"))
    await driver.report(job_id, ["e", "a", "d"])


async def _round_with_retries(driver: Driver, job_id: str) -> None:
    await driver.check_in("g", "h", "i", "j", "k")
    key, _ = driver.cohort(job_id)
    await driver.report(job_id, ["g"])
    await driver.send(UploadStarted(key, "h"))
    await driver.tick(job_id, 200.0)  # all others are late: abandoned, with one report received
    assert driver.coordinator.jobs[job_id].failures == 1
    await driver.tick(job_id, 10.0)
    await driver.tick(job_id, 50.0)  # no client came to be selected
    await driver.tick(job_id, 10.0)
    await driver.check_in("l", "m", "n", "o", "p")
    await driver.operate(job_id, JobAction.PAUSE)
    await driver.operate(job_id, JobAction.RESUME)
    await driver.check_in("q", "r", "s", "t", "u")
    await driver.restart()
    await driver.finish_attempt(job_id, "v")


async def check_invariants(database: str) -> None:
    """Assert that what is stored violates no invariant, except for files, which these tests do not have."""
    async with inspection.snapshot(database) as connection:
        found = [each async for unit in inspection.units(connection) for each in checks.findings(unit, live=False)]
    assert [each for each in found if each.check not in ("optimizer_state_is_kept", "deltas_are_kept")] == []


async def run_to_the_end(driver: Driver, job_id: str, names: str) -> None:
    """Plays a job until it ends."""
    while driver.coordinator.jobs[job_id].status is JobStatus.RUNNING:
        job = driver.coordinator.jobs[job_id]
        if job.open_attempt is None:
            await driver.tick(job_id, 1000.0)
        else:
            await driver.finish_attempt(job_id, f"{names}-{job.open_attempt.key.round}-")


@dataclasses.dataclass
class Ticks:
    """A clock that moves on by a second whenever it is read."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now
