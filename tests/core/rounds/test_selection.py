"""Which clients are selected: samples, labels, several jobs, refusals; and when refused clients come back."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from fedplat.job import Deadlines, Retry
from fedplat.rounds import pacing
from fedplat.rounds.commands import Assign, Refuse, RetryWindow
from fedplat.rounds.events import ClientLeft, JobAction
from fedplat.rounds.states import AttemptKind, AttemptPhase, JobStatus, Reason
from support.rounds.buffers import buffered
from support.rounds.driver import EVALUATOR, Driver, assigned, commands_of, make_client, make_job, make_spec


@pytest.mark.slow
def test_an_attempt_draws_uniformly_from_those_who_wait() -> None:
    spec = make_spec(3, rounds=1000, selection={"wait_for": 12, "min_fraction": 1.0})
    driver = Driver(make_job(spec=spec), seed=2).start()
    chosen: Counter[str] = Counter()
    everybody = [f"c{i}" for i in range(12)]
    for _ in range(400):
        idle = [c for c in everybody if c not in driver.coordinator.room.clients]
        driver.check_in(*idle)
        assert len(driver.states()) == 3
        chosen.update(list(driver.states()))
        driver.play_round()
    # Each is in a draw with probability 1/4; draws of 3 without replacement vary less than multinomial ones.
    assert set(chosen) == set(everybody)
    assert stats.chisquare(list(chosen.values())).pvalue > 0.01


def test_selection_waits_for_the_pool_and_takes_no_more_than_the_target() -> None:
    driver = Driver(make_job(spec=make_spec(2, selection={"wait_for": 4}))).start(3)
    assert driver.attempt.phase is AttemptPhase.SELECTING
    assert len(assigned(driver.check_in("c3"))) == 2
    assert len(driver.coordinator.room.clients) == 2


def test_when_the_time_is_over_selection_takes_who_is_there() -> None:
    driver = Driver(make_job(spec=make_spec(10))).start(5)  # half of ten are enough
    driver.wait(59.9)
    assert driver.attempt.phase is AttemptPhase.SELECTING
    (proposal,) = driver.wait(0.1)
    assert len(assigned(proposal)) == 5
    assert driver.attempt.phase is AttemptPhase.COLLECTING


@pytest.mark.fault("F33")
def test_too_few_go_on_waiting_and_are_drawn_by_the_next_attempt() -> None:
    driver = Driver(make_job(spec=make_spec(10))).start(4)
    driver.wait(60)
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert driver.attempt.reason == "4 of at least 5 needed clients were available for selection"
    assert len(driver.coordinator.room.clients) == 4
    driver.check_in("c4")
    driver.wait(1)
    assert driver.key.number == 2
    driver.wait(60)
    assert len(driver.states()) == 5


def test_only_clients_with_the_labels_and_the_trainer_are_drawn() -> None:
    driver = Driver(make_job(spec=make_spec(2, selection={"where": "region == 'eu'"}))).start()
    eu = {"region": "eu"}
    driver.do(
        make_client("us", labels={"region": "us"}),
        make_client("unlabelled"),
        make_client("no-trainer", labels=eu, trainers=frozenset({"other"})),
        make_client("elsewhere", labels=eu, population="other"),
        make_client("one", labels=eu),
    )
    assert sorted(assigned(driver.do(make_client("two", labels=eu)))) == ["one", "two"]


def test_an_attempt_without_clients_states_what_the_waiting_ones_lack() -> None:
    driver = Driver(make_job(spec=make_spec(2, selection={"where": "region == 'eu'"}))).start()
    eu = {"region": "eu"}
    for name in ("a", "b"):
        driver.do(make_client(name, labels=eu, trainers=frozenset({"linear", name})))
    driver.do(make_client("us", labels={"region": "us"}), make_client("elsewhere", population="other"))
    driver.wait(60)
    assert driver.attempt.reason == (
        "0 of at least 1 needed clients were available for selection; 2 more do not have the trainer digits, but a, b, "
        "linear; 1 more do not satisfy selection.where"
    )


def test_only_clients_that_know_the_codec_are_drawn_to_train() -> None:
    spec = make_spec(
        2,
        compression={"uplink": {"codec": "bf16"}},
        evaluation={"clients": {"evaluator": EVALUATOR, "goal": 1}},
    )
    driver = Driver(make_job(spec=spec)).start()
    old, knows = make_client("old", codecs=frozenset({"other"})), frozenset({"bf16", "other"})
    driver.do(old, make_client("none"), make_client("one", codecs=knows))
    assert sorted(assigned(driver.do(make_client("two", codecs=knows)))) == ["one", "two"]
    driver.finish("j")
    assert driver.attempt.kind is AttemptKind.EVALUATE  # evaluations need no encoding
    assert set(driver.attempt.assignments) <= {"old", "none"}


def test_busy_clients_are_never_drawn() -> None:
    driver = Driver(make_job("a", make_spec(2)), make_job("b", make_spec(1)))
    for job_id in ("a", "b"):
        driver.operate(JobAction.START, job_id)
    driver.check_in("c0", "c1")
    for _ in range(3):
        assert {c.key.job_id for c in commands_of(driver.check_in("c0", "c1"), Assign)} == {"a"}


def test_two_jobs_share_a_fleet_fairly() -> None:
    spec = make_spec(2, rounds=1000)
    driver = Driver(make_job("a", spec), make_job("b", spec), seed=3)
    for job_id in ("a", "b"):
        driver.operate(JobAction.START, job_id)
    everybody = [f"c{i}" for i in range(3)]  # enough for one of them at a time
    for _ in range(60):
        room = driver.coordinator.room.clients
        driver.check_in(*(c for c in everybody if c not in room and driver.coordinator.assignment_of(c) is None))
        busy = [job for job in driver.coordinator.jobs.values() if job.attempt and job.attempt.num_busy]
        assert len(busy) == 1
        driver.finish(busy[0].job_id)
    rounds = [job.round for job in driver.coordinator.jobs.values()]
    assert rounds == [30, 30]


# --- refusals ---


def test_a_client_without_the_codec_is_not_eligible() -> None:
    driver = Driver(make_job(spec=make_spec(2, compression={"uplink": {"codec": "bf16"}}))).start()
    for codecs, reason in (("bf16", Reason.NOT_SELECTED), ("other", Reason.NOT_ELIGIBLE)):
        driver.do(make_client("a", codecs=frozenset({codecs})))
        assert driver.leave("a").reason is reason


def test_why_a_client_gets_nothing() -> None:
    driver = Driver(make_job(spec=make_spec(2, selection={"where": "region == 'eu'"})))
    eu = {"region": "eu"}

    def reason(client_id: str, **fields: object) -> Reason:
        driver.do(make_client(client_id, **fields))
        return driver.leave(client_id).reason

    assert reason("a", labels=eu) is Reason.NO_WORK  # the job is a draft
    driver.operate(JobAction.START)
    assert reason("a", labels=eu) is Reason.NOT_SELECTED
    assert reason("b", labels={"region": "us"}) is Reason.NOT_ELIGIBLE
    assert reason("c", labels=eu, trainers=frozenset[str]()) is Reason.NOT_ELIGIBLE
    assert reason("c", labels=eu, codecs=frozenset({"bf16"})) is Reason.NOT_SELECTED
    assert reason("d", labels=eu, population="other") is Reason.NO_WORK
    driver.operate(JobAction.PAUSE)
    assert reason("a", labels=eu) is Reason.NO_WORK


def test_an_evaluator_without_a_trainer_is_eligible() -> None:
    clients = {"evaluator": "digits-eval", "goal": 1}
    driver = Driver(make_job(spec=make_spec(evaluation={"clients": clients}))).start()
    driver.do(make_client("e", trainers=frozenset[str]()))
    assert driver.leave("e").reason is Reason.NOT_SELECTED


def test_a_small_population_is_not_steered_by_a_large_one() -> None:
    """Four clients that a job needs must not be sent away for an hour because another population is large."""
    driver = Driver(
        make_job("small", make_spec(4, population="small")),
        make_job("large", make_spec(4, selection={"over_selection": 1.0})),
    )
    for job_id in ("small", "large"):
        driver.operate(JobAction.START, job_id)
    driver.check_in(*(f"c{i}" for i in range(800)))
    driver.do(make_client("s", population="small"))
    left = next(iter(driver.coordinator.room.clients))
    assert driver.leave("s").retry == pacing.busy_window(1, 4, 100.0)
    assert driver.leave(left).retry == pacing.busy_window(799, 4, 100.0)


def test_a_job_that_waits_for_a_pool_sends_no_client_away_for_long() -> None:
    """Otherwise some clients are always away while the others wait, and the pool is never complete."""
    driver = Driver(make_job(spec=make_spec(4, selection={"wait_for": 900}))).start(800)
    assert driver.leave("c0").retry == pacing.busy_window(799, 900, 100.0) == RetryWindow(0.0, 0.5)


def test_working_clients_count_as_part_of_the_fleet() -> None:
    driver = Driver(make_job(spec=make_spec(40, selection={"over_selection": 1.0}))).start(140)
    assert driver.coordinator.num_busy == 40
    left = next(iter(driver.coordinator.room.clients))
    assert driver.leave(left).retry == pacing.busy_window(99 + 40, 40, 100.0)


# --- pacing ---


def test_a_small_fleet_gathers() -> None:
    window = pacing.busy_window(num_clients=30, num_needed=10, round_s=600.0)
    assert (window.min_s, window.max_s) == (0.0, 0.5)


@pytest.mark.parametrize("num_clients", [31, 1000, 1500])
@pytest.mark.fault("F32")
def test_of_a_large_fleet_three_come_for_each_that_a_round_needs(num_clients: int) -> None:
    needed, round_s = 10, 60.0
    window = pacing.busy_window(num_clients, needed, round_s)
    mean_s = (window.min_s + window.max_s) / 2  # each client comes once in this time
    assert num_clients * round_s / mean_s == pytest.approx(3 * needed)
    assert window.min_s == pytest.approx(mean_s / 2)


def test_no_client_is_sent_away_for_more_than_an_hour_and_a_half() -> None:
    window = pacing.busy_window(10_000_000, 10, 600.0)
    assert (window.min_s, window.max_s) == (1800.0, 5400.0)
    assert pacing.idle_window(10_000_000).max_s <= 3602


@pytest.mark.fault("F32")
def test_idle_clients_ask_at_most_fifty_times_a_second() -> None:
    for num_clients in (1, 100, 100_000):
        window = pacing.idle_window(num_clients)
        assert window.min_s > 0
        assert num_clients / (window.max_s - window.min_s) <= 50
        window = pacing.overload_window(num_clients)
        assert window.min_s == 10
        assert num_clients / (window.max_s - window.min_s) == pytest.approx(50)


def test_back_off_is_jittered_over_the_upper_half() -> None:
    rng, retry = np.random.default_rng(4), Retry(base_s=1.0, max_s=300.0)
    for failures in (0, 1, 2, 5, 9, 10, 100, 10**6):
        ceiling = min(2.0 ** max(failures - 1, 0), 300.0) if failures < 50 else 300.0
        waits = np.array([pacing.backoff_s(retry, failures, rng) for _ in range(500)])
        assert waits.min() >= ceiling / 2
        assert waits.max() <= ceiling
        assert waits.mean() == pytest.approx(0.75 * ceiling, rel=0.05)


def test_a_fixed_deadline_learns_nothing() -> None:
    assert pacing.training_timeout_s(Deadlines(training_s=7.0), [1.0] * 100) == 7.0


def test_a_completed_job_sends_its_clients_to_rest() -> None:
    driver = Driver(make_job(spec=make_spec(rounds=1))).start(2)
    driver.play_round()
    assert driver.job.status is JobStatus.COMPLETED
    driver.check_in("c0", "c1")
    proposal = driver.do(ClientLeft("c0"), ClientLeft("c1"))
    assert [(c.client_id, c.reason) for c in commands_of(proposal, Refuse)] == [
        ("c0", Reason.NO_WORK),
        ("c1", Reason.NO_WORK),
    ]


def test_an_attempt_counts_the_clients_of_its_draw() -> None:
    driver = Driver(make_job(spec=make_spec(2, selection={"where": "region == 'eu'", "wait_for": 3})))
    others = [make_client(f"us{n}", labels={"region": "us"}) for n in range(4)]
    elsewhere = [make_client("far", population="other", labels={"region": "eu"})]
    driver.start()
    driver.do(*others, *elsewhere)
    assert (driver.attempt.num_checked_in, driver.attempt.num_eligible) == (0, 0)
    driver.do(*(make_client(f"eu{n}", labels={"region": "eu"}) for n in range(3)))
    assert len(driver.attempt.assignments) == 2
    assert (driver.attempt.num_checked_in, driver.attempt.num_eligible) == (7, 3)


def test_several_draws_of_an_attempt_count_the_clients_that_it_has() -> None:
    driver = buffered(1, concurrency=3, goal=2)
    assert (driver.attempt.num_checked_in, driver.attempt.num_eligible) == (1, 1)
    driver.check_in("c1")
    driver.check_in("c2")
    assert (driver.attempt.num_checked_in, driver.attempt.num_eligible) == (3, 3)
    assert len(driver.attempt.assignments) == 3


def test_an_attempt_without_enough_clients_counts_them_too() -> None:
    driver = Driver(make_job(spec=make_spec(10))).start(4)
    driver.wait(60)
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert (driver.attempt.num_checked_in, driver.attempt.num_eligible) == (4, 4)
