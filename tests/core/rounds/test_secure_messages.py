"""Messages of secure aggregation that come twice, too early, too late, or with what they must not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from fedplat.rounds import Verdict
from fedplat.rounds.events import AssignmentFailed, JobAction, JobEvent, KeysAdvertised, UpdateReported, UploadStarted
from fedplat.rounds.protocols import secure_phases
from fedplat.rounds.states import AttemptPhase, Reason
from fedplat.secure_aggregation.messages import KeyAdvertisement
from support.rounds.driver import collecting, names
from support.rounds.secure_driver import (
    SecureDriver,
    advertising,
    answer_event,
    confirmation_event,
    keys_event,
    make_keys,
    report_event,
    shares_event,
)

ADVERTISING, SHARING, COLLECTING = AttemptPhase.ADVERTISING, AttemptPhase.SHARING, AttemptPhase.COLLECTING
CONFIRMING, UNMASKING, COMMITTING = AttemptPhase.CONFIRMING, AttemptPhase.UNMASKING, AttemptPhase.COMMITTING
PHASES = [ADVERTISING, SHARING, COLLECTING, CONFIRMING, UNMASKING, COMMITTING]
OPTIONS = {"confirm": True, "threshold": 0.6, "step_s": 20.0}
Make = Callable[..., JobEvent]
STEPS: dict[AttemptPhase, Make] = {
    ADVERTISING: keys_event,
    SHARING: shares_event,
    CONFIRMING: confirmation_event,
    UNMASKING: answer_event,
}
"""The message of each phase."""


def start(**sections: Any) -> SecureDriver:
    return advertising(5, 5, **({"options": OPTIONS} | sections))


def after(step: AttemptPhase) -> list[AttemptPhase]:
    return PHASES[PHASES.index(step) :]


@pytest.mark.parametrize(("step", "now"), [(step, now) for step in STEPS for now in after(step)])
def test_the_same_bytes_again_change_nothing_and_other_bytes_are_refused(step: AttemptPhase, now: AttemptPhase) -> None:
    driver = start().reach(step)
    assert driver.verdict(STEPS[step](driver.key, "c0")).accepted
    driver.reach(now)
    for _ in range(2):
        proposal = driver.do(STEPS[step](driver.key, "c0"))
        assert proposal.verdicts[0].accepted
        assert (proposal.changes, proposal.commands) == ([], [])
    proposal = driver.do(STEPS[step](driver.key, "c0", "other"))
    assert proposal.verdicts[0].reason is Reason.REJECTED_CONFLICT
    assert "the first are kept" in proposal.verdicts[0].text
    assert (proposal.changes, proposal.commands) == ([], [])
    driver.reach(COMMITTING)
    driver.commit()
    assert driver.job.round == 1


@pytest.mark.parametrize(("step", "now"), [(step, now) for step in STEPS for now in PHASES if now not in after(step)])
def test_a_message_of_a_later_step_is_stale(step: AttemptPhase, now: AttemptPhase) -> None:
    driver = start().reach(now)
    proposal = driver.do(STEPS[step](driver.key, "c0"))
    assert proposal.verdicts[0].reason is Reason.STALE
    assert proposal.verdicts[0].text.startswith(f"the attempt is {now}: it takes the ")
    assert (proposal.changes, proposal.commands) == ([], [])


def test_the_same_message_twice_in_one_batch_is_taken_once() -> None:
    driver = start()
    one, two = (keys_event(driver.key, "c0", salt) for salt in ("one", "two"))
    proposal = driver.do(one, two, one)
    assert [verdict.reason for verdict in proposal.verdicts] == [None, Reason.REJECTED_CONFLICT, None]
    assert len(proposal.changes) == 1


@pytest.mark.parametrize("step", STEPS)
def test_messages_of_strangers_and_of_other_attempts_are_stale(step: AttemptPhase) -> None:
    driver = start().reach(step)
    older, other_job = driver.key._replace(number=9), driver.key._replace(job_id="x")
    for key, client_id in ((driver.key, "stranger"), (older, "c0"), (other_job, "c0")):
        proposal = driver.do(STEPS[step](key, client_id))
        assert proposal.verdicts[0].reason is Reason.STALE
        assert proposal.changes == []


@pytest.mark.parametrize("step", STEPS)
def test_a_message_of_a_client_whose_assignment_has_ended_has_its_reason(step: AttemptPhase) -> None:
    driver = start()
    driver.do(AssignmentFailed(driver.key, "c4", Reason.UNSAFE_AGGREGATION, "too few neighbours"))
    driver.reach(step)
    expected = Verdict(Reason.UNSAFE_AGGREGATION, "too few neighbours")
    assert driver.verdict(STEPS[step](driver.key, "c4")) == expected


def test_late_keys_and_late_shares_are_late() -> None:
    driver = start(selection={"min_fraction": 0.4})
    driver.advertise("c0", "c1", "c2", "c3")
    driver.wait(100.0)
    assert driver.verdict(keys_event(driver.key, "c4")).reason is Reason.TRAIN_TIMEOUT
    driver.share("c0", "c1", "c2")
    driver.wait(20.0)
    assert driver.attempt.phase is COLLECTING
    assert driver.verdict(shares_event(driver.key, "c3")).reason is Reason.STEP_TIMEOUT
    assert driver.verdict(shares_event(driver.key, "c4")).reason is Reason.TRAIN_TIMEOUT
    driver.reach(UNMASKING)
    assert driver.survivors() == [(["c0", "c1", "c2"], [])]


@pytest.mark.parametrize(("step", "then"), [(CONFIRMING, UNMASKING), (CONFIRMING, COMMITTING), (UNMASKING, COMMITTING)])
def test_a_survivor_that_confirms_or_answers_late_is_still_one(step: AttemptPhase, then: AttemptPhase) -> None:
    driver = start().reach(step)
    (driver.confirm if step is CONFIRMING else driver.answer)("c0", "c1", "c2")
    if step is CONFIRMING:
        driver.wait(20.0)
    if then is not driver.attempt.phase:
        driver.answer("c0", "c1", "c2")
    driver.wait(1.0)
    assert driver.attempt.phase is then
    proposal = driver.do(STEPS[step](driver.key, "c4"))
    assert proposal.verdicts[0].accepted
    assert proposal.changes == [], "the sets and the answers are fixed"


def test_an_answer_after_the_commit_is_accepted() -> None:
    driver = start().reach(COMMITTING)
    key = driver.key
    driver.operate(JobAction.PAUSE)
    driver.commit()
    assert driver.key == key, "a paused job opens no other attempt"
    assert driver.verdict(answer_event(key, "c0", "again")).accepted
    assert driver.verdict(answer_event(key, "c4")).accepted


def test_a_client_with_a_message_of_an_abandoned_attempt_takes_no_part_in_the_next() -> None:
    driver = start().reach(UNMASKING)
    old = driver.key
    driver.wait(20.0)
    driver.wait(1.0)
    driver.check_in(*(f"c{n}" for n in range(5)))
    assert driver.key.number == old.number + 1
    for make in STEPS.values():
        assert driver.verdict(make(old, "c0")).reason is Reason.STALE
    assert driver.verdict(report_event(old, "c0")).reason is Reason.STALE
    assert driver.verdict(KeysAdvertised(driver.key, "c0", make_keys("c0", driver.key))).accepted
    assert driver.states()["c0"] == "ADVERTISED"


# --- keys ---


def replayed(driver: SecureDriver, **keys: bytes) -> KeysAdvertised:
    """The keys of c1, some of which are those given."""
    own = KeyAdvertisement.from_bytes(make_keys("c1", driver.key))
    return KeysAdvertised(driver.key, "c1", structs.replace(own, **keys).to_bytes())


@pytest.mark.parametrize("field", ["encryption_key", "masking_key"])
@pytest.mark.parametrize("of", ["encryption_key", "masking_key"])
def test_a_key_of_another_client_ends_only_the_assignment_of_who_sends_it_again(field: str, of: str) -> None:
    driver = start()
    driver.advertise("c0")
    first = getattr(KeyAdvertisement.from_bytes(make_keys("c0", driver.key)), of)
    verdict = driver.verdict(replayed(driver, **{field: first}))
    assert verdict.reason is Reason.REJECTED_MESSAGE
    assert "another client of the attempt has sent the same public key" in verdict.text
    assert (driver.states()["c0"], driver.states()["c1"]) == ("ADVERTISED", "REJECTED")
    assert driver.verdict(keys_event(driver.key, "c1")).reason is Reason.REJECTED_MESSAGE
    driver.reach(COMMITTING)
    assert driver.attempt.num_survivors == 4


def test_malformed_keys_end_the_assignment() -> None:
    driver = advertising(6, 6, selection={"min_fraction": 0.5})
    for name, content, text in (
        ("c0", b"\x00" * 10_000_000, "expected at most"),
        ("c1", b"not a message", "the bytes are not a KeyAdvertisement"),
        ("c2", replayed(driver, masking_key=bytes(32), encryption_key=bytes(32)).keys, "are the same"),
    ):
        verdict = driver.verdict(KeysAdvertised(driver.key, name, content))
        assert verdict.reason is Reason.REJECTED_MESSAGE
        assert text in verdict.text
    assert driver.counts() == {"REJECTED": 3, "TRAINING": 3}


# --- reports ---


@pytest.mark.parametrize("phase", [ADVERTISING, SHARING])
def test_no_client_uploads_before_it_has_the_shares_that_it_holds(phase: AttemptPhase) -> None:
    driver = start().reach(phase)
    for event in (UploadStarted(driver.key, "c0"), report_event(driver.key, "c0")):
        proposal = driver.do(event)
        assert proposal.verdicts[0].reason is Reason.STALE
        assert proposal.verdicts[0].text.startswith(f"the attempt is {phase}")
        assert (proposal.changes, proposal.commands) == ([], [])
    if phase is SHARING:
        driver.share("c0")
        assert driver.verdict(UploadStarted(driver.key, "c0")).reason is Reason.STALE


def test_an_upload_may_begin_again_without_more_time() -> None:
    driver = start().reach(COLLECTING)
    driver.wait(10.0)
    driver.upload_masked("c0")
    driver.wait(10.0)
    driver.upload_masked("c0")
    assert driver.attempt.assignments["c0"].deadline_at == 40.0


@pytest.mark.parametrize(
    ("num_examples", "metrics", "reason"),
    [
        (32.0, {}, Reason.REJECTED_WEIGHT),
        (0.0, {}, Reason.REJECTED_WEIGHT),
        (float("nan"), {}, Reason.REJECTED_WEIGHT),
        (1.0, {"loss": 0.5}, Reason.REJECTED_METRICS),
    ],
)
def test_a_report_that_reveals_anything_is_refused(
    num_examples: float, metrics: dict[str, float], reason: Reason
) -> None:
    driver = start().reach(COLLECTING)
    proposal = driver.do(UpdateReported(driver.key, "c0", "digest", num_examples, metrics))
    assert proposal.verdicts[0].reason is reason
    assert names(proposal) == []
    assert driver.states()["c0"] == "REJECTED"
    driver.reach(UNMASKING)
    assert driver.survivors() == [(["c1", "c2", "c3", "c4"], ["c0"])]


def test_the_same_report_again_is_accepted_and_another_is_refused_in_each_later_phase() -> None:
    driver = start().reach(COLLECTING)
    driver.report_masked("c0")
    for phase in (COLLECTING, CONFIRMING, UNMASKING, COMMITTING):
        driver.reach(phase)
        assert driver.verdict(report_event(driver.key, "c0")).accepted
        other = UpdateReported(driver.key, "c0", "other", 1.0)
        assert driver.verdict(other) == Verdict(Reason.REJECTED_CONFLICT)


def test_no_norm_is_stored_and_none_is_judged() -> None:
    driver = start().reach(COLLECTING)
    for n in range(5):
        driver.do(UpdateReported(driver.key, f"c{n}", "digest", 1.0, norm=10.0 ** (n + 1)))
    assert driver.attempt.phase is CONFIRMING
    assert {(each.norm, each.weight) for each in driver.attempt.reported} == {(None, 1.0)}
    assert driver.job.claims == ()


# --- without secure aggregation ---


@pytest.mark.parametrize("step", STEPS)
def test_a_message_in_an_ordinary_job_is_stale(step: AttemptPhase) -> None:
    driver = collecting(2)
    assert driver.verdict(STEPS[step](driver.key, "c0")).reason is Reason.STALE
    assert driver.states()["c0"] == "TRAINING"
    driver.report("c0")
    assert driver.verdict(STEPS[step](driver.key, "c0")).reason is Reason.STALE
    assert secure_phases.list_groups(driver.attempt) == []
