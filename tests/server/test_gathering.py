"""How long reports wait for others: for those that are on their way or likely, and no longer than stated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from fedplat.rounds import AttemptKey, Coordinator
from fedplat.rounds.events import ClientCheckedIn, JobAction, OperatorCommand, UpdateReported
from fedplat_server.coordination import gathering
from fedplat_server.coordination.gathering import ComingReports, Gathering

NOW = 100.0


def gather(coming: ComingReports, goal: int = 1000) -> Gathering:
    jobs = {
        "job": SimpleNamespace(open_attempt=SimpleNamespace(goal=goal, num_reported=0)),
        "idle": SimpleNamespace(open_attempt=None),
    }
    return Gathering(cast(Coordinator, SimpleNamespace(jobs=jobs)), coming, NOW)


def report(client_id: str, job_id: str = "job") -> UpdateReported:
    return UpdateReported(AttemptKey(job_id, 1, 1), client_id, "0" * 64, 1.0)


def test_a_report_that_is_alone_does_not_wait() -> None:
    coming = ComingReports()
    for at in (NOW - gathering.RECENT_S, NOW):
        coming.on_queued(report("a"), at)
    batch = gather(coming)
    assert batch.add(report("a"))
    assert batch.left_s(NOW) <= 0.0


def test_a_report_that_follows_another_waits_a_moment() -> None:
    coming = ComingReports()
    for at in (NOW - 0.02, NOW):
        coming.on_queued(report("a"), at)
    batch = gather(coming)
    assert batch.add(report("b"))
    assert batch.left_s(NOW) == pytest.approx(gathering.GAP_S)
    assert batch.add(ClientCheckedIn("c", "demo"))
    assert batch.left_s(NOW) == pytest.approx(gathering.POLL_GAP_S)
    assert batch.left_s(NOW + gathering.GATHER_S) <= 0.0


def test_reports_wait_for_one_of_their_job_that_is_coming() -> None:
    coming = ComingReports()
    batch = gather(coming)
    assert batch.add(report("a"))
    with coming.expect("other", "b", NOW):
        assert batch.left_s(NOW) <= 0.0
        with coming.expect("job", "b", NOW):
            assert batch.left_s(NOW) == pytest.approx(gathering.COMING_S)
            assert batch.add(ClientCheckedIn("c", "demo"))
            assert batch.left_s(NOW) > 0.0
            late = NOW + gathering.GATHER_S
            with coming.expect("job", "d", late):
                assert batch.left_s(late) <= 0.0
    assert batch.left_s(NOW) <= 0.0


def test_a_call_that_dies_or_sends_nothing_delays_no_other_report() -> None:
    coming = ComingReports()
    batch = gather(coming)
    batch.add(report("a"))
    with pytest.raises(ValueError, match="broken"), coming.expect("job", "b", NOW):
        raise ValueError("broken")
    assert batch.left_s(NOW) <= 0.0
    with coming.expect("job", "b", NOW):
        coming.on_queued(report("b"), NOW)
        assert coming.expected_until(["job"]) < NOW  # its call ends later
        with coming.expect("job", "b", NOW), coming.expect("job", "c", NOW):  # of two calls of a client one ends
            pass
    assert coming.expected_until(["job"]) < NOW
    with coming.expect("job", "b", NOW - gathering.COMING_S):  # begun long ago
        assert coming.expected_until(["job"]) <= NOW


@pytest.mark.parametrize(
    "event", [OperatorCommand("job", JobAction.PAUSE), report("a", "idle"), report("a", "unknown")], ids=type
)
def test_nothing_waits_with_an_event_for_which_others_wait(event: UpdateReported | OperatorCommand) -> None:
    assert not gather(ComingReports()).add(event)


def test_enough_reports_or_the_one_that_closes_an_attempt_end_the_wait() -> None:
    batch = gather(ComingReports(), goal=2)
    assert [batch.add(report("a")), batch.add(report("b"))] == [True, False]
    batch = gather(ComingReports())
    found = [batch.add(report(str(number))) for number in range(gathering.ENOUGH)]
    assert found == [True] * (gathering.ENOUGH - 1) + [False]


def test_check_ins_alone_do_not_wait() -> None:
    coming = ComingReports()
    batch = gather(coming)
    with coming.expect("job", "b", NOW):
        assert batch.add(ClientCheckedIn("c", "demo"))
        assert batch.left_s(NOW) <= 0.0
