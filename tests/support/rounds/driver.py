"""Drives a coordinator in virtual time, as a server would, and checks the invariants after every step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from fedplat.config.toml import read_record
from fedplat.job import JobSpec
from fedplat.rounds import Attempt, AttemptKey, Context, Coordinator, JobState, ModelVersion, Proposal, Verdict
from fedplat.rounds.commands import Abandon, Abort, Assign, Commit, Fold, NextStep, Refuse, Restart
from fedplat.rounds.events import (
    AssignmentFailed,
    AttemptAggregated,
    ClientCheckedIn,
    ClientLeft,
    Event,
    JobAction,
    OperatorCommand,
    ServerRestarted,
    TimerFired,
    UpdateReported,
    UploadStarted,
)
from fedplat.rounds.states import JobStatus, Reason
from support.rounds.invariants import Ledger

_Command = TypeVar("_Command", Abandon, Assign, Abort, Commit, Fold, NextStep, Refuse, Restart)
_Item = TypeVar("_Item")
TRAINER, EVALUATOR, POPULATION = "digits", "digits-eval", "demo"


def make_spec(goal: int = 2, rounds: int = 2, **sections: Any) -> JobSpec:
    """A job file's content; `sections` are added to, or merged into, a small one."""
    selection = {"goal": goal, "over_selection": 1.0, "min_fraction": 0.5} | sections.pop("selection", {})
    raw = {
        "name": "job",
        "population": POPULATION,
        "trainer": TRAINER,
        "rounds": rounds,
        "model": {"initial": "model:make"},
        "selection": selection,
        "deadlines": {"selection_s": 60.0, "training_s": 100.0, "upload_s": 30.0} | sections.pop("deadlines", {}),
        **sections,
    }
    return read_record(raw, JobSpec)


def make_job(job_id: str = "j", spec: JobSpec | None = None, **fields: Any) -> JobState:
    """A draft with its initial model."""
    fields = {"latest": ModelVersion(version=0, round=0, attempt=0, digest="initial", size_bytes=4)} | fields
    return JobState(job_id=job_id, spec=spec or make_spec(), **fields)


def make_client(client_id: str, **fields: Any) -> ClientCheckedIn:
    """A check-in of a client that has everything installed."""
    known: dict[str, Any] = {
        "population": POPULATION,
        "trainers": frozenset({TRAINER}),
        "evaluators": frozenset({EVALUATOR}),
    }
    return ClientCheckedIn(client_id, **(known | fields))


class Tokens:
    """Counted tokens; the hash of `token-7` is `b"token-7"`."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __call__(self) -> tuple[str, bytes]:
        token = f"token-{next(self._numbers)}"
        return token, token.encode()


class Driver:
    """One coordinator, its store (a `Ledger`) and its clock. Short methods are for tests with one job."""

    def __init__(
        self,
        *jobs: JobState,
        seed: int = 0,
        max_waiting: int = 1000,
        rng: np.random.Generator | None = None,
        new_token: Callable[[], tuple[str, bytes]] | None = None,
    ) -> None:
        self.now = 0.0
        self.rng = np.random.default_rng(seed) if rng is None else rng
        self.coordinator = Coordinator(jobs or (make_job(),), max_waiting)
        self.ledger = Ledger(self.coordinator)
        self.timers: dict[str, float] = {}
        self._new_token = Tokens() if new_token is None else new_token

    # --- any number of jobs ---

    @property
    def context(self) -> Context:
        """The context of a step at this moment."""
        return Context(self.now, self.rng, self._new_token)

    def do(self, *events: Event, stored: bool = True) -> Proposal:
        """Proposes the events as one batch, and stores it or loses it."""
        before = self.ledger.snapshot()
        proposal = self.coordinator.propose(events, self.context)
        assert len(proposal.verdicts) == len(events)
        if not stored:
            self.coordinator.reject(proposal)
            self.ledger.check_nothing_happened(before)
            return proposal
        self.ledger.store(proposal.changes)
        self.coordinator.accept(proposal)
        for event in events:
            if isinstance(event, TimerFired):
                self.timers.pop(event.job_id, None)  # a timer that fired is gone
        for job_id, deadline_at in proposal.timers.items():
            self.timers.pop(job_id, None)
            if deadline_at is not None:
                self.timers[job_id] = deadline_at
        self.ledger.check(events, proposal, self.now, self.timers)
        return proposal

    def fire(self, job_id: str = "j", *, stored: bool = True) -> Proposal:
        """The job's timer fires, whatever the time; if the batch is lost, it fires again."""
        return self.do(TimerFired(job_id), stored=stored)

    def wait(self, seconds: float) -> list[Proposal]:
        """Lets time pass and fires the timers that are due on the way, the earliest first."""
        end, proposals = self.now + seconds, list[Proposal]()
        while self.timers and min(self.timers.values()) <= end:
            job_id = min(self.timers, key=lambda name: (self.timers[name], name))
            self.now = max(self.now, self.timers[job_id])
            proposals.append(self.fire(job_id))
        self.now = end
        return proposals

    def finish(self, job_id: str) -> None:
        """All clients of a job's attempt report, and it commits."""
        attempt = self.coordinator.jobs[job_id].attempt
        assert attempt is not None
        self.do(*(UpdateReported(each.key, each.client_id, f"of-{each.client_id}", 10.0) for each in attempt.busy))
        self.do(make_aggregated(self.coordinator.jobs[job_id]))

    def crash(self, down_s: float = 0.0, clock_s: float = 0.0) -> Proposal:
        """The server dies and is started again after a while: only the store and the spool are left.

        The new server has a new clock; `clock_s` is how far the wall clock was set forward meanwhile.
        """
        self.coordinator = Coordinator(max_waiting=self.coordinator.max_waiting)
        self.timers = {}
        before, self.now = self.now, 5.0
        self.ledger.reload(self.coordinator, self.now - before - down_s - clock_s)
        return self.do(*(ServerRestarted(job_id) for job_id in self.ledger.jobs))

    # --- one job, "j" ---

    @property
    def job(self) -> JobState:
        """The only job."""
        return self.coordinator.jobs["j"]

    @property
    def attempt(self) -> Attempt:
        """Its last attempt."""
        assert self.job.attempt is not None
        return self.job.attempt

    @property
    def key(self) -> AttemptKey:
        """The last attempt's name."""
        return self.attempt.key

    def key_of(self, client_id: str) -> AttemptKey:
        """The attempt that a client's assignment was made in; the last one for clients without any."""
        return self.coordinator.assignment_of(client_id) or self.key

    def verdict(self, event: Event) -> Verdict:
        """The verdict on this event alone."""
        return self.do(event).verdicts[0]

    def operate(self, action: JobAction, job_id: str = "j") -> Verdict:
        """An operator's command."""
        return self.verdict(OperatorCommand(job_id, action))

    def start(self, num_clients: int = 0) -> Driver:
        """Starts the job with clients c0, c1 ... waiting."""
        self.check_in(*(f"c{i}" for i in range(num_clients)))
        assert self.operate(JobAction.START).accepted
        return self

    def check_in(self, *client_ids: str) -> Proposal:
        """Clients that have everything installed check in, in one batch."""
        return self.do(*(make_client(client_id) for client_id in client_ids))

    def leave(self, client_id: str) -> Refuse:
        """A waiting client's time is over."""
        (refusal,) = commands_of(self.do(ClientLeft(client_id)), Refuse)
        return refusal

    def leave_after_check_in(self, client_id: str) -> Refuse:
        """A client asks for work and waits until its time is over."""
        self.check_in(client_id)
        return self.leave(client_id)

    def upload(self, *client_ids: str) -> None:
        """Clients finish training."""
        self.do(*(UploadStarted(self.key_of(client_id), client_id) for client_id in client_ids))

    def report(self, *client_ids: str, num_examples: float = 10.0, **metrics: float) -> Proposal:
        """Clients report."""
        keys = [self.key_of(client_id) for client_id in client_ids]
        named = zip(keys, client_ids, strict=True)
        return self.do(*(UpdateReported(key, name, f"of-{name}", num_examples, metrics) for key, name in named))

    def give_up(self, *client_ids: str) -> Proposal:
        """Clients fail."""
        keys = [self.key_of(client_id) for client_id in client_ids]
        named = zip(keys, client_ids, strict=True)
        return self.do(*(AssignmentFailed(key, name, Reason.TRAINER_ERROR, "boom") for key, name in named))

    def aggregated(self) -> AttemptAggregated:
        """The outcome of the last attempt's aggregation."""
        return make_aggregated(self.job)

    def commit(self) -> Proposal:
        """The open attempt's updates are aggregated."""
        return self.do(self.aggregated())

    def play_round(self) -> Proposal:
        """All clients of the open attempt report, and it commits."""
        self.report(*self.attempt.assignments)
        return self.commit()

    def states(self) -> dict[str, str]:
        """The last attempt's assignments by client."""
        return {client_id: str(a.state) for client_id, a in self.attempt.assignments.items()}

    def reasons(self) -> dict[str, str]:
        """Why they ended."""
        return {client_id: str(a.reason or "") for client_id, a in self.attempt.assignments.items()}

    def counts(self) -> dict[str, int]:
        """How many assignments of the last attempt are in each state."""
        return {str(state): count for state, count in sorted(self.attempt.counts.items()) if count}

    @property
    def is_running(self) -> bool:
        """Whether the job runs."""
        return self.job.status is JobStatus.RUNNING


def collecting(num_clients: int, goal: int = 2, **sections: Any) -> Driver:
    """A job whose first attempt has `num_clients` clients at work."""
    driver = Driver(make_job(spec=make_spec(goal, **sections))).start(num_clients)
    assert driver.counts() == {"TRAINING": num_clients}
    return driver


def make_aggregated(job: JobState, num_updates: int | None = None) -> AttemptAggregated:
    """The outcome of the aggregation of a job's last attempt."""
    attempt = job.attempt
    assert attempt is not None
    version = ModelVersion(
        version=attempt.base_version + 1,
        round=attempt.key.round,
        attempt=attempt.key.number,
        digest=f"model-{attempt.base_version + 1}",
        size_bytes=4,
        num_updates=attempt.num_reported if num_updates is None else num_updates,
        total_weight=math.fsum(each.weight for each in attempt.reported),
    )
    return AttemptAggregated(attempt.key, version)


def commands_of(proposal: Proposal, kind: type[_Command]) -> list[_Command]:
    """The commands of one kind, in order."""
    return [command for command in proposal.commands if isinstance(command, kind)]


def assigned(proposal: Proposal) -> list[str]:
    """The clients that were given work."""
    return [command.client_id for command in commands_of(proposal, Assign)]


def batches(items: Sequence[_Item], size: int) -> list[Sequence[_Item]]:
    """The items in order, `size` at a time."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def aborted(proposal: Proposal) -> dict[str, str]:
    """The clients that were told to stop, and why."""
    return {command.client_id: str(command.reason) for command in commands_of(proposal, Abort)}


def names(proposal: Proposal) -> Sequence[str]:
    """The kinds of the commands, in order."""
    return [type(command).__name__ for command in proposal.commands]
