"""Who is selected: the waiting room of free clients, what attempts demand of it, and uniform sampling."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedplat import labels
from fedplat.rounds.events import ClientCheckedIn
from fedplat.rounds.records import AttemptKey, JobState
from fedplat.rounds.states import AttemptKind, AttemptPhase, Reason


def uniform(client_ids: Sequence[str], count: int, rng: np.random.Generator) -> tuple[str, ...]:
    """`count` of the clients, each set equally likely; all of them if there are no more."""
    if len(client_ids) <= count:
        return tuple(client_ids)
    chosen: list[int] = rng.choice(len(client_ids), count, replace=False).tolist()
    return tuple(client_ids[i] for i in chosen)


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """What an attempt in selection wants: `target` clients, drawn once `pool` eligible ones wait.

    `codecs` are those that a client's software has to know.
    """

    key: AttemptKey
    kind: AttemptKind
    population: str
    where: str
    handler: str
    target: int
    pool: int
    codecs: frozenset[str] = frozenset()

    def accepts(self, client: ClientCheckedIn) -> bool:
        """Whether the client may take part."""
        installed = client.trainers if self.kind is AttemptKind.TRAIN else client.evaluators
        return (
            client.population == self.population
            and self.handler in installed
            and self.codecs <= client.codecs
            and labels.compile_expression(self.where)(client.labels)
        )


def demand_of(job: JobState) -> Demand | None:
    """What the job wants of the waiting room now; None when it does not select."""
    attempt = job.open_attempt
    if attempt is None or attempt.phase is not AttemptPhase.SELECTING:
        return None
    handler, pool = job.spec.trainer, max(job.spec.selection.wait_for, attempt.target)
    codecs = job.spec.compression.names
    if attempt.kind is AttemptKind.EVALUATE:
        assert job.spec.evaluation.clients is not None
        handler, pool, codecs = job.spec.evaluation.clients.evaluator, attempt.target, frozenset[str]()
    return Demand(
        attempt.key,
        attempt.kind,
        job.spec.population,
        job.spec.selection.where,
        handler,
        attempt.target,
        pool,
        codecs,
    )


class WaitingRoom:
    """The clients that wait, and for each demand those that are eligible.

    Nothing in it is stored: after a crash the clients check in again. Each check-in is looked at once per open
    demand, and each new demand once per waiting client.
    """

    def __init__(self) -> None:
        self.clients: dict[str, ClientCheckedIn] = {}
        self.demands: dict[str, Demand] = {}
        # Dictionaries, because they keep the order of arrival: a fixed seed draws the same clients.
        self._eligible: dict[str, dict[str, None]] = {}
        self._sizes: Counter[str] = Counter()

    def num_waiting(self, population: str) -> int:
        """How many clients of a population wait."""
        return self._sizes[population]

    def enter(self, client: ClientCheckedIn) -> None:
        """A client waits; if it waited before, what it says now counts."""
        self.leave(client.client_id)
        self.clients[client.client_id] = client
        self._sizes[client.population] += 1
        for job_id, demand in self.demands.items():
            if demand.accepts(client):
                self._eligible[job_id][client.client_id] = None

    def leave(self, client_id: str) -> ClientCheckedIn | None:
        """A client waits no longer."""
        for eligible in self._eligible.values():
            eligible.pop(client_id, None)
        client = self.clients.pop(client_id, None)
        if client is not None:
            self._sizes[client.population] -= 1
        return client

    def set_demand(self, job_id: str, demand: Demand | None) -> None:
        """Replaces what a job wants."""
        if self.demands.get(job_id) == demand:
            return
        self.demands.pop(job_id, None)
        self._eligible.pop(job_id, None)
        if demand is not None:
            self.demands[job_id] = demand
            self._eligible[job_id] = {c.client_id: None for c in self.clients.values() if demand.accepts(c)}

    def is_ready(self, job_id: str) -> bool:
        """Whether enough eligible clients wait for the job to draw from."""
        return len(self._eligible[job_id]) >= self.demands[job_id].pool

    def draw(self, job_id: str, rng: np.random.Generator) -> list[ClientCheckedIn]:
        """Takes a uniform sample of the eligible clients out of the room, at most as many as are wanted."""
        chosen = uniform(tuple(self._eligible[job_id]), self.demands[job_id].target, rng)
        taken = [self.leave(client_id) for client_id in chosen]
        return [client for client in taken if client is not None]

    def why_not(self, client: ClientCheckedIn, running: Sequence[JobState]) -> Reason:
        """Why a client got nothing, given the running jobs of its population."""
        if not running:
            return Reason.NO_WORK
        for job in running:
            by_label = labels.compile_expression(job.spec.selection.where)(client.labels)
            clients = job.spec.evaluation.clients
            evaluates = clients is not None and clients.evaluator in client.evaluators
            trains = job.spec.trainer in client.trainers and job.spec.compression.names <= client.codecs
            if by_label and (trains or evaluates):
                return Reason.NOT_SELECTED
        return Reason.NOT_ELIGIBLE
