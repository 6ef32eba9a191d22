"""Long schedules drawn from a seed, for a job of each kind: clients, operators and crashes, as no simulation has them.

A step does what fits the state: clients check in, work, fail and are revoked, updates are aggregated or not, time
passes, an operator intervenes, a batch is lost, and the server is killed. The driver checks the invariants.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import structs

from fedplat.gossip import steps
from fedplat.job import JobSpec
from fedplat.rounds import Assignment, ModelVersion, Proposal
from fedplat.rounds.events import (
    AggregationFailed,
    AssignmentFailed,
    ClientCheckedIn,
    ClientLeft,
    ClientRevoked,
    Event,
    JobAction,
    RollbackOrdered,
    SilosLost,
    UpdateRejected,
    UpdateReported,
    UploadStarted,
)
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase, JobStatus, Reason
from fedplat.secure_aggregation.setup import FEATURE
from support.rounds.driver import Driver, make_aggregated, make_client, make_job, make_spec
from support.rounds.secure_driver import (
    answer_event,
    confirmation_event,
    keys_event,
    make_secure_spec,
    report_event,
    shares_event,
)
from support.rounds.silos import Silos

OnBatch = Callable[[Sequence[Event], float, Proposal], None]
FLEET: Final = tuple(f"c{number}" for number in range(12))
_RETRY: Final = {"base_s": 2.0, "max_s": 8.0}
_EVALUATED: Final = {"every": 2, "clients": {"evaluator": "digits-eval", "goal": 2, "timeout_s": 20.0}}
_PRIVATE: Final[dict[str, Any]] = {
    "updates": {"weighting": "uniform", "clip_norm": 1.0},
    "selection": {"close": "deadline", "min_separation": 1, "over_selection": 1.5},
}
_MODELLED: Final = {"participation": "fixed", "delta": 1e-6, "noise_multiplier": 1.0, "max_releases": 999}
_LONG: Final = 999
SPECS: Final[Mapping[str, JobSpec]] = {
    "sync": make_spec(3, _LONG, selection={"over_selection": 1.5}, evaluation=_EVALUATED, retry=_RETRY),
    "memory": make_spec(3, _LONG, durability="memory", retry=_RETRY),
    "buffered": make_spec(3, _LONG, mode={"kind": "buffered", "concurrency": 6, "max_staleness": 2}, retry=_RETRY),
    "ssp": make_spec(1, _LONG, mode={"kind": "ssp", "concurrency": 4, "slack": 1}, evaluation=_EVALUATED, retry=_RETRY),
    "secure": make_secure_spec(4, _LONG, selection={"over_selection": 1.5}, retry=_RETRY),
    "secure, confirmation": make_secure_spec(6, _LONG, options={"confirm": True, "group": 3}, retry=_RETRY),
    "private": make_spec(3, _LONG, privacy=_MODELLED, retry=_RETRY, **_PRIVATE),
    "private, no trust": make_secure_spec(
        4, _LONG, privacy=_MODELLED | {"trust": "none"}, selection={"close": "deadline"}, retry=_RETRY
    ),
    "warm start": make_spec(
        3, _LONG, warm_start={"trainer": "digits", "batch_size": 8, "learning_rate": 0.1}, retry=_RETRY
    ),
    "flower app": make_spec(1, _LONG, flower={"app": "digits"}, retry=_RETRY),
}
KINDS: Final = (*SPECS, "gossip", "ring")
_WORDS: Final = (
    *("check in",) * 6,
    *("work",) * 10,
    *("aggregate",) * 4,
    *("time", "time", "fail", "reject", "leave", "revoke", "operate", "roll back", "crash", "lose"),
)


def play(kind: str, num_steps: int, on_batch: OnBatch, seed: int = 1) -> Driver:
    """Play a schedule; `on_batch` is called with each batch that was proposed."""
    schedule = _SiloSchedule(kind) if kind in ("gossip", "ring") else _Schedule(Driver(make_job(spec=SPECS[kind])))
    schedule.rng = random.Random(seed)
    do = schedule.driver.do

    def observe(*events: Event, stored: bool = True) -> Proposal:
        proposal = do(*events, stored=stored)
        on_batch(events, schedule.driver.now, proposal)
        return proposal

    vars(schedule.driver)["do"] = observe
    schedule.driver.start()
    for _ in range(num_steps):
        schedule.step()
    return schedule.driver


class _Schedule:
    """What may happen to a job next."""

    rng: random.Random

    def __init__(self, driver: Driver) -> None:
        self.driver, self.versions = driver, dict[int, ModelVersion]()

    def step(self) -> None:
        """Let one thing happen."""
        job = self.driver.job
        self.versions[job.latest.version] = job.latest
        if job.status is JobStatus.PAUSED and self.rng.random() < 0.5:
            self.driver.operate(JobAction.RESUME)
        match self.rng.choice(_WORDS):
            case "check in":
                self.check_in(*self._draw(self._list_free()))
            case "work":
                self.work([each for each in job.open_assignments if self.rng.random() < 0.6])
            case "aggregate":
                self.driver.do(*self._aggregate())
            case "time":
                self.driver.wait(self.rng.choice((0.5, 3.0, 20.0, 70.0)))
            case "operate":
                self.driver.operate(self.rng.choice((JobAction.PAUSE, JobAction.RESUME)))
            case "roll back":
                self.driver.do(RollbackOrdered("j", self.versions[self.rng.choice(sorted(self.versions))]))
            case "crash":
                self.driver.crash(self.rng.choice((0.0, 5.0, 200.0)))
            case "lose":
                self.driver.do(*map(self.make_client, self._draw(self._list_free())), stored=False)
            case word:
                self.driver.do(*self._end(word))

    def make_client(self, name: str) -> ClientCheckedIn:
        """Return the check-in of a client that has everything installed."""
        return make_client(name, features=frozenset({FEATURE}))

    def check_in(self, *names: str) -> None:
        """Let clients check in."""
        self.driver.do(*map(self.make_client, names))

    def work(self, assignments: Sequence[Assignment]) -> None:
        """Let clients take their next step."""
        self.driver.do(*(event for each in assignments if (event := self._advance(each)) is not None))

    def _list_free(self) -> list[str]:
        room, busy = self.driver.coordinator.room.clients, self.driver.coordinator.assignment_of
        return [name for name in FLEET if name not in room and busy(name) is None]

    def _draw(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.rng.random() < 0.7]

    def _advance(self, each: Assignment) -> Event | None:
        attempt, secure = self.driver.job.open_attempt, self.driver.job.spec.secure_aggregation is not None
        if attempt is None or not (secure and each.kind is AttemptKind.TRAIN):
            return self._report(each) if each.is_busy else None
        match attempt.phase, each.state:
            case AttemptPhase.ADVERTISING, AssignmentState.TRAINING:
                return keys_event(each.key, each.client_id)
            case AttemptPhase.SHARING, AssignmentState.ADVERTISED:
                return shares_event(each.key, each.client_id)
            case AttemptPhase.COLLECTING, AssignmentState.SHARED:
                return report_event(each.key, each.client_id)
            case AttemptPhase.CONFIRMING, AssignmentState.REPORTED:
                return confirmation_event(each.key, each.client_id)
            case AttemptPhase.UNMASKING, AssignmentState.REPORTED:
                return answer_event(each.key, each.client_id)
            case _:
                return None

    def _report(self, each: Assignment) -> Event:
        if each.state is AssignmentState.TRAINING and self.rng.random() < 0.3:
            return UploadStarted(each.key, each.client_id)
        number = float(self.rng.randrange(1, 20))
        loss, norm = {"loss": number / 4}, number if each.kind is AttemptKind.TRAIN else None
        return UpdateReported(each.key, each.client_id, f"of-{each.client_id}", number, loss, 4, norm)

    def _aggregate(self) -> list[Event]:
        job = self.driver.job
        attempt = job.open_attempt
        if attempt is None or attempt.phase is not AttemptPhase.COMMITTING:
            return []
        if self.rng.random() < 0.2:
            return [AggregationFailed(attempt.key, "the disk is full")]
        outcome = make_aggregated(job)
        version = structs.replace(outcome.version, version=job.latest.version + 1)
        cohort = tuple(self._draw(FLEET)) or FLEET[:1] if job.spec.flower is not None else ()
        return [dataclasses.replace(outcome, version=version, cohort=cohort)]

    def _end(self, word: str) -> list[Event]:
        """Return the end of a client's work, or of its waiting."""
        waiting = [name for name in FLEET if name in self.driver.coordinator.room.clients]
        if word == "leave":
            return [ClientLeft(name) for name in waiting[:2]]
        if not (working := self.driver.job.open_assignments):
            return []
        each = self.rng.choice(working)
        if word == "revoke":
            return [ClientRevoked(each.client_id)]
        if word == "reject":
            return [UpdateRejected(each.key, each.client_id, Reason.REJECTED_NONFINITE, "not a number")]
        return [AssignmentFailed(each.key, each.client_id, Reason.TRAINER_ERROR, "no data")]


class _SiloSchedule(_Schedule):
    """What may happen to a decentralised job next."""

    def __init__(self, kind: str) -> None:
        mode = {"exchange": "ring"} if kind == "ring" else {}
        self._silos = Silos(10, _LONG, selection={"min_fraction": 0.4}, mode=mode, retry=_RETRY)
        super().__init__(self._silos.driver)

    def make_client(self, name: str) -> ClientCheckedIn:
        return make_client(name, features=frozenset({steps.FEATURE}))

    def _list_free(self) -> list[str]:
        return [name for name in super()._list_free() if name in self._silos.names]

    def work(self, assignments: Sequence[Assignment]) -> None:
        for name in (each.client_id for _ in range(3) for each in assignments):
            if self._find(name) is not None:
                self._silos.follow(name)
            if (each := self._find(name)) is not None and each.state is AssignmentState.TRAINING:
                self._silos.announce(name, loss=1.0)

    def _find(self, name: str) -> Assignment | None:
        """Return the assignment of a silo in the round, which another silo may have ended."""
        attempt = self.driver.job.open_attempt
        found = attempt.assignments.get(name) if attempt is not None else None
        return found if found is not None and found.is_open else None

    def _end(self, word: str) -> list[Event]:
        if word == "reject" and self.driver.job.open_attempt is not None:
            return [SilosLost("j", (self.rng.choice(self._silos.names),))]
        # A silo that has failed is in no other phase of its round, which begins again and again with too few.
        return super()._end(word) if self.rng.random() < 0.3 else []
