"""A simulated fleet: clients that train, upload, fail, vanish and come back, in virtual time, from one seed."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator

import numpy as np

from fedplat.rounds import JobState, Proposal
from fedplat.rounds.commands import Abort, Assign, Commit, Refuse
from fedplat.rounds.events import AggregationFailed, AssignmentFailed, Event, UpdateReported, UploadStarted
from fedplat.rounds.states import ENDED_JOBS, Reason
from support.rounds.driver import Driver, commands_of, make_aggregated, make_client

RETRY_STORE_S = 0.5


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """What a client is like: how long its work takes, and how often what happens to it."""

    train_s: float = 20.0
    upload_s: float = 2.0
    fails: float = 0.0
    vanishes: float = 0.0
    loses_replies: float = 0.0
    away_s: float = 15.0


@dataclasses.dataclass(order=True)
class _Planned:
    at: float
    order: int
    client_id: str = dataclasses.field(compare=False)
    """Whose plan it is; it is forgotten when the client is told to stop."""
    event: Event = dataclasses.field(compare=False)


class Fleet:
    """Plays clients, an aggregation and a database that is sometimes gone, against a `Driver`."""

    def __init__(self, jobs: list[JobState], clients: dict[str, Behaviour], seed: int, lost: float = 0.0) -> None:
        self.driver = Driver(*jobs, seed=seed)
        self.commands: list[str] = []
        self._clients = clients
        self._lost = lost
        self._rng = np.random.default_rng(seed + 1)
        self._plans: list[_Planned] = []
        self._order: Iterator[int] = itertools.count()
        for client_id in clients:
            self._plan(float(self._rng.uniform(0, 1)), client_id, make_client(client_id))

    def run(self, until_s: float) -> None:
        """Plays until all jobs have ended, or the time is over."""
        driver = self.driver
        while driver.now < until_s and any(j.status not in ENDED_JOBS for j in driver.coordinator.jobs.values()):
            timer = min(driver.timers.values(), default=float("inf"))
            if not self._plans or timer <= self._plans[0].at:
                assert timer < float("inf"), "nothing will ever happen again"
                for proposal in driver.wait(timer - driver.now):
                    self._obey(proposal)
            else:
                self._play_next()

    def _play_next(self) -> None:
        driver, at = self.driver, self._plans[0].at
        batch: list[_Planned] = []
        while self._plans and self._plans[0].at <= at:
            batch.append(heapq.heappop(self._plans))
        driver.now = max(driver.now, at)
        stored = not self._rng.random() < self._lost
        proposal = driver.do(*(planned.event for planned in batch), stored=stored)
        if stored:
            self._obey(proposal)
        else:
            for planned in batch:
                self._plan(RETRY_STORE_S, planned.client_id, planned.event)

    def _obey(self, proposal: Proposal) -> None:
        self.commands += map(repr, proposal.commands)
        self.commands += [command.token for command in commands_of(proposal, Assign)]
        for command in proposal.commands:
            match command:
                case Assign():
                    self._work(command)
                case Refuse(client_id=client_id, retry=window):
                    self._plan(self._rng.uniform(window.min_s, window.max_s), client_id, make_client(client_id))
                case Abort(client_id=client_id):
                    self._forget(client_id)
                    self._plan(self._rng.uniform(0, 1), client_id, make_client(client_id))
                case Commit(key=key):
                    fails = self._rng.random() < 0.1
                    done = make_aggregated(self.driver.coordinator.jobs[key.job_id])
                    self._plan(1.0, "", AggregationFailed(key, "disk full") if fails else done)
                case _:
                    pass

    def _work(self, command: Assign) -> None:
        """Plans what a client does with its assignment; whatever it planned before is forgotten."""
        client_id, behaviour = command.client_id, self._clients[command.client_id]
        self._forget(client_id)
        again = make_client(client_id)
        took = behaviour.train_s * self._rng.uniform(0.5, 1.5)
        if self._rng.random() < behaviour.loses_replies:
            self._plan(1.0, client_id, again)
        elif self._rng.random() < behaviour.vanishes:
            self._plan(behaviour.away_s * self._rng.uniform(0.1, 2.0), client_id, again)
        elif self._rng.random() < behaviour.fails:
            self._plan(took / 2, client_id, AssignmentFailed(command.key, client_id, Reason.TRAINER_ERROR, "boom"))
            self._plan(took / 2 + 1, client_id, again)
        else:
            end = took
            if command.upload_timeout_s:
                self._plan(took, client_id, UploadStarted(command.key, client_id))
                end += behaviour.upload_s
            report = UpdateReported(command.key, client_id, command.token, 5.0, {"loss": float(self._rng.random())})
            self._plan(end, client_id, report)
            self._plan(end, client_id, report)  # its receipt is lost once
            self._plan(end + 1, client_id, again)

    def _plan(self, after_s: float, client_id: str, event: Event) -> None:
        heapq.heappush(self._plans, _Planned(self.driver.now + float(after_s), next(self._order), client_id, event))

    def _forget(self, client_id: str) -> None:
        self._plans = [planned for planned in self._plans if planned.client_id != client_id]
        heapq.heapify(self._plans)
