"""Operators, and every event in every phase."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedplat.rounds import AttemptKey, Verdict, dispatch
from fedplat.rounds.events import (
    AggregationFailed,
    AssignmentFailed,
    AssignmentReclaimed,
    CandidatesDrawn,
    Event,
    JobAction,
    OperatorCommand,
    RollbackOrdered,
    ServerRestarted,
    TimerFired,
    UpdateRejected,
    UpdateReported,
    UploadStarted,
)
from fedplat.rounds.states import AttemptPhase, JobStatus, Reason
from support.rounds.driver import Driver, aborted, make_aggregated, make_job, make_spec, names
from support.rounds.phases import (
    CANCEL,
    PAUSE,
    RESUME,
    START,
    backing_off,
    collecting,
    committing,
    completed,
    drafted,
    paused,
    paused_while_committing,
    selecting,
)

RUNNING, PAUSED, CANCELLED = JobStatus.RUNNING, JobStatus.PAUSED, JobStatus.CANCELLED


def failed() -> Driver:
    driver = Driver(make_job(spec=make_spec(retry={"max_attempts": 1}))).start(2)
    driver.give_up("c0", "c1")
    return driver


def cancelled() -> Driver:
    driver = collecting()
    driver.operate(CANCEL)
    return driver


def evaluating() -> Driver:
    clients = {"evaluator": "digits-eval", "goal": 2}
    driver = Driver(make_job(spec=make_spec(evaluation={"clients": clients}))).start(2)
    driver.play_round()
    driver.check_in("c0", "c1")
    return driver


PHASES: tuple[Callable[[], Driver], ...] = (
    drafted,
    selecting,
    collecting,
    committing,
    backing_off,
    paused,
    paused_while_committing,
    completed,
    failed,
    cancelled,
    evaluating,
)
OPEN = (selecting, collecting, committing, evaluating)


# --- pause ---


@pytest.mark.parametrize("phase", [selecting, collecting, evaluating])
def test_a_pause_ends_the_attempt_and_resuming_opens_another(phase: Callable[[], Driver]) -> None:
    driver = phase()
    key, working = driver.key, [client_id for client_id, a in driver.attempt.assignments.items() if a.is_busy]
    proposal = driver.do(OperatorCommand("j", PAUSE))
    assert aborted(proposal) == dict.fromkeys(working, "JOB_PAUSED")
    assert "Abandon" in names(proposal)
    assert driver.job.status is PAUSED
    assert driver.attempt.reason == driver.job.reason == "the job was paused"
    assert set(driver.states().values()) <= {"DROPPED"}
    assert driver.job.failures == 0
    assert driver.timers == {}
    assert driver.wait(10_000) == []
    assert driver.operate(RESUME).accepted
    assert driver.attempt.phase is AttemptPhase.SELECTING
    # A federated evaluation is not tried again.
    assert driver.key == (("j", 2, 1) if phase is evaluating else ("j", 1, key.number + 1))


def test_a_pause_lets_a_version_become_durable() -> None:
    driver = paused_while_committing()
    assert (driver.job.status, driver.attempt.phase) == (PAUSED, AttemptPhase.COMMITTING)
    proposal = driver.commit()
    assert proposal.verdicts[0].accepted
    assert (driver.job.latest.version, driver.job.round) == (1, 1)
    assert (driver.job.status, driver.job.reason) == (PAUSED, "the job was paused")
    assert driver.attempt.phase is AttemptPhase.COMMITTED
    driver.operate(RESUME)
    assert driver.key == ("j", 2, 1)


def test_resuming_while_the_version_is_made_durable_waits_for_it() -> None:
    driver = paused_while_committing()
    driver.operate(RESUME)
    assert (driver.job.status, driver.attempt.phase) == (RUNNING, AttemptPhase.COMMITTING)
    driver.commit()
    assert driver.key == ("j", 2, 1)


def test_an_aggregation_that_fails_during_a_pause_leaves_the_job_paused() -> None:
    driver = Driver(make_job(spec=make_spec(retry={"max_attempts": 1}))).start(2)
    driver.report("c0", "c1")
    driver.operate(PAUSE)
    driver.do(AggregationFailed(driver.key, "disk full"))
    assert (driver.job.status, driver.job.reason) == (PAUSED, "the job was paused")
    assert driver.attempt.reason == "aggregation failed: disk full"
    driver.operate(RESUME)
    assert driver.key == ("j", 1, 2)


@pytest.mark.parametrize("paused_s", [0.0, 10_000.0])
def test_a_pause_during_back_off_stops_the_clock(paused_s: float) -> None:
    driver = backing_off()
    driver.operate(PAUSE)
    assert driver.wait(paused_s) == []
    driver.operate(RESUME)  # an operator who resumes has fixed the problem
    assert (driver.key, driver.attempt.phase) == (("j", 1, 2), AttemptPhase.SELECTING)
    assert (driver.job.failures, driver.job.resume_at) == (0, None)


# --- cancel ---


@pytest.mark.parametrize("phase", [drafted, *OPEN, backing_off, paused, paused_while_committing])
@pytest.mark.fault("F34")
def test_a_cancellation_ends_everything(phase: Callable[[], Driver]) -> None:
    driver = phase()
    working = [a.client_id for a in driver.attempt.assignments.values() if a.is_busy] if driver.job.attempt else []
    late = driver.aggregated() if driver.job.attempt is not None else None
    version = driver.job.latest.version
    proposal = driver.do(OperatorCommand("j", CANCEL))
    assert aborted(proposal) == dict.fromkeys(working, "JOB_CANCELLED")
    assert (driver.job.status, driver.job.reason) == (CANCELLED, "the job was cancelled")
    assert driver.job.open_attempt is None
    assert driver.timers == {}
    assert driver.coordinator.num_busy == 0
    if late is not None:
        assert driver.verdict(late) == Verdict(Reason.STALE)
    assert driver.job.latest.version == version


# --- mistakes ---


@pytest.mark.parametrize(
    ("phase", "action", "text"),
    [
        (drafted, PAUSE, "cannot pause a job that is DRAFT; it can start or cancel"),
        (drafted, RESUME, "cannot resume a job that is DRAFT; it can start or cancel"),
        (paused, START, "cannot start a job that is PAUSED; it can resume or cancel"),
        (completed, START, "cannot start a job that is COMPLETED; it has ended for good"),
        (completed, CANCEL, "cannot cancel a job that is COMPLETED; it has ended for good"),
        (failed, RESUME, "cannot resume a job that is FAILED; it has ended for good"),
        (cancelled, PAUSE, "cannot pause a job that is CANCELLED; it has ended for good"),
    ],
)
def test_an_operator_is_told_what_is_possible(phase: Callable[[], Driver], action: JobAction, text: str) -> None:
    driver = phase()
    proposal = driver.do(OperatorCommand("j", action))
    assert proposal.verdicts == [Verdict(None, text)]
    assert not proposal.verdicts[0].accepted
    assert proposal.changes == []


@pytest.mark.parametrize(
    ("phase", "action"),
    [(collecting, START), (collecting, RESUME), (paused, PAUSE), (cancelled, CANCEL)],
)
def test_what_is_so_already_is_done_already(phase: Callable[[], Driver], action: JobAction) -> None:
    driver = phase()
    proposal = driver.do(OperatorCommand("j", action))
    assert proposal.verdicts[0].accepted
    assert (proposal.changes, proposal.commands) == ([], [])


def test_a_job_that_does_not_exist() -> None:
    assert Driver().operate(START, "x") == Verdict(Reason.STALE, "there is no job x")


# --- every event in every phase ---


def events(driver: Driver) -> list[Event]:
    key = driver.key if driver.job.attempt is not None else AttemptKey("j", 1, 1)
    old = key._replace(round=0)
    of_client: list[Event] = []
    for name in (key, old):
        for client_id in ("c0", "c1", "c2", "nobody"):
            of_client += [
                UploadStarted(name, client_id),
                UpdateReported(name, client_id, "d", 1.0, {"loss": 1.0}),
                UpdateRejected(name, client_id, Reason.REJECTED_SCHEMA, "text"),
                AssignmentFailed(name, client_id, Reason.TRAINER_ERROR, "text"),
            ]
    return [
        *(OperatorCommand("j", action) for action in JobAction),
        *(RollbackOrdered("j", version) for version in driver.ledger.versions["j"]),
        ServerRestarted("j"),
        TimerFired("j"),
        *of_client,
        *(AggregationFailed(name, "text") for name in (key, old)),
        *([make_aggregated(driver.job)] if driver.job.attempt is not None else []),
    ]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("later_s", [0.0, 1000.0])
def test_every_event_is_answered_in_every_phase(phase: Callable[[], Driver], later_s: float) -> None:
    """The driver checks all invariants after each of them."""
    for index in range(len(events(phase()))):
        driver = phase()
        driver.now += later_s  # a slow server: deadlines have passed, but no timer has fired
        driver.do(events(driver)[index])


@pytest.mark.parametrize("phase", PHASES)
def test_a_lost_batch_of_every_event_changes_nothing(phase: Callable[[], Driver]) -> None:
    driver = phase()
    driver.check_in("w0", "w1")
    for event in events(driver):
        driver.do(event, stored=False)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("final", [False, True])
def test_candidates_are_only_taken_while_the_job_selects(phase: Callable[[], Driver], final: bool) -> None:
    driver = phase()
    for client_ids in ((), ("a",), ("a", "b")):
        transition = dispatch.apply(driver.job, CandidatesDrawn("j", client_ids, final), driver.context)
        if phase is not selecting:
            assert transition.job is driver.job
            assert not transition.verdict.accepted


@pytest.mark.parametrize("phase", PHASES)
def test_only_open_assignments_are_reclaimed(phase: Callable[[], Driver]) -> None:
    driver = phase()
    for client_id in ("c0", "c1", "nobody"):
        key = driver.key if driver.job.attempt is not None else AttemptKey("j", 1, 1)
        found = driver.coordinator.find(key, client_id)
        transition = dispatch.apply(driver.job, AssignmentReclaimed(key, client_id), driver.context)
        assert transition.verdict.accepted is (found is not None and found.is_busy)
