"""The quorum of owners before a job begins, and clients without an approval, which are never drawn."""

from __future__ import annotations

from typing import Any

import pytest

from fedplat.errors import JobFileError
from fedplat.job import Approval
from fedplat.rounds.events import ApprovalsCounted
from fedplat.rounds.states import JobStatus
from support.rounds.driver import Driver, make_client, make_job, make_spec

DIGEST = "ab" * 32


def begin(**approval: Any) -> Driver:
    return Driver(make_job(spec=make_spec(goal=2, approval=approval), digest=DIGEST)).start()


def test_nothing_begins_before_the_quorum() -> None:
    driver = begin()
    for number in range(3):
        driver.do(make_client(f"c{number}", approvals=frozenset({DIGEST})))
    assert driver.job.attempt is None
    driver.do(ApprovalsCounted("j", 2, 3))
    job = driver.job
    assert (job.attempt, job.status) == (None, JobStatus.RUNNING)
    assert job.reason == "waits for approvals: 2 of 3 enrolled clients so far, 3 needed"
    driver.do(ApprovalsCounted("j", 3, 3))
    job = driver.job
    assert job.attempt is not None
    assert len(job.attempt.assignments) == 2
    assert not job.reason
    driver.do(ApprovalsCounted("j", 0, 3))  # it has begun
    assert driver.job.open_attempt is not None


def test_only_clients_with_an_approval_are_drawn() -> None:
    driver = begin(quorum=1)
    driver.do(ApprovalsCounted("j", 1, 4))
    for name, approvals in (("none", None), ("other", frozenset({"cd" * 32})), ("empty", frozenset[str]())):
        driver.do(make_client(name, approvals=approvals))
    assert not driver.job.attempt.assignments  # type: ignore[union-attr]
    for name in ("one", "two"):
        driver.do(make_client(name, approvals=frozenset({DIGEST})))
    assert {*driver.job.attempt.assignments} == {"one", "two"}  # type: ignore[union-attr]


def test_a_table_that_requires_nothing_changes_nothing() -> None:
    driver = begin(required=False, purpose="a study")
    for name in ("one", "two"):
        driver.do(make_client(name))
    assert len(driver.job.attempt.assignments) == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(("quorum", "total", "needed"), [("all", 5, 5), ("all", 0, 1), (2, 5, 2), (0.5, 5, 3)])
def test_a_quorum_is_all_a_part_or_a_number(quorum: Any, total: int, needed: int) -> None:
    assert Approval(quorum=quorum).needed_of(total) == needed


@pytest.mark.parametrize("quorum", ["most", 0, 1.0, 1.5, -1])
def test_another_quorum_is_refused(quorum: Any) -> None:
    with pytest.raises(JobFileError, match=r"quorum"):
        make_spec(approval={"quorum": quorum})


@pytest.mark.slow
def test_a_simulation_has_no_owners() -> None:
    from fedplat.simulation.scenario.feasible import check_feasible

    with pytest.raises(JobFileError, match="a simulation has no owners"):
        check_feasible(make_spec(approval={}), object())  # type: ignore[arg-type]
