"""Arbitrary schedules of everything that can happen to two jobs and one fleet, with all invariants after each step.

A failure prints the shortest schedule that Hypothesis found, as a program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from msgspec import structs

from fedplat import sampling
from fedplat.job import JobSpec
from fedplat.job.tables import WarmStart
from fedplat.rounds import Attempt, AttemptKey, JobState
from fedplat.rounds.events import (
    AggregationFailed,
    AssignmentFailed,
    AttemptAggregated,
    ClientCheckedIn,
    ClientLeft,
    ClientRevoked,
    Event,
    JobAction,
    OperatorCommand,
    TimerFired,
    UpdateRejected,
    UpdateReported,
    UploadStarted,
)
from fedplat.rounds.states import ENDED_JOBS, AttemptKind, AttemptPhase, JobStatus, Reason
from support.rounds.driver import Driver, make_aggregated, make_client, make_job, make_spec

DAY_S = 86_400.0
PROFILE = hypothesis.settings(
    derandomize=True,
    database=None,
    deadline=None,
    stateful_step_count=30,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
JOBS = {
    "a": make_spec(
        2,
        2,
        selection={"over_selection": 1.5, "where": "region == 'eu'", "wait_for": 4},
        deadlines={"adaptive": {"after": 2, "min_s": 5.0}},
        evaluation={"clients": {"evaluator": "digits-eval", "goal": 2, "timeout_s": 20.0}},
        retry={"base_s": 2.0, "max_s": 8.0},
    ),
    "b": make_spec(3, 2, selection={"wait_for": 6}, retry={"base_s": 1.0, "max_attempts": 4}),
}
BUFFERED = {
    "a": make_spec(
        2,
        4,
        mode={"kind": "buffered", "concurrency": 3, "max_staleness": 1},
        selection={"where": "region == 'eu'"},
        deadlines={"selection_s": 30.0, "adaptive": {"after": 2, "min_s": 5.0}},
        evaluation={"every": 2, "clients": {"evaluator": "digits-eval", "goal": 2, "timeout_s": 20.0}},
        retry={"base_s": 2.0, "max_s": 8.0},
    ),
    "b": make_spec(
        3,
        3,
        mode={"kind": "buffered", "concurrency": 5},
        selection={"min_fraction": 1.0},
        retry={"base_s": 1.0, "max_attempts": 6},
    ),
}
STALE_SYNCHRONOUS = {
    "a": make_spec(
        1,
        6,
        mode={"kind": "ssp", "concurrency": 4, "slack": 1},
        selection={"where": "region == 'eu'", "wait_for": 2},
        deadlines={"selection_s": 30.0, "adaptive": {"after": 2, "min_s": 5.0}},
        evaluation={"every": 3, "clients": {"evaluator": "digits-eval", "goal": 2, "timeout_s": 20.0}},
        retry={"base_s": 2.0, "max_s": 8.0},
    ),
    "b": make_spec(1, 5, mode={"kind": "ssp", "concurrency": 3, "slack": 0}, retry={"base_s": 1.0}),
}
FLEET: dict[str, ClientCheckedIn] = {
    f"c{i}": make_client(f"c{i}", labels={"region": "us" if i == 7 else "eu"}) for i in range(7)
} | {
    "trainer": make_client("trainer", evaluators=frozenset[str]()),
    "evaluator": make_client("evaluator", trainers=frozenset[str](), labels={"region": "eu"}),
    "other": make_client("other", population="other"),
}
WARM_START = WarmStart(trainer="digits", batch_size=8, learning_rate=0.1)
FRESH = {f"fresh{i}": make_client(f"fresh{i}", labels={"region": "eu"}) for i in range(40)}
"""These check in when a job starves because all other clients have to rest."""
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"min_separation": 1},
    {"min_separation": 3, "sampling": sampling.Stratified(label="region")},
    {"sampling": sampling.Poisson(rate=0.8), "close": "deadline"},
    {"sampling": sampling.Oort(pacer_s=20.0), "min_separation": 1},
    {"sampling": sampling.Weighted(), "close": "deadline"},
)
Step = tuple[str, str, str, int]
WORDS = "check_in check_in leave upload report report boast explode reject fail revoke timer timer operate done undone"
STEPS = st.tuples(
    st.sampled_from(WORDS.split()),
    st.sampled_from(sorted(JOBS)),
    st.sampled_from(sorted(FLEET)),
    st.integers(0, 3),
)


def make_event(driver: Driver, step: Step) -> Event:
    """An event that fits the state before the batch, so it may be out of date within the batch."""
    what, job_id, client_id, variant = step
    job = driver.coordinator.jobs[job_id]
    key = driver.coordinator.assignment_of(client_id)
    if key is None:
        key = job.attempt.key if job.attempt is not None else AttemptKey(job_id, 1, 1)
    by_name: dict[str, Event] = {
        "check_in": FLEET[client_id],
        "leave": ClientLeft(client_id),
        "upload": UploadStarted(key, client_id),
        "report": UpdateReported(key, client_id, f"digest-{variant % 2}", 1.0 + variant, {"loss": float(variant)}),
        "boast": UpdateReported(key, client_id, "digest-0", 10.0 ** (3 * variant), norm=1.0),
        "explode": UpdateReported(key, client_id, "digest-0", 1.0, norm=10.0 ** (8 * variant)),
        "revoke": ClientRevoked(client_id),
        "reject": UpdateRejected(key, client_id, Reason.REJECTED_NONFINITE, "text"),
        "fail": AssignmentFailed(key, client_id, Reason.TRAINER_ERROR, "text"),
        "timer": TimerFired(job_id),
        "operate": OperatorCommand(job_id, tuple(JobAction)[variant]),
        "done": make_aggregated(job) if job.attempt is not None else TimerFired(job_id),
        "undone": AggregationFailed(key, "text"),
    }
    return by_name[what]


class Schedules(RuleBasedStateMachine):
    """The driver checks the invariants; this class only makes up the events."""

    jobs: Mapping[str, JobSpec] = JOBS

    @initialize(
        seed=st.integers(0, 3),
        started=st.booleans(),
        max_waiting=st.sampled_from((3, 100)),
        in_memory=st.sets(st.sampled_from(sorted(JOBS))),
        policies=st.tuples(st.sampled_from(POLICIES), st.sampled_from(POLICIES)),
        warm=st.sets(st.sampled_from(sorted(JOBS))),
    )
    def begin(
        self,
        seed: int,
        started: bool,
        max_waiting: int,
        in_memory: set[str],
        policies: tuple[dict[str, Any], dict[str, Any]],
        warm: set[str],
    ) -> None:
        jobs: list[JobState] = []
        for (job_id, spec), options in zip(self.jobs.items(), policies, strict=True):
            if (spec.buffered is not None and "close" in options) or spec.stale_synchronous is not None:
                options = {}  # these options are for whole cohorts
            selection = structs.replace(spec.selection, **options)
            durability = "memory" if job_id in in_memory else "spool"
            changed = structs.replace(spec, selection=selection, durability=durability)
            warm_start = WARM_START if job_id in warm else None
            jobs.append(make_job(job_id, structs.replace(changed, warm_start=warm_start)))
        self.driver = Driver(*jobs, seed=seed, max_waiting=max_waiting)
        if started:
            self.driver.do(*(OperatorCommand(job_id, JobAction.START) for job_id in JOBS))

    @rule(
        steps=st.lists(STEPS, min_size=1, max_size=6),
        late_s=st.sampled_from((0.0, 0.0, 1.0, 70.0)),
        stored=st.sampled_from((True, True, True, False)),
    )
    def a_batch(self, steps: list[Step], late_s: float, stored: bool) -> None:
        self.driver.now += late_s  # the server is slow: timers are overdue
        events = [make_event(self.driver, step) for step in steps]
        self.driver.do(*events, stored=stored)
        if not stored:
            self.driver.do(*events)  # a rejected batch changes nothing, so its events may be proposed again

    @rule(client_ids=st.sets(st.sampled_from(sorted(FLEET)), min_size=1, max_size=6))
    def many_check_in(self, client_ids: set[str]) -> None:
        self.driver.do(*(FLEET[client_id] for client_id in sorted(client_ids)))

    @rule(job_id=st.sampled_from(sorted(JOBS)), count=st.integers(1, 4))
    def some_report(self, job_id: str, count: int) -> None:
        self.driver.do(*reports(self.driver, job_id)[:count])

    @rule(job_id=st.sampled_from(sorted(JOBS)))
    def it_is_aggregated(self, job_id: str) -> None:
        self.driver.do(*aggregations(self.driver, job_id))

    @rule(seconds=st.sampled_from((0.0, 0.5, 3.0, 29.0, 61.0, 150.0)))
    def time_passes(self, seconds: float) -> None:
        self.driver.wait(seconds)

    @rule(client_ids=st.sets(st.sampled_from(sorted(FLEET)), min_size=1, max_size=6))
    def clients_come_back_when_time_is_over(self, client_ids: set[str]) -> None:
        self.driver.now += 70.0
        self.driver.do(*map(TimerFired, JOBS), *(FLEET[client_id] for client_id in sorted(client_ids)))

    @rule(job_id=st.sampled_from(sorted(JOBS)), which=st.integers(0, 2))
    def one_uploads(self, job_id: str, which: int) -> None:
        working = reports(self.driver, job_id)
        self.driver.do(*(UploadStarted(each.key, each.client_id) for each in working[which : which + 1]))

    @rule(down_s=st.sampled_from((0.0, 0.0, 5.0, 31.0, 200.0)), clock_s=st.sampled_from((0.0, 0.0, -DAY_S, DAY_S)))
    def the_server_crashes(self, down_s: float, clock_s: float) -> None:
        before = {job_id: job.open_attempt for job_id, job in self.driver.coordinator.jobs.items()}
        self.driver.crash(down_s, clock_s)
        for job_id, attempt in before.items():
            check_restart(self.driver.coordinator.jobs[job_id], attempt, self.driver.now)

    def teardown(self) -> None:
        """Whatever happened before, every job ends when the fleet behaves from now on."""
        if hasattr(self, "driver"):
            finish(self.driver)


class BufferedSchedules(Schedules):
    """The same schedules with jobs that fill buffers."""

    jobs = BUFFERED


class StaleSynchronousSchedules(Schedules):
    """The same schedules with clocks. In the end two clients answer, and the others never return."""

    jobs = STALE_SYNCHRONOUS

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            finish(self.driver, {name: FLEET[name] for name in ("c0", "c1")}, 150)


def check_restart(job: JobState, before: Attempt | None, now: float) -> None:
    """Open work is open again unless its time was over; no deadline is later than that of a new assignment."""
    after = job.attempt
    if before is None or after is None or after.key != before.key:  # too few had reported: the next attempt is open
        return
    if before.kind is AttemptKind.WARM_START:
        assert after == structs.replace(before, opened_at=0.0, selection_ends_at=0.0)
        return
    if job.spec.durability == "memory" and (job.spec.buffered is None or not after.is_open):
        assert (after.phase, after.reason) == (AttemptPhase.ABANDONED, "the server was restarted")
    elif not after.is_open:
        assert before.phase is AttemptPhase.COLLECTING or before.kind is AttemptKind.EVALUATE
    assert after.selection_ends_at <= now + job.spec.deadlines.selection_s
    longest = max(job.spec.deadlines.training_s, job.spec.deadlines.upload_s)
    assert all(each.deadline_at <= now + longest for crew in job.assignment_sets for each in crew.busy)


def finish(driver: Driver, reliable: Mapping[str, ClientCheckedIn] = FLEET, num_turns: int = 60) -> None:
    """Resumes paused jobs, and lets reliable clients work until all jobs end."""
    for job in list(driver.coordinator.jobs.values()):
        action = {JobStatus.DRAFT: JobAction.START, JobStatus.PAUSED: JobAction.RESUME}.get(job.status)
        if action is not None:
            driver.do(OperatorCommand(job.job_id, action))
    driver.coordinator.max_waiting = 100
    for turn in range(num_turns):
        if all(job.status in ENDED_JOBS for job in driver.coordinator.jobs.values()):
            break
        busy, waiting = driver.coordinator.assignment_of, driver.coordinator.room.clients
        fleet = reliable if turn < 20 or reliable is not FLEET else FLEET | FRESH
        driver.do(*(fleet[name] for name in fleet if name not in waiting and busy(name) is None))
        for job_id in JOBS:
            driver.do(*(each for each in reports(driver, job_id) if each.client_id in fleet))
            driver.do(*aggregations(driver, job_id))
        driver.wait(min(driver.timers.values(), default=driver.now) - driver.now)
    for job_id, job in driver.coordinator.jobs.items():
        assert job.status in ENDED_JOBS, f"{job_id} hangs: {job.status} {job.reason} {job.attempt}"
        num_versions = job.spec.rounds + (job.spec.warm_start is not None)
        assert job.status is not JobStatus.COMPLETED or job.latest.version == num_versions
    assert driver.timers == {}
    assert driver.coordinator.num_busy == 0


def reports(driver: Driver, job_id: str) -> Sequence[UpdateReported]:
    """The reports of the clients that work for a job."""
    working = [each for crew in driver.coordinator.jobs[job_id].assignment_sets for each in crew.busy]
    return [UpdateReported(each.key, each.client_id, f"of-{each.client_id}", 2.0, norm=0.5) for each in working]


def aggregations(driver: Driver, job_id: str) -> Sequence[AttemptAggregated]:
    """The outcome of a job's aggregation, if one is due."""
    job = driver.coordinator.jobs[job_id]
    committing = job.open_attempt is not None and job.open_attempt.phase is AttemptPhase.COMMITTING
    return [make_aggregated(job)] if committing else []


@pytest.mark.parametrize("num_schedules", [40, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("machine", [Schedules, BufferedSchedules, StaleSynchronousSchedules])
def test_schedules(machine: type[Schedules], num_schedules: int) -> None:
    run_state_machine_as_test(machine, settings=hypothesis.settings(PROFILE, max_examples=num_schedules))


@pytest.mark.parametrize("jobs", [JOBS, BUFFERED, STALE_SYNCHRONOUS])
@pytest.mark.parametrize("seed", range(3))
def test_a_good_fleet_ends_every_job(seed: int, jobs: Mapping[str, JobSpec]) -> None:
    driver = Driver(*(make_job(job_id, spec) for job_id, spec in jobs.items()), seed=seed)
    finish(driver)
    assert {job.status for job in driver.coordinator.jobs.values()} == {JobStatus.COMPLETED}
