"""Whole jobs with an unreliable fleet and database, repeatable by their seed; and large rounds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fedplat.job import JobSpec
from fedplat.rounds import Assignment, Context, Coordinator, Proposal
from fedplat.rounds.commands import Assign, Commit, Fold
from fedplat.rounds.demand import Demand
from fedplat.rounds.events import ClientCheckedIn, Event, JobAction, OperatorCommand, UpdateReported, UploadStarted
from fedplat.rounds.persistent_map import PersistentMap
from fedplat.rounds.states import AttemptPhase, JobStatus
from support.rounds.cohorts import num_copied
from support.rounds.driver import Tokens, batches, make_aggregated, make_client, make_job, make_spec
from support.rounds.fleet import Behaviour, Fleet

BAD = Behaviour(fails=0.1, vanishes=0.15, loses_replies=0.1)
SLOW = Behaviour(train_s=200.0)


def play(seed: int, lost: float = 0.05, num_rounds: int = 4) -> Fleet:
    clients = {f"bad{i}": BAD for i in range(9)} | {f"slow{i}": SLOW for i in range(2)}
    evaluation = {"every": 2, "clients": {"evaluator": "digits-eval", "goal": 3, "timeout_s": 40.0}}
    selection = {"over_selection": 1.3, "min_fraction": 1.0}
    specs = [
        make_spec(4, num_rounds, selection=selection, evaluation=evaluation),
        make_spec(3, num_rounds, selection=selection, deadlines={"adaptive": {"after": 5}}),
    ]
    fleet = Fleet([make_job(f"j{i}", spec) for i, spec in enumerate(specs)], clients, seed, lost)
    fleet.driver.do(*(OperatorCommand(f"j{i}", JobAction.START) for i in range(2)))
    fleet.run(until_s=20_000)
    return fleet


@pytest.mark.parametrize("seed", [0, 2, 3, 5])
def test_jobs_complete_with_a_bad_fleet_and_a_bad_database(seed: int) -> None:
    fleet = play(seed)
    ledger = fleet.driver.ledger
    for job in fleet.driver.coordinator.jobs.values():
        assert job.status is JobStatus.COMPLETED, job
        assert [v.version for v in ledger.versions[job.job_id]] == list(range(5))
    ended = Counter(str(row.state) for cohort in ledger.cohorts.values() for row in cohort.values())
    assert not {"TRAINING", "UPLOADING", "REPORTED"} & set(ended)
    assert {"MERGED", "LATE", "FAILED"} <= set(ended)  # the fleet was unreliable
    assert any(row.phase is AttemptPhase.ABANDONED for row in ledger.attempts.values())


def test_the_same_seed_tells_the_same_story() -> None:
    one, two, other = play(7, num_rounds=2), play(7, num_rounds=2), play(8, num_rounds=2)
    assert len(one.commands) > 50
    assert one.commands == two.commands
    assert one.driver.now == two.driver.now
    assert one.driver.ledger.history == two.driver.ledger.history
    assert one.commands != other.commands


# --- size ---


class Counted:
    """Runs one large round, and counts what it costs."""

    def __init__(self, spec: JobSpec) -> None:
        self.coordinator = Coordinator([make_job(spec=spec)])
        self.work: Counter[str] = Counter()
        self._rng, self._tokens = np.random.default_rng(0), Tokens()

    def do(self, *events: Event) -> Proposal:
        proposal = self.coordinator.propose(events, Context(0.0, self._rng, self._tokens))
        self.coordinator.accept(proposal)
        self.work.update(type(command).__name__ for command in proposal.commands)
        self.work["timers"] += len(proposal.timers)
        self.work["rows"] += sum(len(change.assignments) for change in proposal.changes)
        return proposal


def test_the_work_of_a_round_grows_with_the_cohort_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    goal, num_waiting, batch = 2000, 20_000, 250
    run = Counted(make_spec(goal, rounds=1, selection={"where": "region == 'eu'"}))
    accepts, update = Demand.accepts, PersistentMap[Assignment].update

    def counted_accepts(demand: Demand, client: ClientCheckedIn) -> bool:
        run.work["labels looked at"] += 1
        return accepts(demand, client)

    def counted_update(cohort: PersistentMap[Assignment], changed: dict[str, Assignment]) -> PersistentMap[Assignment]:
        after = update(cohort, changed)
        run.work["assignments copied"] += num_copied(after)
        return after

    monkeypatch.setattr(Demand, "accepts", counted_accepts)
    monkeypatch.setattr(PersistentMap, "update", counted_update)
    clients = [make_client(f"c{i}", labels={"region": "eu"}) for i in range(num_waiting)]
    for some in batches(clients, batch):
        run.do(*some)
    assert run.work["labels looked at"] == 0  # no job needs them yet
    run.do(OperatorCommand("j", JobAction.START))
    assert run.work["labels looked at"] == num_waiting
    assert run.work[Assign.__name__] == goal
    attempt = run.coordinator.jobs["j"].attempt
    assert attempt is not None
    working = list(attempt.assignments)
    for some in batches(working, batch):
        run.do(*(UploadStarted(attempt.key, name) for name in some))
    for some in batches(working, batch):
        run.do(*(UpdateReported(attempt.key, name, "digest", 1.0) for name in some))
    run.do(make_aggregated(run.coordinator.jobs["j"]))
    assert run.coordinator.jobs["j"].status is JobStatus.COMPLETED
    assert (run.work[Fold.__name__], run.work[Commit.__name__]) == (goal, 1)
    assert run.work["labels looked at"] == num_waiting
    assert run.work["rows"] == 4 * goal  # assigned, uploading, reported, merged
    # A copy of the whole cohort per step, or one row per step and client, would make 8 million.
    assert run.work["assignments copied"] < 3 * 2 * goal**1.5
    assert run.work["timers"] <= 2 * (2 + num_waiting / batch)


def test_no_round_looks_at_those_again_who_wait_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    goal, num_waiting, num_rounds = 20, 5000, 30
    run = Counted(make_spec(goal, rounds=num_rounds, selection={"min_separation": 3}))
    accepts = Demand.accepts

    def counted_accepts(demand: Demand, client: ClientCheckedIn) -> bool:
        run.work["labels looked at"] += 1
        return accepts(demand, client)

    monkeypatch.setattr(Demand, "accepts", counted_accepts)
    run.do(OperatorCommand("j", JobAction.START))
    run.do(*(make_client(f"c{i}") for i in range(num_waiting)))
    for _ in range(num_rounds):
        attempt = run.coordinator.jobs["j"].attempt
        assert attempt is not None
        run.do(*(UpdateReported(attempt.key, name, "digest", 1.0) for name in attempt.assignments))
        run.do(*map(make_client, attempt.assignments))
        run.do(make_aggregated(run.coordinator.jobs["j"]))
    assert run.coordinator.jobs["j"].status is JobStatus.COMPLETED
    # Once at each client's first check-in, and once each time that it returns.
    assert run.work["labels looked at"] <= num_waiting + goal * num_rounds
