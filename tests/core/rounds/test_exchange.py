"""The rounds of decentralised jobs in the coordinator: how they end, and what pauses, crashes and silent silos do."""

from __future__ import annotations

import pytest

from fedplat.gossip import steps
from fedplat.gossip.messages import KeyOffered, RingBroken, RingCompleted
from fedplat.rounds.events import ClientRevoked, JobAction, SilosLost
from fedplat.rounds.states import AttemptPhase, JobStatus, Reason
from support.rounds.driver import aborted, assigned, make_client
from support.rounds.silos import Silos, silo


def test_silos_announce_exchange_mix_and_export_the_mean_by_its_digest() -> None:
    silos = Silos(rounds=2).start()
    driver = silos.driver
    assert driver.counts() == {"TRAINING": 3}
    assert driver.attempt.phase is AttemptPhase.COLLECTING
    silos.announce("c0", "c1", loss=2.0)
    assert driver.counts() == {"ADVERTISED": 2, "TRAINING": 1}
    silos.announce("c2", loss=5.0)
    assert driver.attempt.phase is AttemptPhase.EXCHANGING
    silos.play()
    first = driver.ledger.attempts[driver.attempt.key._replace(round=1)]
    assert first.phase is AttemptPhase.COMMITTED
    assert first.metrics == {
        "loss": 3.0,
        "silos": 3.0,
        "edges": 3.0,
        "confirmed_edges": 3.0,
        "relative_distance": pytest.approx(0.01 / 3**0.5 / 2),
    }
    assert driver.job.round == 1
    assert driver.key.round == 2
    silos.play_round()
    assert driver.job.status is JobStatus.COMPLETED
    assert driver.job.round == 2
    latest = driver.job.latest
    assert (latest.version, latest.digest, latest.num_updates, latest.is_held_by_clients) == (1, "mean", 3, True)


def test_a_ring_job_adopts_a_mean_in_each_round() -> None:
    silos = Silos(rounds=3, selection={"min_fraction": 1.0}, mode={"exchange": "ring"}).start()
    for number in (1, 2, 3):
        assert silos.driver.key.round == number
        silos.play_round()
    assert silos.driver.job.status is JobStatus.COMPLETED
    assert {each.adopted_round for each in silos.done.values()} == {3}
    assert silos.driver.job.round == 3


def test_a_silo_that_is_left_out_of_a_ring_is_named_with_the_reason() -> None:
    silos = Silos(goal=4, rounds=2, selection={"min_fraction": 0.7}, mode={"exchange": "ring"}).start()
    silos.announce("c0", "c1", "c2", "c3")
    key = KeyOffered(silo="c3", round=1, attempt=1, key=bytes(range(32)), largest=1e30)
    silos.report("c3", key)
    silos.play("c0", "c1", "c2")
    driver = silos.driver
    first = driver.ledger.attempts[driver.attempt.key._replace(round=1)]
    assert first.phase is AttemptPhase.COMMITTED
    cohort = driver.ledger.cohorts[first.key]
    left = cohort["c3"]
    assert left.text.startswith("it is not in the mean: the largest number of its model is 1e+30")
    assert (left.weight, cohort["c0"].weight) == (0.0, 1.0)
    assert (first.metrics["bound"], first.metrics["left_out"]) == (1.0, 1.0)


def test_late_silos_are_told_to_stop_and_the_others_continue() -> None:
    silos = Silos(goal=4, selection={"min_fraction": 0.5}).start()
    driver = silos.driver
    silos.announce("c0", "c1", "c2")
    (fired,) = driver.wait(100.0)
    assert aborted(fired) == {"c3": "TRAIN_TIMEOUT"}
    assert driver.states()["c3"] == "LATE"
    assert driver.attempt.phase is AttemptPhase.EXCHANGING
    silos.play("c0", "c1", "c2")
    assert driver.key.round == 2
    assert driver.ledger.attempts[driver.key._replace(round=1)].phase is AttemptPhase.COMMITTED
    assert assigned(silos.check_in("c3")) == ["c3"]


def test_too_few_models_are_waited_for_again() -> None:
    silos = Silos(selection={"min_fraction": 1.0}).start()
    driver = silos.driver
    silos.announce("c0", "c1")
    driver.wait(100.0)
    assert driver.attempt.phase is AttemptPhase.COLLECTING
    assert driver.job.reason == "2 silos announced a model for round 1; expected 3"
    assert driver.timers["j"] == 200.0
    assert driver.states() == {"c0": "ADVERTISED", "c1": "ADVERTISED", "c2": "TRAINING"}
    silos.announce("c2")
    silos.play()
    assert (driver.job.round, driver.job.reason) == (1, "")


@pytest.mark.parametrize("cause", ["silent", "revoked", "failed"])
def test_silos_that_are_gone_are_not_waited_for_until_they_return(cause: str) -> None:
    silos = Silos(goal=3, rounds=3).start()
    driver = silos.driver
    silos.play_round()
    silos.check_in("c0", "c1", "c2")
    if cause == "silent":
        stopped = driver.do(SilosLost("j", ("c2",)))
        assert aborted(stopped) == {"c2": "UNREACHABLE"}
    elif cause == "revoked":
        driver.do(ClientRevoked("c2"))
    else:
        driver.give_up("c2")
    assert silos.state.away == {"c2"}
    silos.announce("c0", "c1")
    silos.play("c0", "c1")
    assert driver.key.round == 3
    assert silos.state.consensus.bound < 1.0
    silos.check_in("c2")
    assert silos.instruction("c2") == steps.Wait()
    assert driver.states() == {"c2": "TRAINING"}
    silos.announce("c2")
    assert silos.state.away == frozenset()


def test_a_silo_that_never_came_back_from_a_round_is_lost_without_an_assignment() -> None:
    silos = Silos(goal=3, rounds=3).start()
    silos.play_round()
    silos.check_in("c0", "c1")
    silos.announce("c0", "c1")
    assert silos.driver.attempt.phase is AttemptPhase.COLLECTING
    silos.driver.do(SilosLost("j", ("c2",)))
    assert silos.driver.attempt.phase is AttemptPhase.EXCHANGING


def test_a_row_that_was_missed_is_sent_again_in_the_next_round() -> None:
    silos = Silos(rounds=3).start()
    silos.announce("c0", "c1", "c2")
    silos.play("c0", "c1")
    assert isinstance(silos.follow("c2"), steps.FetchModels)
    assert silos.driver.key.round == 2
    silos.check_in("c2")  # it was killed before it had its row
    found = silos.instruction("c2")
    assert isinstance(found, steps.MixModels)
    assert found.row.round == 1
    silos.announce("c2")
    assert "c2" not in silos.state.announced
    silos.follow("c2")
    silos.announce("c2")
    assert "c2" in silos.state.announced


@pytest.mark.parametrize("phase", ["COLLECTING", "EXCHANGING", "REDUCING"])
def test_a_paused_job_continues_its_round(phase: str) -> None:
    silos = Silos(rounds=1).start()
    driver = silos.driver
    if phase != "COLLECTING":
        silos.announce("c0", "c1", "c2")
    if phase == "REDUCING":
        for name in silos.names:
            silos.follow(name)
    assert driver.attempt.phase == phase
    driver.operate(JobAction.PAUSE)
    assert (driver.job.status, driver.attempt.phase) == (JobStatus.PAUSED, AttemptPhase.ABANDONED)
    driver.wait(1000.0)
    driver.operate(JobAction.RESUME)
    # The rows of round 1 are committed before the ring: its models must not be mixed again.
    assert driver.key[1:] == ((2, 1) if phase == "REDUCING" else (1, 2))
    silos.check_in(*silos.names)
    silos.play()
    silos.announce("c0", "c1", "c2")
    silos.play()
    assert driver.job.status is JobStatus.COMPLETED


def test_a_mean_from_before_a_pause_stands() -> None:
    silos = Silos(rounds=1, mode={"exchange": "ring"}, selection={"min_fraction": 1.0}).start()
    driver = silos.driver
    silos.announce(*silos.names)
    for name in silos.names:
        silos.follow(name)
    silos.follow("c1")  # these two have the mean
    silos.follow("c2")
    driver.operate(JobAction.PAUSE)
    driver.operate(JobAction.RESUME)
    silos.check_in(*silos.names)
    silos.announce(*silos.names)
    assert silos.instruction("c1") == steps.SendKey(2)
    silos.report("c1", RingCompleted("c1", 1, 1, "mean"))
    assert driver.job.status is JobStatus.RUNNING
    silos.report("c2", RingCompleted("c2", 1, 1, "mean"))
    assert driver.job.status is JobStatus.COMPLETED
    assert driver.job.latest.digest == "mean"


@pytest.mark.parametrize("phase", ["COLLECTING", "EXCHANGING", "REDUCING"])
def test_a_restarted_server_continues_in_the_same_phase_with_the_whole_time(phase: str) -> None:
    silos = Silos(rounds=1).start()
    driver = silos.driver
    if phase != "COLLECTING":
        silos.announce("c0", "c1", "c2")
        silos.follow("c0")
    if phase == "REDUCING":
        for name in silos.names:
            silos.follow(name)
    before = silos.state
    driver.crash(down_s=1000.0)
    assert silos.state == before
    assert driver.attempt.phase == phase
    assert driver.timers["j"] == driver.now + (100.0 if phase == "COLLECTING" else 30.0)
    tokens = {each.client_id: each.token_hash for each in driver.attempt.busy}
    assert assigned(silos.check_in("c1")) == ["c1"]
    assert driver.attempt.assignments["c1"].token_hash != tokens["c1"]
    if phase == "COLLECTING":
        silos.announce("c0", "c1", "c2")
    silos.play()
    assert driver.job.status is JobStatus.COMPLETED


def test_silos_that_do_not_agree_end_the_job_with_the_reason() -> None:
    silos = Silos(rounds=1, mode={"tolerance": 0.001, "settle_rounds": 1}).start()
    silos.play_round()
    assert silos.driver.key.round == 2
    silos.play_round()
    assert silos.driver.job.status is JobStatus.FAILED
    assert silos.driver.job.reason.startswith("the silos do not agree after 1 round without training")
    assert silos.driver.job.reason.endswith("; expected more settle_rounds or a topology with more edges")
    assert silos.driver.attempt.phase is AttemptPhase.ABANDONED
    assert silos.driver.job.latest.version == 0


def test_only_silos_whose_owners_allow_exchanges_take_part() -> None:
    silos = Silos()
    silos.driver.do(make_client("plain"))
    silos.start()
    assert "plain" not in silos.driver.attempt.assignments
    assert silos.driver.leave("plain").reason is Reason.NOT_ELIGIBLE


def test_no_more_silos_than_the_goal_take_part_and_one_may_replace_another() -> None:
    silos = Silos(goal=3).start()
    silos.driver.do(silo("c9"))
    assert "c9" not in silos.driver.attempt.assignments
    assert assigned(silos.driver.give_up("c0")) == ["c9"]


def test_a_silo_at_a_broken_link_is_not_excluded_before_it_breaks_with_most_others() -> None:
    silos = Silos(goal=4, rounds=1, selection={"min_fraction": 0.7}, mode={"exchange": "ring"}).start()
    silos.announce(*silos.names)
    excluded: list[frozenset[str]] = []
    for _ in range(3):
        for name in silos.names:
            silos.follow(name)
        ring = silos.state.ring
        if ring is None:
            break
        names = [member.silo for member in ring.members]
        bad = names.index("c3") if "c3" in names else 0
        after = names[(bad + 1) % len(names)]
        for name in names:
            number, attempt = silos.state.round, ring.attempt
            if name == "c3":
                continue  # it sends nothing, and reports nothing
            step = 0 if name == after else 1
            sender = "c3" if name == after else names[names.index(name) - 1]
            silos.report(name, RingBroken(name, number, attempt, sender, step))
        silos.driver.wait(30.0)
        excluded.append(silos.state.excluded)
    assert excluded[:2] == [frozenset(), frozenset({"c3"})]
