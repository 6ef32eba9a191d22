"""The limit on the rounds that a client takes part in: what counts, and what clients and operators learn of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fedplat.rounds import ParticipationHistory, pacing
from fedplat.rounds.commands import RetryWindow
from fedplat.rounds.demand import EligibleClients
from fedplat.rounds.events import JobAction, OperatorCommand
from fedplat.rounds.privacy_rules import MAX_FUTILE_ATTEMPTS
from fedplat.rounds.states import AttemptPhase, JobStatus, Reason
from support.rounds.driver import Driver, assigned, make_client, make_job
from support.rounds.fleet import Behaviour, Fleet
from support.rounds.pools import key, names, took_part
from support.rounds.private_jobs import private


def limited(most: int, num_clients: int, rounds: int = 50, rest: int = 0, **selection: Any) -> Driver:
    """A running job with a waiting fleet, whose clients take part in `most` rounds at most."""
    kind = "min_separation" if rest else "fixed"
    options = {"min_separation": rest, "min_fraction": 1.0, **selection}
    return private(kind, options, rounds=rounds, privacy={"max_participations": most}).start(num_clients)


def rounds_of(driver: Driver) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for cohort in driver.ledger.cohorts.values():
        for each in cohort.values():
            found.setdefault(each.client_id, set()).add(each.key.round)
    return found


def idle(driver: Driver, fleet: list[str]) -> list[str]:
    waiting, busy = driver.coordinator.room.clients, driver.ledger.busy
    return [name for name in fleet if name not in waiting and name not in busy]


@pytest.mark.parametrize("rest", [0, 1])
def test_no_client_is_drawn_beyond_the_limit(rest: int) -> None:
    driver, fleet = limited(3, 8, rounds=12, rest=rest), [f"c{i}" for i in range(8)]
    while driver.is_running:
        driver.play_round()
        driver.check_in(*idle(driver, fleet))
        driver.wait(200.0 if driver.attempt.phase is AttemptPhase.SELECTING else 0.0)
    counts = Counter({name: len(rounds) for name, rounds in rounds_of(driver).items()})
    assert max(counts.values()) == 3
    assert driver.job.status is (JobStatus.COMPLETED if sum(counts.values()) == 24 else JobStatus.PAUSED)


def test_an_assignment_counts_whatever_came_of_it() -> None:
    driver = limited(1, 2)
    driver.give_up("c0", "c1")
    driver.commit()
    assert driver.job.round == 1
    driver.check_in("c0", "c1", "d0")
    assert driver.attempt.phase is AttemptPhase.SELECTING
    assert set(assigned(driver.check_in("d1"))) == {"d0", "d1"}


def test_attempts_at_one_round_count_once() -> None:
    """Otherwise a fleet that is just large enough could never try again; at most one of the attempts is released."""
    driver = limited(1, 2)
    driver.operate(JobAction.PAUSE)
    driver.operate(JobAction.RESUME)
    assert set(assigned(driver.check_in("c0", "c1"))) == {"c0", "c1"}
    assert driver.key == ("j", 1, 2)
    driver.play_round()
    driver.check_in("c0", "c1")
    assert driver.attempt.phase is AttemptPhase.SELECTING
    assert driver.coordinator.room.num_spent("j") == 2


def test_a_client_that_was_only_in_an_abandoned_attempt_is_counted_too() -> None:
    """Such a client could be left out; but counting too much only costs utility, never the guarantee."""
    driver = limited(1, 2)
    driver.operate(JobAction.PAUSE)
    driver.check_in("d0", "d1")
    driver.operate(JobAction.RESUME)
    assert set(driver.attempt.assignments) == {"d0", "d1"}
    driver.play_round()
    assert assigned(driver.check_in("c0", "c1")) == []
    assert driver.coordinator.room.num_spent("j") == 2


def test_a_restart_forgets_no_participation() -> None:
    driver = limited(2, 2, rounds=9)
    driver.play_round()
    driver.check_in("d0", "d1")  # c0 and c1 have used one of two rounds
    driver.play_round()
    for number in range(3):
        driver.check_in(f"e{number}", f"f{number}")
        driver.play_round()
    driver.crash()
    assert set(assigned(driver.check_in("c0", "c1"))) == {"c0", "c1"}
    driver.play_round()
    driver.crash()
    assert assigned(driver.check_in("c0", "c1")) == []
    assert set(assigned(driver.check_in("d0", "d1"))) == {"d0", "d1"}


def test_a_lost_batch_counts_for_no_client() -> None:
    driver = private("fixed", rounds=3, privacy={"max_participations": 1})
    driver.operate(JobAction.START)
    driver.do(make_client("c0"), make_client("c1"), stored=False)
    assert set(assigned(driver.check_in("c0", "c1"))) == {"c0", "c1"}


def test_the_refusal_gives_the_limit_as_its_reason() -> None:
    driver = limited(1, 2, rounds=3)
    driver.play_round()
    refusal = driver.leave_after_check_in("c0")
    assert (refusal.reason, refusal.retry) == (Reason.LIMIT_REACHED, pacing.idle_window(0))
    assert driver.leave_after_check_in("new").reason is Reason.NOT_SELECTED


def test_a_client_with_other_work_to_wait_for_is_told_to_wait() -> None:
    plain = make_job("plain")
    driver = limited(1, 2, rounds=3)
    spec = driver.job.spec
    both = Driver(make_job("j", spec), plain)
    both.check_in("c0", "c1")
    both.operate(JobAction.START)
    both.finish("j")
    assert both.leave_after_check_in("c0").reason is Reason.LIMIT_REACHED
    both.operate(JobAction.START, "plain")
    assert both.leave_after_check_in("c0").reason is Reason.NOT_SELECTED


def test_an_attempt_that_finds_too_few_gives_a_reason_and_after_some_the_job_is_paused() -> None:
    driver = limited(1, 2, rounds=3)
    driver.play_round()
    driver.check_in("c0", "c1", "d0")
    driver.wait(60.0)
    assert driver.attempt.phase is AttemptPhase.ABANDONED
    assert driver.is_running
    assert driver.job.reason == (
        "round 2 attempt 1 was abandoned: 1 of at least 2 needed clients were available for selection; "
        "2 more took part in as many rounds as they may (privacy.max_participations = 1); retrying"
    )
    driver.wait(1000.0)
    assert driver.job.status is JobStatus.PAUSED
    assert driver.key.number == MAX_FUTILE_ATTEMPTS
    assert driver.job.reason == (
        "round 2 cannot have the 2 clients that it needs: 2 of the waiting clients took part in as many rounds as they "
        "may (privacy.max_participations = 1), 0 rest, and 1 are left; resume the job when there are new clients, or "
        "cancel it: the last version stays available"
    )
    assert driver.timers == {}
    driver.check_in("d1")
    assert driver.operate(JobAction.RESUME).accepted
    assert set(driver.attempt.assignments) == {"d0", "d1"}


def test_a_job_continues_to_try_while_others_may_come() -> None:
    """Too few clients would be there even without the limit, for example at night."""
    driver = limited(1, 2, rounds=3)
    driver.play_round()
    driver.check_in("c0")
    driver.wait(3000.0)
    assert driver.is_running
    assert driver.job.failures > MAX_FUTILE_ATTEMPTS


def test_in_a_pool_they_stand_apart_from_those_that_rest() -> None:
    memory = ParticipationHistory(min_separation=1, max_participations=2)
    for name, rounds in (("a", (1, 3)), ("b", (3,)), ("c", (1,)), ("d", (1, 2))):
        for round_ in rounds:
            memory.record(took_part(name, round_))
    pool = EligibleClients(lambda _: True, memory, key(3, 2))
    for name in "abcd":
        pool.enter(make_client(name))
    # All clients of round 3's first attempt may try again; d used up its limit in round 2.
    assert (names(pool), pool.num_resting, pool.num_spent) == ({"a", "b", "c"}, 0, 1)
    pool.advance_to(key(4))
    assert (names(pool), pool.num_resting, pool.num_spent) == ({"c"}, 1, 2)
    pool.advance_to(key(4, 2))
    assert (names(pool), pool.num_resting, pool.num_spent) == ({"c"}, 1, 2)
    pool.leave("a")
    pool.advance_to(key(5))
    assert (names(pool), pool.num_resting, pool.num_spent) == ({"b", "c"}, 0, 1)
    pool.enter(make_client("a"))
    pool.advance_to(key(50))
    assert (names(pool), pool.num_resting, pool.num_spent) == ({"b", "c"}, 0, 2)


def test_no_round_looks_again_at_those_who_have_had_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, asked = ParticipationHistory(max_participations=1), list[str]()
    for i in range(1000):
        memory.record(took_part(f"c{i}", 1))
    pool = EligibleClients(lambda _: True, memory, key(2))
    for i in range(1001):
        pool.enter(make_client(f"c{i}"))
    assert (len(pool), pool.num_spent) == (1, 1000)
    rests = memory.rounds_to_rest

    def counted(client_id: str, round_: int, attempt: int = 0) -> int:
        asked.append(client_id)
        return rests(client_id, round_, attempt)

    monkeypatch.setattr(memory, "rounds_to_rest", counted)
    for round_ in range(2, 50):
        for number in (1, 2):
            pool.advance_to(key(round_, number))
    assert set(asked) <= {"c1000"}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_bad_fleet_and_a_bad_database_change_nothing_of_it(seed: int) -> None:
    """The driver's ledger checks the limit and the separation of every stored assignment."""
    spec = limited(4, 0, rounds=8, rest=1, min_fraction=0.5).job.spec
    bad = Behaviour(fails=0.1, vanishes=0.15, loses_replies=0.1)
    fleet = Fleet([make_job("j", spec)], {f"c{i}": bad for i in range(8)}, seed, lost=0.05)
    fleet.driver.do(OperatorCommand("j", JobAction.START))
    while fleet.driver.is_running and fleet.driver.now < 20_000:
        fleet.run(fleet.driver.now + 500.0)
    counts = [len(rounds) for rounds in rounds_of(fleet.driver).values()]
    assert fleet.driver.job.round >= 4
    assert max(counts) <= 4


# --- what a client learns of the others ---


def hidden(rate: float, num_clients: int = 40) -> Driver:
    selection = {"sampling": {"policy": "poisson", "rate": rate}, "wait_for": num_clients}
    return private("poisson", selection, rounds=3).start(num_clients)


def left_over(driver: Driver) -> str:
    return next(iter(driver.coordinator.room.clients))


@pytest.mark.parametrize("num_more", [0, 300])
def test_who_waits_learns_nothing_of_a_sample_that_the_promise_rests_on(num_more: int) -> None:
    """The refusal is the same for small and large samples, for clients at work or gone, during a round and after it."""
    heard: set[Any] = set()
    for rate in (0.05, 0.5, 0.95):
        driver = hidden(rate)
        driver.check_in(*(f"d{i}" for i in range(num_more)))
        refusals = [driver.leave(left_over(driver))]
        drawn = list(driver.attempt.assignments)
        assert drawn
        driver.report(*drawn[::2])
        refusals.append(driver.leave_after_check_in("late"))
        driver.wait(200.0)
        refusals.append(driver.leave_after_check_in("late"))
        driver.commit()
        refusals.append(driver.leave_after_check_in("late"))
        heard |= {(refusal.reason, refusal.retry) for refusal in refusals}
    assert len(heard) == 1
    ((reason, window),) = heard
    assert reason is Reason.NOT_SELECTED
    assert isinstance(window, RetryWindow)


def test_no_client_is_sent_away_by_a_draw() -> None:
    """A client that was not drawn gets no answer, and waits as long as it would have otherwise."""
    driver = hidden(0.5)
    waiting = set(driver.coordinator.room.clients)
    assert waiting == {f"c{i}" for i in range(40)} - set(driver.attempt.assignments)
    proposals = driver.wait(200.0)
    assert not [command for proposal in proposals for command in proposal.commands if hasattr(command, "retry")]
    assert set(driver.coordinator.room.clients) == waiting


def test_who_asks_when_such_a_job_is_over_learns_the_size_of_the_fleet_roughly_at_most() -> None:
    heard = set[RetryWindow]()
    for rate in (0.05, 0.5):
        driver = hidden(rate, 120)
        driver.wait(200.0)
        driver.commit()
        driver.check_in(*(f"d{i}" for i in range(7)))
        driver.operate(JobAction.PAUSE)
        assert driver.coordinator.room.num_waiting("demo") > 64
        heard.add(driver.leave(left_over(driver)).retry)
    assert len(heard) == 1
