"""Selection: the waiting room of free clients, the demands of attempts, the draw, and reservations.

Without them, an attempt that needs every client of a population starves: each client that has ended its work for one
small job is drawn for the next one. So the attempt that has waited longest, for `PATIENCE_S` at least, reserves the
waiting clients that it may draw, and other attempts leave them to it, under two conditions:

- The clients that wait and those that work for a job of the population would be enough, or were within `RETURN_S`: a
  client that has just reported needs a moment to check in again. So an attempt whose clients are away stops no other.
- Its time for selection is not over. Then it ends or begins, and the others are free until it has waited again.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from fedplat import sampling
from fedplat.config import label_expressions
from fedplat.rounds import states
from fedplat.rounds.demand import Demand, EligibleClients, ParticipationHistory
from fedplat.rounds.events import CandidatesDrawn, ClientCheckedIn
from fedplat.rounds.protocols.base import protocol_of, training_of
from fedplat.rounds.records import Attempt, AttemptKey, JobState

_NAMED = 5
"""Maximum number of trainers that a text names."""


def make_demand(job: JobState) -> Demand | None:
    """Return what the job demands of the waiting room now; None if it needs no clients."""
    attempt = job.open_attempt
    return protocol_of(job, attempt.kind).demand(job, attempt) if attempt is not None else None


def training_demand(job: JobState, attempt: Attempt, target: int, min_eligible: int | None) -> Demand:
    """Return the demand of an attempt to train."""
    spec = job.spec
    return Demand(
        attempt.key,
        attempt.kind,
        spec.population,
        spec.selection.where,
        spec.trainer,
        target,
        min_eligible,
        spec.compression.names,
        spec.selection.sampling,
        attempt.assignments,
        job.algorithms,
        training_of(job).features,
        least=max(attempt.minimum, spec.selection.wait_for),
        digest=job.digest,
        needs_approval=spec.needs_approval,
    )


def _approves(client: ClientCheckedIn, job: JobState) -> bool:
    return client.approves(job.digest, is_needed=job.spec.needs_approval)


def may_train(job: JobState, client: ClientCheckedIn) -> bool:
    """Return whether the job may have this client train, now or later."""
    has_plugins = job.spec.compression.names <= client.codecs and job.algorithms <= client.algorithms
    supported = job.spec.trainer in client.trainers and has_plugins and training_of(job).features <= client.features
    accepts = label_expressions.compile_expression(job.spec.selection.where)
    return supported and _approves(client, job) and accepts(client.labels)


def list_able(room: WaitingRoom, job: JobState) -> list[str]:
    """Return the waiting clients that a job may have train, now or later. Examines all waiting clients."""
    waiting = room.clients.values()
    return [each.client_id for each in waiting if each.population == job.spec.population and may_train(job, each)]


def may_evaluate(job: JobState, client: ClientCheckedIn) -> bool:
    """Return whether the job may have this client evaluate, now or later."""
    evaluation = job.spec.evaluation.clients
    supported = evaluation is not None and evaluation.evaluator in client.evaluators
    accepts = label_expressions.compile_expression(job.spec.selection.where)
    return supported and _approves(client, job) and accepts(client.labels)


def describe_excluded(job: JobState, event: CandidatesDrawn) -> str:
    """Return why other waiting clients were not available for selection."""
    text, options = f"; {event.unlike}" if event.unlike else "", job.spec.selection
    if event.num_unable:
        needed = [f"codecs.{name}" for name in sorted(job.spec.compression.names)]
        needed += [f"algorithms.{name}" for name in sorted(job.algorithms)]
        needed += [f"{name} (upgrade the client)" for name in sorted(training_of(job).features)]
        text += f"; {event.num_unable} more do not have {' and '.join(needed)}"
    if event.num_resting:
        text += (
            f"; {event.num_resting} more must rest (selection.min_separation = {options.min_separation}, "
            f"for which {(options.min_separation + 1) * options.target} eligible clients are needed)"
        )
    if event.num_spent:
        most = job.spec.max_participations
        text += (
            f"; {event.num_spent} more took part in as many rounds as they may (privacy.max_participations = {most})"
        )
    return text


class WaitingRoom:
    """The waiting clients, and for each running job those that it may draw.

    Nothing in it is stored: after a crash the clients check in again. Each check-in is examined once for each running
    job that has selected, and each waiting client once when a job selects for the first time.
    """

    def __init__(self) -> None:
        # Dictionaries keep the order of arrival, so that a fixed seed draws the same clients.
        self.clients: dict[str, ClientCheckedIn] = {}
        self.demands: dict[str, Demand] = {}
        self._eligible: dict[tuple[str, states.AttemptKind], EligibleClients] = {}
        self._num_waiting: Counter[str] = Counter()
        # By running job: the clients that have declined it, with their session.
        self._declined: dict[str, dict[str, int]] = {}

    def num_waiting(self, population: str) -> int:
        """Return the number of waiting clients of a population."""
        return self._num_waiting[population]

    def count_by_population(self) -> Mapping[str, int]:
        """Return the number of waiting clients of each population that has some."""
        return {name: count for name, count in self._num_waiting.items() if count}

    def num_available(self, job_id: str) -> int:
        """Return the number of waiting clients that the job may have train now; 0 until it first selects."""
        eligible = self._eligible.get((job_id, states.AttemptKind.TRAIN))
        return len(eligible) if eligible is not None else 0

    def enter(self, client: ClientCheckedIn) -> None:
        """Add a waiting client; it replaces the client's earlier check-in."""
        self.leave(client.client_id)
        self.clients[client.client_id] = client
        self._num_waiting[client.population] += 1
        for eligible in self._eligible.values():
            eligible.enter(client)

    def leave(self, client_id: str) -> ClientCheckedIn | None:
        """Remove a client that no longer waits, and return its check-in, if it was waiting."""
        client = self.clients.pop(client_id, None)
        if client is not None:
            for eligible in self._eligible.values():
                eligible.leave(client_id)
            self._num_waiting[client.population] -= 1
        return client

    def decline(self, job_id: str, client_id: str, session: int) -> None:
        """Do not draw a client for a job again in this session of the client, unless the job is paused and resumed."""
        self._declined.setdefault(job_id, {})[client_id] = session
        waiting, eligible = self.clients.get(client_id), self._eligible.get((job_id, states.AttemptKind.TRAIN))
        if waiting is not None and eligible is not None:
            eligible.leave(client_id)
            eligible.enter(waiting)

    def has_declined(self, job_id: str, client: ClientCheckedIn) -> bool:
        """Return whether a client has declined a job in its present session."""
        return self._declined.get(job_id, {}).get(client.client_id) == client.session

    def follow(self, job: JobState, history: ParticipationHistory | None) -> None:
        """Update what a job demands, and discard the eligible clients of a job that does not run."""
        demand, job_id = make_demand(job), job.job_id
        if job.status is not states.JobStatus.RUNNING:
            self._declined.pop(job_id, None)
            for kind in states.AttemptKind:
                self._eligible.pop((job_id, kind), None)
        before = self.demands.get(job_id)
        if before == demand and (before is None or demand is None or before.excluded is demand.excluded):
            return
        if before is None or demand is None or before.key != demand.key:  # otherwise it keeps its position
            self.demands.pop(job_id, None)
        if demand is not None:
            self.demands[job_id] = demand
            self._prepare(demand, history)

    def undo(self, job: JobState, history: ParticipationHistory | None) -> None:
        """Restore what a job demands after a batch was lost: the clients drawn in it no longer take part."""
        for kind in states.AttemptKind:
            if (eligible := self._eligible.get((job.job_id, kind))) is not None:
                eligible.exclude(None, {})
        self.follow(job, history)
        if (demand := self.demands.get(job.job_id)) is not None:
            self._prepare(demand, history)

    def is_ready(self, job_id: str) -> bool:
        """Return whether enough eligible clients wait for the job to draw from."""
        demand, num_eligible = self.demands[job_id], self.num_eligible(job_id)
        if demand.min_eligible is None or num_eligible < min(demand.least, demand.min_eligible):
            return False
        return num_eligible + self.num_declined(job_id) >= demand.min_eligible

    def have_common_clients(self, one: str, other: str) -> bool:
        """Return whether two selecting jobs could draw the same waiting client."""
        small, large = sorted((self._eligible_for(one), self._eligible_for(other)), key=len)
        return any(small[index].client_id in large for index in range(len(small)))

    def num_eligible(self, job_id: str) -> int:
        """Return the number of waiting clients that a selecting job may draw now."""
        return len(self._eligible_for(job_id))

    def num_resting(self, job_id: str) -> int:
        """Return the number of waiting clients that the job may draw only in a later round."""
        return self._eligible_for(job_id).num_resting

    def num_spent(self, job_id: str) -> int:
        """Return the number of waiting clients that have reached the job's participation limit."""
        return self._eligible_for(job_id).num_spent

    def num_declined(self, job_id: str) -> int:
        """Return the number of waiting clients that the job could draw, but that have declined it."""
        return self._eligible_for(job_id).num_declined

    def count_unable(self, job_id: str) -> int:
        """Return the number of waiting clients that the job may not draw only for lack of a plugin or a feature.

        Examines all waiting clients of a job that requires one.
        """
        demand = self.demands[job_id]
        return sum(map(demand.misses, self.clients.values())) if demand.has_requirements else 0

    def describe_unlike(self, job_id: str) -> str:
        """Describe the waiting clients of the population without the trainer, with other labels, or that do not run it.

        Empty without any. Examines all waiting clients.
        """
        demand, found = self.demands[job_id], list[str]()
        ours = [client for client in self.clients.values() if client.population == demand.population]
        others = [client for client in ours if demand.handler not in demand.role.list_installed(client)]
        if others:
            names = sorted({name for client in others for name in demand.role.list_installed(client)})
            known = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
            found.append(
                f"{len(others)} more do not have the {demand.role.name} {demand.handler}, but {known or 'none'}"
            )
        accepts = label_expressions.compile_expression(demand.where)
        if num_unlike := sum(not accepts(client.labels) for client in ours):
            found.append(f"{num_unlike} more do not satisfy selection.where")
        if num_waiting := sum(not client.approves(demand.digest, is_needed=demand.needs_approval) for client in ours):
            found.append(f"{num_waiting} more wait until their owners approve the job")
        if num_declined := self.num_declined(job_id):
            found.append(
                f"{num_declined} more have refused the job: it asks them again when they restart or it resumes"
            )
        return "; ".join(found)

    def draw(self, job_id: str, rng: np.random.Generator) -> list[ClientCheckedIn]:
        """Draw clients by the job's policy, and remove them from the waiting room.

        Raises `PluginError` or `UserCodeError` if the policy of a plugin fails; then no client is removed.
        """
        demand, eligible = self.demands[job_id], self._eligible_for(job_id)
        drawn = [eligible[index] for index in sampling.draw(demand.sampling, eligible, demand.target, rng)]
        for client in drawn:
            self.leave(client.client_id)
        return drawn

    def _eligible_for(self, job_id: str) -> EligibleClients:
        return self._eligible[job_id, self.demands[job_id].kind]

    def _prepare(self, demand: Demand, history: ParticipationHistory | None) -> None:
        """Prepare the eligible clients of a demand; rebuild them if a lost batch had advanced them too far."""
        name = (demand.key.job_id, demand.kind)
        eligible = self._eligible.get(name)
        is_other = eligible is not None and eligible.key < demand.key and (demand.cohort is not None or demand.barred)
        # Another attempt, another state of the clocks, or a changed job file accepts other clients.
        is_other = is_other or (eligible is not None and eligible.digest != demand.digest)
        if eligible is None or eligible.key > demand.key or is_other or eligible.gate != demand.gate:
            past = history if demand.role.counts else None
            eligible = EligibleClients(demand.accepts, past, demand.key, demand.gate)
            eligible.digest = demand.digest
            if demand.role.counts:
                eligible.has_declined = functools.partial(self.has_declined, demand.key.job_id)
            for client in self.clients.values():
                eligible.enter(client)
            self._eligible[name] = eligible
        eligible.advance_to(demand.key)
        eligible.exclude(demand.key, demand.excluded)


PATIENCE_S = 2.0
"""The time that an attempt waits before it reserves clients."""
RETURN_S = 5.0
"""The time within which a client is expected to check in after its work."""


class Reservations:
    """For each population, the job that has reserved its clients. Nothing in it is stored."""

    def __init__(self, room: WaitingRoom) -> None:
        self._room = room
        self._holders: dict[str, str] = {}
        self._reachable: dict[str, tuple[AttemptKey, float]] = {}
        """By job: its attempt, and the last moment at which there were enough clients for it."""

    def update(self, find_job: Callable[[str], JobState | None], num_busy: Mapping[str, int], now: float) -> None:
        """Find the attempts that reserve clients now. `num_busy` is the number of working clients by population."""
        demands = self._room.demands
        self._holders.clear()
        self._reachable = {job_id: known for job_id, known in self._reachable.items() if job_id in demands}
        for job_id, demand in demands.items():  # the one that has waited longest is first
            job = find_job(job_id)
            attempt = job.open_attempt if job is not None else None
            if demand.population in self._holders or attempt is None or demand.min_eligible is None:
                continue
            if attempt.opened_at + PATIENCE_S <= now < attempt.selection_ends_at and self._may_reserve(
                job_id, attempt, num_busy.get(demand.population, 0), now
            ):
                self._holders[demand.population] = job_id

    def blocks(self, job_id: str) -> bool:
        """Return whether a job must leave the clients that it could draw to the one that has reserved them."""
        holder = self._holders.get(self._room.demands[job_id].population)
        return holder is not None and holder != job_id and self._room.have_common_clients(holder, job_id)

    def _may_reserve(self, job_id: str, attempt: Attempt, num_busy: int, now: float) -> bool:
        waiting, needed = self._room.num_eligible(job_id), self._room.demands[job_id].min_eligible
        assert needed is not None
        is_late = now >= (attempt.opened_at + attempt.selection_ends_at) / 2
        if is_late and waiting + num_busy < needed:  # then the attempt begins with fewer when its time is over
            needed = attempt.minimum
        if waiting > needed:
            return False
        if waiting + num_busy >= needed:
            self._reachable[job_id] = attempt.key, now
        key, reachable_at = self._reachable.get(job_id, (None, now))
        return key == attempt.key and now - reachable_at <= RETURN_S
