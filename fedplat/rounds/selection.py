"""Who is selected: the waiting room of free clients, what attempts demand of it, and who is drawn."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import numpy as np

from fedplat import label_expressions
from fedplat.rounds import reporting
from fedplat.rounds.eligible import EligibleClients
from fedplat.rounds.events import ClientCheckedIn
from fedplat.rounds.participation import ParticipationHistory
from fedplat.rounds.records import Attempt, AttemptKey, JobState
from fedplat.rounds.states import AttemptKind, AttemptPhase, JobStatus
from fedplat.sampling import Policy, Uniform


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """What an attempt wants: `target` clients, drawn by `sampling` once `pool` eligible ones wait.

    With no `pool` they are drawn when the time for selection is over. `codecs` are those that a client's software has
    to know. Nobody in `barred` is drawn: they take part already.
    """

    key: AttemptKey
    kind: AttemptKind
    population: str
    where: str
    handler: str
    target: int
    min_eligible: int | None
    codecs: frozenset[str]
    sampling: Policy
    excluded: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object], compare=False)

    def accepts(self, client: ClientCheckedIn) -> bool:
        """Whether the client may take part."""
        installed = client.trainers if self.kind is AttemptKind.TRAIN else client.evaluators
        return (
            client.population == self.population
            and self.handler in installed
            and self.codecs <= client.codecs
            and label_expressions.compile_expression(self.where)(client.labels)
        )


def make_demand(job: JobState) -> Demand | None:
    """What the job wants of the waiting room now; None when it wants nobody.

    An attempt that fills a buffer wants clients as long as it collects, whoever comes first.
    """
    attempt = job.open_attempt
    if attempt is None:
        return None
    if reporting.fills_buffer(job, attempt):
        free = attempt.target - attempt.num_busy
        if not reporting.wants_clients(job, attempt) or free <= 0:
            return None
        return _training_demand(job, attempt, free, 1)
    if attempt.phase is not AttemptPhase.SELECTING:
        return None
    if attempt.kind is AttemptKind.TRAIN:
        selection = job.spec.selection
        # Trials of each client have no target that is worth waiting for: only `wait_for` says when enough are there.
        enough = selection.wait_for or None if selection.sampling.is_trial else max(selection.wait_for, attempt.target)
        return _training_demand(job, attempt, attempt.target, enough)
    clients = job.spec.evaluation.clients
    assert clients is not None
    return Demand(
        attempt.key,
        attempt.kind,
        job.spec.population,
        job.spec.selection.where,
        clients.evaluator,
        attempt.target,
        attempt.target,
        frozenset[str](),
        Uniform(),
    )


def _training_demand(job: JobState, attempt: Attempt, target: int, pool: int | None) -> Demand:
    spec = job.spec
    return Demand(
        attempt.key,
        attempt.kind,
        spec.population,
        spec.selection.where,
        spec.trainer,
        target,
        pool,
        spec.compression.names,
        spec.selection.sampling,
        attempt.assignments,
    )


def may_train(job: JobState, client: ClientCheckedIn) -> bool:
    """Whether the job may have this client train, sooner or later."""
    known = job.spec.trainer in client.trainers and job.spec.compression.names <= client.codecs
    return known and label_expressions.compile_expression(job.spec.selection.where)(client.labels)


def may_evaluate(job: JobState, client: ClientCheckedIn) -> bool:
    """Whether the job may have this client evaluate, sooner or later."""
    wanted = job.spec.evaluation.clients
    known = wanted is not None and wanted.evaluator in client.evaluators
    return known and label_expressions.compile_expression(job.spec.selection.where)(client.labels)


class WaitingRoom:
    """The clients that wait, and for each running job those that it may draw.

    Nothing in it is stored: after a crash the clients check in again. Each check-in is looked at once for each running
    job that has selected, and each waiting client once when a job selects for the first time.
    """

    def __init__(self) -> None:
        # Dictionaries, because they keep the order of arrival: a fixed seed draws the same clients.
        self.clients: dict[str, ClientCheckedIn] = {}
        self.demands: dict[str, Demand] = {}
        self._pools: dict[tuple[str, AttemptKind], EligibleClients] = {}
        self._sizes: Counter[str] = Counter()

    def num_waiting(self, population: str) -> int:
        """How many clients of a population wait."""
        return self._sizes[population]

    def enter(self, client: ClientCheckedIn) -> None:
        """A client waits; if it waited before, what it says now counts."""
        self.leave(client.client_id)
        self.clients[client.client_id] = client
        self._sizes[client.population] += 1
        for pool in self._pools.values():
            pool.enter(client)

    def leave(self, client_id: str) -> ClientCheckedIn | None:
        """A client waits no longer."""
        client = self.clients.pop(client_id, None)
        if client is not None:
            for pool in self._pools.values():
                pool.leave(client_id)
            self._sizes[client.population] -= 1
        return client

    def follow(self, job: JobState, memory: ParticipationHistory | None) -> None:
        """Learns what a job wants now, and forgets who is eligible for one that does not run."""
        demand, job_id = make_demand(job), job.job_id
        if job.status is not JobStatus.RUNNING:
            for kind in AttemptKind:
                self._pools.pop((job_id, kind), None)
        before = self.demands.get(job_id)
        if before == demand and (before is None or demand is None or before.excluded is demand.excluded):
            return
        if before is None or demand is None or before.key != demand.key:  # else it keeps its turn
            self.demands.pop(job_id, None)
        if demand is not None:
            self.demands[job_id] = demand
            self._gather(demand, memory)

    def undo(self, job: JobState, memory: ParticipationHistory | None) -> None:
        """Learns what a job wants after a batch was lost: who was drawn in it takes part no more."""
        if (pool := self._pools.get((job.job_id, AttemptKind.TRAIN))) is not None:
            pool.exclude(None, {})
        self.follow(job, memory)
        if (demand := self.demands.get(job.job_id)) is not None:
            self._gather(demand, memory)

    def is_ready(self, job_id: str) -> bool:
        """Whether enough eligible clients wait for the job to draw from."""
        pool = self.demands[job_id].min_eligible
        return pool is not None and self.num_eligible(job_id) >= pool

    def num_eligible(self, job_id: str) -> int:
        """How many clients wait that a job which selects may draw now."""
        return len(self._pool(job_id))

    def num_resting(self, job_id: str) -> int:
        """How many clients wait that the job may draw in a later round only."""
        return self._pool(job_id).num_resting

    def num_spent(self, job_id: str) -> int:
        """How many clients wait that took part in as many rounds of the job as they may."""
        return self._pool(job_id).num_spent

    def draw(self, job_id: str, rng: np.random.Generator) -> list[ClientCheckedIn]:
        """Takes those whom the job's policy draws out of the room."""
        demand, pool = self.demands[job_id], self._pool(job_id)
        drawn = [pool[index] for index in demand.sampling.draw(pool, demand.target, rng)]
        for client in drawn:
            self.leave(client.client_id)
        return drawn

    def _pool(self, job_id: str) -> EligibleClients:
        return self._pools[job_id, self.demands[job_id].kind]

    def _gather(self, demand: Demand, memory: ParticipationHistory | None) -> None:
        """Has the pool for a demand; made anew if there is none, or if a batch that was lost had turned it too far."""
        name = (demand.key.job_id, demand.kind)
        pool = self._pools.get(name)
        if pool is None or pool.key > demand.key:
            pool = EligibleClients(demand.accepts, memory if demand.kind is AttemptKind.TRAIN else None, demand.key)
            for client in self.clients.values():
                pool.enter(client)
            self._pools[name] = pool
        pool.advance_to(demand.key)
        pool.exclude(demand.key, demand.excluded)
