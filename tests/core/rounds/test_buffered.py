"""Jobs with a buffer: clients work all the time, and versions are made of their reports as they arrive."""

from __future__ import annotations

from typing import Any

import pytest

from fedplat.aggregate import Contribution
from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.rounds.commands import Abort, Assign, Commit, Fold
from fedplat.rounds.events import UpdateReported
from fedplat.rounds.states import AttemptPhase, Reason
from support.rounds.buffers import FIRST, SECOND, THIRD, buffered, carried, play, staleness
from support.rounds.driver import Driver, aborted, assigned, commands_of, make_spec, names

# --- who works ---


def test_as_many_work_as_may_and_who_comes_later_waits() -> None:
    driver = buffered(1)
    assert (driver.attempt.phase, driver.states()) == (AttemptPhase.COLLECTING, {"c0": "TRAINING"})
    assert len(assigned(driver.check_in("c1", "c2", "c3"))) == 2
    assert driver.attempt.num_busy == 3
    assert "j" not in driver.coordinator.room.demands
    assert driver.coordinator.room.num_waiting("demo") == 1


def test_a_report_makes_room_for_the_next_client() -> None:
    driver = buffered(4)
    (waiting,) = driver.coordinator.room.clients
    working = next(iter(driver.attempt.assignments))
    proposal = driver.report(working)
    assert names(proposal) == ["Fold", "Assign"]
    assert assigned(proposal) == [waiting]


def test_a_client_takes_part_once_in_a_buffer_and_waits_for_the_next() -> None:
    driver = buffered(3, goal=3)
    driver.report("c0")
    driver.give_up("c1")
    assert assigned(driver.check_in("c0", "c1")) == []
    driver.report("c2")
    driver.check_in("c3")
    driver.report("c3")
    assert sorted(assigned(driver.commit())) == ["c0", "c1"]
    assert driver.key == SECOND


def test_a_failure_or_a_deadline_makes_room_too() -> None:
    driver = buffered(5, concurrency=2, goal=2)
    first, second = driver.attempt.assignments
    assert len(assigned(driver.give_up(first))) == 1
    driver.wait(50.0)
    assert len(driver.attempt.busy) == 2
    proposals = driver.wait(50.0)
    assert driver.states()[second] == "LATE"
    assert driver.reasons()[second] == "TRAIN_TIMEOUT"
    assert [len(assigned(proposal)) for proposal in proposals] == [2]
    assert driver.job.failures == 0


def test_every_assignment_has_a_deadline_of_its_own() -> None:
    driver = buffered(1)
    driver.wait(10.0)
    driver.check_in("c1")
    assert {name: each.deadline_at for name, each in driver.attempt.assignments.items()} == {"c0": 100.0, "c1": 110.0}
    assert driver.timers == {"j": 100.0}


# --- versions ---


def test_a_full_buffer_is_committed_and_working_clients_continue() -> None:
    driver = buffered(4, concurrency=4)
    assert names(driver.report("c0")) == ["Fold"]
    proposal = driver.report("c1")
    assert commands_of(proposal, Commit) == [Commit(FIRST, 0, 2)]
    assert commands_of(proposal, Abort) == []
    assert carried(driver) == {"c2": "TRAINING", "c3": "TRAINING"}
    assert driver.states() == {"c0": "REPORTED", "c1": "REPORTED"}
    driver.check_in("c0", "c1")
    proposal = driver.commit()
    assert [(each.key, each.base_version) for each in commands_of(proposal, Assign)] == [(SECOND, 1), (SECOND, 1)]
    bases = {name: (each.key.round, each.base_version) for name, each in driver.attempt.assignments.items()}
    assert bases == {"c2": (1, 0), "c3": (1, 0), "c0": (2, 1), "c1": (2, 1)}
    assert carried(driver) == {}


def test_a_stale_update_counts_for_less() -> None:
    driver = buffered(5, concurrency=5)
    for _ in range(3):
        play(driver, "c0", "c1")
    assert driver.job.latest.version == 3
    proposal = driver.report("c4", num_examples=8.0, loss=0.5)
    fold = Fold(
        AttemptKey("j", 4, 1), AssignmentId(FIRST, "c4"), "of-c4", Contribution(4.0, 8.0, {"loss": 0.5}, 3, "c4"), 0
    )
    assert commands_of(proposal, Fold) == [fold]
    assert driver.attempt.assignments["c4"].weight == 4.0


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ({}, [1.0, 2**-0.5, 0.5]),
        ({"staleness": "polynomial", "exponent": 1.0}, [1.0, 0.5, 0.25]),
        ({"staleness": "constant"}, [1.0, 1.0, 1.0]),
        ({"staleness": "hinge"}, [1.0, 1.0, 1.0]),
        ({"staleness": "hinge", "slope": 0.5, "grace": 1}, [1.0, 1.0, 0.5]),
    ],
)
def test_what_a_stale_update_counts_for(mode: dict[str, Any], weights: list[float]) -> None:
    spec = make_spec(mode={"kind": "buffered", "concurrency": 1, **mode}, updates={"weighting": "uniform"})
    assert [spec.weight(8.0, tau) for tau in (0, 1, 3)] == weights


def test_the_metrics_of_a_round_are_weighted_as_its_updates() -> None:
    driver = buffered(3)
    driver.report("c0", "c1")
    driver.commit()
    driver.check_in("c0")
    driver.report("c0", loss=1.0)
    driver.report("c2", loss=2.0)
    driver.commit()
    s = 2**-0.5
    assert driver.job.round == 2
    row = [row for row in driver.ledger.history["j"] if row.entity == "attempt" and row.to_state == "COMMITTED"][-1]
    assert row.metrics["loss"] == pytest.approx((1.0 + 2.0 * s) / (1.0 + s))


# --- reports while a version is made ---


def test_a_report_during_the_commit_belongs_to_the_next_buffer() -> None:
    driver = buffered(4, concurrency=4)
    driver.report("c0", "c1")
    proposal = driver.report("c3")
    assert proposal.verdicts[0].accepted
    assert commands_of(proposal, Fold) == []
    assert carried(driver) == {"c2": "TRAINING", "c3": "REPORTED"}
    proposal = driver.commit()
    fold = Fold(
        SECOND, AssignmentId(FIRST, "c3"), "of-c3", Contribution(10.0 * 2**-0.5, 10.0, staleness=1, client_id="c3"), 0
    )
    assert commands_of(proposal, Fold) == [fold]
    assert staleness(driver) == {"c3": 1}
    assert driver.job.latest.num_updates == 2
    assert driver.verdict(UpdateReported(FIRST, "c3", "of-c3", 10.0)).accepted  # it gets its receipt again
    assert driver.verdict(UpdateReported(FIRST, "c3", "other", 10.0)).reason is Reason.REJECTED_CONFLICT


def test_a_buffer_may_be_full_at_once_and_holds_no_more_than_its_size() -> None:
    driver = buffered(7, concurrency=7)
    driver.report("c0", "c1")
    driver.report("c6", "c5", "c4")
    proposal = driver.commit()
    assert names(proposal) == ["Fold", "Fold", "Commit"]
    assert commands_of(proposal, Commit) == [Commit(SECOND, 1, 2)]
    assert list(staleness(driver)) == ["c6", "c5"]
    assert carried(driver) == {"c4": "REPORTED", "c2": "TRAINING", "c3": "TRAINING"}
    driver.commit()
    assert (driver.key, staleness(driver)) == (THIRD, {"c4": 2})


def test_who_reported_during_the_commit_is_not_drawn_before_its_update_is_merged() -> None:
    driver = buffered(4, concurrency=4, goal=3)
    driver.report("c0", "c1", "c2")
    driver.report("c3")
    driver.check_in("c3", "c0")
    assert assigned(driver.commit()) == ["c0"]
    driver.check_in("c1")
    driver.report("c0", "c1")
    assert sorted(assigned(driver.commit())) == ["c3"]


# --- bounded staleness ---


def bounded(**sections: Any) -> Driver:
    """Four clients at work; when two have reported, the others are one version behind."""
    return buffered(4, concurrency=4, mode={"max_staleness": 1}, **sections)


def test_who_is_too_far_behind_is_stopped_at_once() -> None:
    driver = bounded()
    assert aborted(play(driver, "c0", "c1")) == {}
    proposal = play(driver, "c0", "c1")
    assert commands_of(proposal, Abort) == [Abort(FIRST, name, Reason.TOO_STALE) for name in ("c2", "c3")]
    verdict = driver.verdict(UpdateReported(FIRST, "c2", "of-c2", 1.0))
    assert verdict.reason in (Reason.TOO_STALE, Reason.STALE)
    rows = driver.ledger.cohorts[FIRST]
    assert {(str(rows[name].state), rows[name].reason) for name in ("c2", "c3")} == {("LATE", Reason.TOO_STALE)}


def test_an_update_that_waited_too_long_ends_with_a_reason() -> None:
    driver = buffered(5, concurrency=5, mode={"max_staleness": 0})
    driver.report("c0", "c1")
    assert driver.report("c2").verdicts[0].accepted
    proposal = driver.commit()
    assert aborted(proposal) == {"c3": "TOO_STALE", "c4": "TOO_STALE"}
    row = driver.ledger.cohorts[FIRST]["c2"]
    assert (str(row.state), row.reason) == ("DROPPED", Reason.TOO_STALE)
    assert commands_of(proposal, Fold) == []
    assert (driver.key, driver.attempt.num_reported) == (SECOND, 0)
