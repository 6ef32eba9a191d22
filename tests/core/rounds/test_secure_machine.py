"""Arbitrary schedules of secure aggregations: the sets that clients are asked about never change within an attempt.

The driver checks this after each step (`support.rounds.secure_sets`), with all other invariants.
"""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from msgspec import structs

from fedplat.job import JobSpec
from fedplat.rounds import Assignment, AttemptKey
from fedplat.rounds.events import (
    AggregationFailed,
    AssignmentFailed,
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
from fedplat.rounds.states import ENDED_JOBS, AssignmentState, AttemptPhase, JobStatus, Reason
from support.rounds.driver import make_aggregated, make_job
from support.rounds.secure_driver import (
    SecureDriver,
    answer_event,
    confirmation_event,
    keys_event,
    make_secure_client,
    make_secure_spec,
    report_event,
    shares_event,
)

DAY_S = 86_400.0
PROFILE = hypothesis.settings(
    derandomize=True,
    database=None,
    deadline=None,
    stateful_step_count=15,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
RETRY = {"base_s": 1.0, "max_s": 8.0}
JOBS: dict[str, JobSpec] = {
    "pair": make_secure_spec(3, 5, selection={"over_selection": 1.4, "min_fraction": 0.7}, retry=RETRY),
    "confirm": make_secure_spec(
        5,
        5,
        options={"confirm": True, "threshold": 0.51, "step_s": 20.0},
        selection={"over_selection": 1.2},
        retry=RETRY,
        deadlines={"adaptive": {"after": 2, "min_s": 5.0}},
    ),
    "groups": make_secure_spec(7, 5, options={"group": 4, "threshold": 0.6, "step_s": 20.0}, retry=RETRY),
    "circle": make_secure_spec(8, 5, options={"neighbours": 4, "threshold": 0.55, "step_s": 20.0}, retry=RETRY),
    "private": make_secure_spec(
        4,
        5,
        updates={"weighting": "uniform", "clip_norm": 1.0},
        selection={"close": "deadline", "over_selection": 1.5},
        privacy={"trust": "none", "participation": "fixed", "noise_multiplier": 1.0, "max_releases": 40, "delta": 1e-5},
        retry=RETRY,
    ),
}
FLEET = [f"c{n}" for n in range(10)]
MAKE = {"keys": keys_event, "shares": shares_event, "confirm": confirmation_event, "answer": answer_event}
WORDS = (
    "keys shares confirm answer report keys shares confirm answer report upload boast fail reject revoke check_in "
    "leave timer operate undone done"
)
STEPS = st.tuples(
    st.sampled_from(WORDS.split()), st.sampled_from(FLEET), st.sampled_from(("", "other")), st.integers(0, 3)
)
Step = tuple[str, str, str, int]
BATCH_PHASES = (
    AttemptPhase.SHARING,
    AttemptPhase.COLLECTING,
    AttemptPhase.CONFIRMING,
    AttemptPhase.UNMASKING,
    AttemptPhase.UNMASKING,
    AttemptPhase.COMMITTING,
)


def make_event(driver: SecureDriver, step: Step) -> Event:
    """An event that may not fit the state: of a former attempt, twice with other bytes, too early or too late."""
    what, client_id, salt, variant = step
    key = driver.key if driver.job.attempt is not None else AttemptKey("j", 1, 1)
    key = key._replace(number=max(1, key.number - (variant == 3)))
    if what in MAKE:
        return MAKE[what](key, client_id, salt)
    by_name: dict[str, Event] = {
        "upload": UploadStarted(key, client_id),
        "report": report_event(key, client_id),
        "boast": UpdateReported(key, client_id, f"of-{client_id}{salt}", 1.0 + variant, norm=1e30),
        "fail": AssignmentFailed(key, client_id, Reason.UNSAFE_AGGREGATION, "text"),
        "reject": UpdateRejected(key, client_id, Reason.REJECTED_MESSAGE, "text"),
        "revoke": ClientRevoked(client_id),
        "check_in": make_secure_client(client_id),
        "leave": ClientLeft(client_id),
        "timer": TimerFired("j"),
        "operate": OperatorCommand("j", JobAction.PAUSE if variant == 0 else JobAction.RESUME),
        "undone": AggregationFailed(key, "text"),
        "done": make_aggregated(driver.job) if driver.job.attempt is not None else TimerFired("j"),
    }
    return by_name[what]


def next_messages(driver: SecureDriver) -> Sequence[Event]:
    """The next message of each client of the attempt, as far as the phase allows one."""
    attempt = driver.job.open_attempt
    if attempt is None:
        return []
    if attempt.phase is AttemptPhase.COMMITTING:
        return [make_aggregated(driver.job)]

    def make(each: Assignment) -> Event | None:
        match attempt.phase, each.state:
            case AttemptPhase.ADVERTISING, AssignmentState.TRAINING:
                return keys_event(each.key, each.client_id)
            case AttemptPhase.SHARING, AssignmentState.ADVERTISED:
                return shares_event(each.key, each.client_id)
            case AttemptPhase.COLLECTING, AssignmentState.SHARED | AssignmentState.UPLOADING:
                return report_event(each.key, each.client_id)
            case AttemptPhase.CONFIRMING, AssignmentState.REPORTED:
                return confirmation_event(each.key, each.client_id)
            case AttemptPhase.UNMASKING, AssignmentState.REPORTED:
                return answer_event(each.key, each.client_id)
            case _:
                return None

    return [event for each in attempt.assignments.values() if (event := make(each)) is not None]


class SecureSchedules(RuleBasedStateMachine):
    """The driver checks the invariants; this class only makes up the events."""

    @initialize(
        name=st.sampled_from(sorted(JOBS)),
        seed=st.integers(0, 3),
        durability=st.sampled_from(("spool", "spool", "spool", "memory")),
        phase=st.integers(0, 4),
    )
    def begin(self, name: str, seed: int, durability: str, phase: int) -> None:
        spec = structs.replace(JOBS[name], durability=durability)
        self.driver = SecureDriver(make_job(spec=spec), seed=seed)
        self.driver.do(OperatorCommand("j", JobAction.START), *map(make_secure_client, FLEET))
        for _ in range(phase):  # so that late phases are reached as often as early ones
            self.driver.do(*next_messages(self.driver))

    @rule(
        steps=st.lists(STEPS, min_size=1, max_size=6),
        late_s=st.sampled_from((0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 21.0)),
        stored=st.sampled_from((True, True, True, False)),
        before=st.sampled_from((None, *BATCH_PHASES)),
    )
    def a_batch(self, steps: list[Step], late_s: float, stored: bool, before: AttemptPhase | None) -> None:
        self.advance_to(before)
        self.driver.now += late_s  # the server is slow: timers are overdue
        events = [make_event(self.driver, step) for step in steps]
        self.driver.do(*events, stored=stored)
        if not stored:
            self.driver.do(*events)

    def advance_to(self, phase: AttemptPhase | None) -> None:
        """Let all clients take their steps until the attempt is in a phase, if it gets there soon."""
        for _ in range(8):
            attempt = self.driver.job.attempt
            if phase is None or (attempt is not None and attempt.phase is phase):
                return
            take_turn(self.driver)

    @rule(
        phase=st.sampled_from(BATCH_PHASES),
        what=st.sampled_from(("revoke", "confirm", "answer", "shares", "fail", "check_in", "reject", "keys", "report")),
        which=st.integers(0, 7),
        salt=st.sampled_from(("other", "")),
        some_first=st.integers(0, 3),
    )
    def one_client_interferes(self, phase: AttemptPhase, what: str, which: int, salt: str, some_first: int) -> None:
        self.advance_to(phase)
        attempt = self.driver.job.open_attempt
        if attempt is not None and attempt.assignments:
            self.driver.do(*next_messages(self.driver)[:some_first])
            names = list(attempt.assignments)
            self.driver.do(make_event(self.driver, (what, names[which % len(names)], salt, 0)))

    @rule(count=st.integers(1, 10), last=st.booleans())
    def some_take_their_step(self, count: int, last: bool) -> None:
        events = next_messages(self.driver)
        self.driver.do(*(events[-count:] if last else events[:count]))

    @rule(client_ids=st.sets(st.sampled_from(FLEET), min_size=1))
    def some_check_in(self, client_ids: set[str]) -> None:
        self.driver.check_in(*sorted(client_ids))

    @rule(seconds=st.sampled_from((0.1, 0.5, 2.0, 9.0, 21.0, 120.0)))
    def time_passes(self, seconds: float) -> None:
        self.driver.wait(seconds)

    @rule(
        down_s=st.sampled_from((0.0, 0.0, 5.0, 200.0)),
        clock_s=st.sampled_from((0.0, 0.0, -DAY_S, DAY_S)),
        phase=st.sampled_from((None, *BATCH_PHASES)),
    )
    def the_server_is_killed(self, down_s: float, clock_s: float, phase: AttemptPhase | None) -> None:
        self.advance_to(phase)
        before = self.driver.job.open_attempt
        self.driver.crash(down_s, clock_s)
        after = self.driver.job.attempt
        if before is not None and self.driver.job.spec.durability == "spool":
            assert after is not None
            steps = (AttemptPhase.CONFIRMING, AttemptPhase.UNMASKING, AttemptPhase.COMMITTING)
            assert before.phase not in steps or (after.key, after.phase) == (before.key, before.phase)

    def teardown(self) -> None:
        """Whatever happened before, the job ends when the fleet behaves from now on."""
        if hasattr(self, "driver"):
            finish(self.driver)


def take_turn(driver: SecureDriver) -> None:
    """Let all clients take their next step; without any, let all free clients check in, and then let time pass."""
    if events := next_messages(driver):
        driver.do(*events)
        return
    busy, waiting = driver.coordinator.assignment_of, driver.coordinator.room.clients
    free = [name for name in FLEET if name not in waiting and busy(name) is None]
    if free:
        driver.check_in(*free)
    elif driver.timers:
        driver.wait(driver.timers["j"] - driver.now)


def finish(driver: SecureDriver) -> None:
    """Resumes a paused job, and lets a reliable fleet work until it ends."""
    action = {JobStatus.DRAFT: JobAction.START, JobStatus.PAUSED: JobAction.RESUME}.get(driver.job.status)
    if action is not None:
        driver.operate(action)
    for _ in range(100):
        if driver.job.status in ENDED_JOBS:
            break
        take_turn(driver)
    assert driver.job.status in ENDED_JOBS, f"it hangs: {driver.job.status} {driver.job.reason} {driver.job.attempt}"
    assert driver.job.status is not JobStatus.COMPLETED or driver.job.latest.version == driver.job.spec.rounds
    assert driver.timers == {}
    assert driver.coordinator.num_busy == 0


@pytest.mark.parametrize("num_schedules", [15, pytest.param(40, marks=pytest.mark.slow)])
def test_schedules(num_schedules: int) -> None:
    settings = hypothesis.settings(PROFILE, max_examples=num_schedules)
    run_state_machine_as_test(SecureSchedules, settings=settings)


@pytest.mark.parametrize("name", JOBS)
def test_a_good_fleet_ends_every_job(name: str) -> None:
    driver = SecureDriver(make_job(spec=JOBS[name]))
    finish(driver)
    assert driver.job.status is JobStatus.COMPLETED


def test_the_same_events_and_the_same_seed_give_the_same_states() -> None:
    found: list[object] = []
    for _ in range(2):
        driver = SecureDriver(make_job(spec=JOBS["groups"]), seed=5)
        finish(driver)
        found.append((driver.ledger.cohorts, driver.ledger.attempts, driver.ledger.history))
    assert found[0] == found[1]
