"""Jobs with plugins in the coordinator: which code they run with, which clients they draw, and policies that fail."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec import Struct, structs

from fedplat.config.loaded_plugins import PluginVersion
from fedplat.errors import UserCodeError
from fedplat.rounds import JobState
from fedplat.rounds.events import JobAction, OperatorCommand, ServerRestarted
from fedplat.rounds.states import AssignmentState, AttemptPhase, JobStatus
from support.rounds.driver import Driver, make_client, make_job, make_spec

OLD = PluginVersion("rules", "mine", "1.0", "a" * 64)
NEW = PluginVersion("rules", "mine", "1.1", "b" * 64)
MISSING = (
    "the server has no plugin rules.mine (the job has 1.0 sha256 aaaaaaaaaaaa); start it with --plugin rules.mine=..., "
    "then resume the job"
)
CHANGED = (
    "the job has rules.mine 1.0 sha256 aaaaaaaaaaaa, but the server has rules.mine 1.1 sha256 bbbbbbbbbbbb; start the "
    "server with the former plugin, then resume the job, or resume it now to continue with the other code"
)


def begun(num_clients: int = 2) -> Driver:
    driver = Driver(make_job(plugins=(OLD,)))
    driver.check_in(*(f"c{number}" for number in range(num_clients)))
    assert driver.verdict(OperatorCommand("j", JobAction.START, (OLD,))).accepted
    return driver


@pytest.mark.parametrize(
    ("loaded", "problem", "text"),
    [
        ((), "", MISSING),
        ((NEW,), "", CHANGED),
        (
            (NEW,),
            "aggregation.size = 9: expected at most 3",
            "the job cannot use the server's plugins: aggregation.size = 9: expected at most 3; start the server with "
            "rules.mine 1.0 sha256 aaaaaaaaaaaa, then resume the job",
        ),
    ],
)
@pytest.mark.parametrize("phase", [AttemptPhase.SELECTING, AttemptPhase.COLLECTING, AttemptPhase.COMMITTING])
def test_a_running_job_is_paused_in_any_phase(
    phase: AttemptPhase, loaded: tuple[PluginVersion, ...], problem: str, text: str
) -> None:
    driver = begun(0 if phase is AttemptPhase.SELECTING else 2)
    if phase is AttemptPhase.COMMITTING:
        driver.report("c0", "c1")
    assert driver.attempt.phase is phase
    driver.do(ServerRestarted("j", loaded, problem))
    assert (driver.job.status, driver.job.reason) == (JobStatus.PAUSED, text)
    assert (driver.attempt.phase, driver.attempt.reason) == (AttemptPhase.ABANDONED, text)
    assert set(driver.states().values()) <= {AssignmentState.DROPPED}
    assert driver.job.plugins == (OLD,)
    revision = driver.job.revision
    driver.do(ServerRestarted("j", loaded, problem))
    assert driver.job.revision == revision, "the second restart changes nothing"


def test_the_same_plugins_change_nothing() -> None:
    driver = begun()
    before = driver.job
    driver.do(ServerRestarted("j", (OLD,)))
    assert driver.job is before


def test_other_code_is_adopted_by_a_resumption_only() -> None:
    driver = begun()
    driver.do(ServerRestarted("j", (NEW,)))
    refused = driver.verdict(OperatorCommand("j", JobAction.RESUME))
    assert (refused.accepted, refused.text) == (False, f"cannot resume: {MISSING}")
    refused = driver.verdict(OperatorCommand("j", JobAction.RESUME, (NEW,), "a mistake"))
    assert refused.text.startswith("cannot resume: the job cannot use the server's plugins: a mistake;")
    assert driver.verdict(OperatorCommand("j", JobAction.RESUME, (NEW,))).accepted
    assert (driver.job.status, driver.job.reason, driver.job.plugins) == (JobStatus.RUNNING, "", (NEW,))


def test_a_paused_job_states_it_a_draft_and_an_ended_job_do_not_change() -> None:
    driver = begun()
    assert driver.operate(JobAction.PAUSE).accepted
    driver.do(ServerRestarted("j"))
    assert (driver.job.status, driver.job.reason) == (JobStatus.PAUSED, MISSING)
    assert driver.operate(JobAction.CANCEL).accepted
    cancelled = driver.job
    driver.do(ServerRestarted("j"))
    assert driver.job is cancelled
    draft = Driver(make_job(plugins=(OLD,)))
    draft.do(ServerRestarted("j"))
    assert draft.job.revision == 0
    assert draft.operate(JobAction.START).text == f"cannot start: {MISSING}"


def test_only_clients_with_the_algorithm_are_drawn() -> None:
    job = make_job(spec=make_spec(1), plugins=(PluginVersion("algorithms", "mine"),))
    driver = Driver(job)
    assert driver.job.algorithms == {"mine"}
    driver.do(OperatorCommand("j", JobAction.START, job.plugins), make_client("without", algorithms=frozenset({"my"})))
    driver.wait(60.0)
    assert driver.attempt.reason.endswith("available for selection; 1 more do not have algorithms.mine")
    driver.do(make_client("with", algorithms=frozenset({"mine", "other"})))
    driver.wait(10.0)
    assert list(driver.states()) == ["with"]


class Raising(Struct, frozen=True):
    """A policy of a plugin that always fails."""

    is_trial = False
    remembers = False

    def draw(self, *_: object) -> list[int]:
        raise KeyError("utility")


def raising(**sections: Any) -> JobState:
    spec = make_spec(1, **sections)
    return make_job("bad", structs.replace(spec, selection=structs.replace(spec.selection, sampling=Raising())))


def test_a_policy_that_raises_costs_the_attempt_of_its_job_only() -> None:
    driver = Driver(raising(retry={"max_attempts": 3}), make_job(spec=make_spec(1)))
    driver.check_in("c0")
    proposal = driver.do(OperatorCommand("bad", JobAction.START), OperatorCommand("j", JobAction.START))
    (error,) = proposal.errors
    assert isinstance(error, UserCodeError)
    bad = driver.coordinator.jobs["bad"]
    assert re.search(
        r"attempt 1 was abandoned: the sampling policy .*Raising.*: draw\(\) raised KeyError: 'utility'", bad.reason
    )
    assert list(driver.states()) == ["c0"], "the other job draws the client"
    driver.check_in("c1", "c2")
    driver.wait(1000.0)
    assert driver.coordinator.jobs["bad"].status is JobStatus.FAILED


def test_a_lost_batch_with_a_policy_that_raises_changes_nothing() -> None:
    driver = Driver(raising())
    driver.check_in("c0")
    driver.do(OperatorCommand("bad", JobAction.START), stored=False)
    assert driver.coordinator.jobs["bad"].status is JobStatus.DRAFT
    assert list(driver.coordinator.room.clients) == ["c0"]
