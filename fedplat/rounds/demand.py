"""The demand of an attempt for clients, those that wait, and when each took part. Pure functions.

A million clients may wait, and a thousand be drawn a hundred times. So entering and leaving take constant time, drawing
k clients uniformly takes O(k) time, and the structure is kept between rounds: a client is examined again only when its
rest has ended.

The record of participation is kept beside the jobs' states, so that no step copies it. It has only clients that took
part, and is derived from the stored assignments alone, so that a restarted server rebuilds the same history (`recall`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from fedplat.config import label_expressions
from fedplat.job import JobSpec
from fedplat.rounds import records, states
from fedplat.rounds.events import ClientCheckedIn
from fedplat.sampling import ClientHistory, Policy


@dataclasses.dataclass(frozen=True, slots=True)
class ClientRole:
    """What clients are for an attempt: `list_installed` returns the names that one may be asked for.

    `counts`: it is a participation, after which a client must rest, and which it may decline.
    """

    name: str
    list_installed: Callable[[ClientCheckedIn], frozenset[str]]
    counts: bool


TRAINER = ClientRole("trainer", lambda client: client.trainers, counts=True)
EVALUATOR = ClientRole("evaluator", lambda client: client.evaluators, counts=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """The demand of an attempt: `target` clients, drawn by `sampling` once `min_eligible` eligible clients wait.

    If others wait that have declined the job, `least` eligible clients are enough. Without `min_eligible` they are
    drawn when the time for selection is over. `codecs`, `algorithms` and `features` are those that a client must
    support. Clients in `excluded` are not drawn: they take part already. If there is a `cohort`, only its clients are
    drawn, and never those in `barred`. `gate` keeps out clients by what the kind of the job remembers of them. `digest`
    is that of the job, which owners may have to approve; if it `needs_approval`, all of them.
    """

    key: records.AttemptKey
    kind: states.AttemptKind
    population: str
    where: str
    handler: str
    target: int
    min_eligible: int | None
    codecs: frozenset[str]
    sampling: Policy
    excluded: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object], compare=False)
    algorithms: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    least: int = 1
    cohort: frozenset[str] | None = dataclasses.field(default=None, compare=False)
    barred: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    gate: Gate | None = None
    role: ClientRole = TRAINER
    digest: str = ""
    needs_approval: bool = False

    @property
    def has_requirements(self) -> bool:
        """True if it depends on more than names and labels whether a client may take part."""
        return bool(self.codecs or self.algorithms or self.features)

    def accepts(self, client: ClientCheckedIn) -> bool:
        """Return whether the client may take part."""
        return self._wants(client) and self._supports(client)

    def misses(self, client: ClientCheckedIn) -> bool:
        """Return whether the client may not take part only because it lacks a codec, an algorithm or a feature."""
        return self._wants(client) and not self._supports(client)

    def _supports(self, client: ClientCheckedIn) -> bool:
        has_plugins = self.codecs <= client.codecs and self.algorithms <= client.algorithms
        return has_plugins and self.features <= client.features

    def _wants(self, client: ClientCheckedIn) -> bool:
        return (
            client.population == self.population
            and (self.cohort is None or client.client_id in self.cohort)
            and client.client_id not in self.barred
            and client.approves(self.digest, is_needed=self.needs_approval)
            and (self.gate is None or self.gate.admits(client.client_id))
            and self.handler in self.role.list_installed(client)
            and label_expressions.compile_expression(self.where)(client.labels)
        )


Accepts = Callable[[ClientCheckedIn], bool]


class Gate(NamedTuple):
    """Who may be drawn: none of `withheld`, and only `members` if the set has no room for others."""

    withheld: frozenset[str]
    members: frozenset[str] | None

    def admits(self, client_id: str) -> bool:
        """Return whether a client may be drawn."""
        return client_id not in self.withheld and (self.members is None or client_id in self.members)


class EligibleClients:
    """The eligible clients of a round, as `sampling.Candidates`, and separately those that must rest.

    Eligible clients are stored in a list without gaps: the last client replaces one that leaves. The order, and so the
    clients drawn with a seed, depends only on the sequence of clients that entered and left.
    """

    def __init__(
        self, accepts: Accepts, history: ParticipationHistory | None, key: records.AttemptKey, gate: Gate | None = None
    ) -> None:
        self.key = key
        self.gate = gate
        self.digest = ""
        self.has_declined: Accepts = lambda client: False
        self._accepts = accepts
        self._declined: set[str] = set()
        self._history = history
        self._clients: list[ClientCheckedIn] = []
        self._indices: dict[str, int] = {}
        # Resting clients by the first round that may draw them, and clients that this round may draw but not the next.
        self._resting: dict[int, dict[str, ClientCheckedIn]] = {}
        self._resting_until: dict[str, int] = {}
        self._this_round_only: dict[str, None] = {}
        # The resting clients that are at their limit: only another attempt at this round may draw them.
        self._at_limit: set[str] = set()
        # The clients that already take part in the attempt, and those of them that wait again.
        self._attempt: records.AttemptKey | None = None
        self._excluded: Mapping[str, object] = {}
        self._excluded_waiting: dict[str, ClientCheckedIn] = {}

    @property
    def round(self) -> int:
        """The round for which clients are drawn."""
        return self.key.round

    def __len__(self) -> int:
        """Return the number of clients that may be drawn."""
        return len(self._clients)

    @property
    def num_resting(self) -> int:
        """The number of other waiting clients that a later round may draw."""
        return len(self._resting_until) - len(self._at_limit)

    @property
    def num_spent(self) -> int:
        """The number of other waiting clients that have reached the participation limit."""
        return len(self._at_limit)

    @property
    def num_declined(self) -> int:
        """The number of other waiting clients that do not take part in the job, as they have said."""
        return len(self._declined)

    def __contains__(self, client_id: str) -> bool:
        """Return whether a client may be drawn."""
        return client_id in self._indices

    def __getitem__(self, index: int) -> ClientCheckedIn:
        return self._clients[index]

    @property
    def utilities(self) -> Sequence[float]:
        """The sum of utilities per round, as in `sampling.Candidates`."""
        return self._history.utilities if self._history is not None else ()

    def values_of(self, label: str) -> list[str | None]:
        """Return one label of each client that may be drawn."""
        return [client.labels.get(label) for client in self._clients]

    def list_known(self) -> list[tuple[int, ClientHistory]]:
        """Return index and history of each client that took part before.

        Iterates over the participants or over the eligible clients, whichever are fewer.
        """
        pasts = self._history.clients if self._history is not None else {}
        indices = self._indices
        if len(pasts) < len(indices):
            found = [(indices[client_id], past) for client_id, past in pasts.items() if client_id in indices]
        else:
            found = [(index, pasts[client_id]) for client_id, index in indices.items() if client_id in pasts]
        return sorted(found, key=lambda each: each[0])

    def enter(self, client: ClientCheckedIn) -> None:
        """Add a waiting client that is not in it yet, if the job accepts it."""
        if self._accepts(client):
            if self.has_declined(client):
                self._declined.add(client.client_id)
            else:
                self._put(client)

    def leave(self, client_id: str) -> None:
        """Remove a client that no longer waits; clients that are not in it are ignored."""
        self._declined.discard(client_id)
        index = self._indices.pop(client_id, None)
        if index is not None:
            last = self._clients.pop()
            if index < len(self._clients):
                self._clients[index] = last
                self._indices[last.client_id] = index
            self._this_round_only.pop(client_id, None)
        elif (until := self._resting_until.pop(client_id, None)) is not None:
            del self._resting[until][client_id]
            self._at_limit.discard(client_id)
        else:
            self._excluded_waiting.pop(client_id, None)

    def advance_to(self, key: records.AttemptKey) -> None:
        """Move on to a later attempt, and add the clients that may be drawn for it.

        These are the clients whose rest is over, and those of a failed attempt at the same round.
        """
        assert key >= self.key
        if key == self.key:
            return
        returning = [self._clients[self._indices[client_id]] for client_id in self._this_round_only]
        # Clients of the latest round rest longest, except those at their limit.
        latest = max((until for until in self._resting if until < NEVER), default=0)
        if key.round > self.key.round:
            latest = 0
        self.key = key
        for until in [until for until in self._resting if until <= key.round or until == latest]:
            returning += self._resting[until].values()
        for client in returning:
            self.leave(client.client_id)
            self._put(client)
        self._resting = {until: clients for until, clients in self._resting.items() if clients}

    def exclude(self, attempt: records.AttemptKey | None, excluded: Mapping[str, object]) -> None:
        """Exclude the participants of an attempt; while it lasts, only newly drawn clients may be added to them."""
        self._excluded = excluded
        if attempt == self._attempt:
            return
        self._attempt = attempt
        returning = [
            *self._excluded_waiting.values(),
            *(self._clients[self._indices[name]] for name in excluded if name in self._indices),
        ]
        for client in returning:
            self.leave(client.client_id)
            self._put(client)

    def _put(self, client: ClientCheckedIn) -> None:
        client_id, history = client.client_id, self._history
        if history is not None and (rest := history.rounds_to_rest(client_id, self.round, self.key.number)):
            self._resting_until[client_id] = until = min(self.round + rest, NEVER)
            self._resting.setdefault(until, {})[client_id] = client
            if history.is_at_limit(client_id):
                self._at_limit.add(client_id)
            return
        if client_id in self._excluded:
            self._excluded_waiting[client_id] = client
            return
        if history is not None and history.rounds_to_rest(client_id, self.round + 1):
            self._this_round_only[client_id] = None
        self._indices[client_id] = len(self._clients)
        self._clients.append(client)


@dataclasses.dataclass(frozen=True, slots=True)
class Participation:
    """One assignment of an attempt to train. `took_s` is None unless it was reported."""

    client_id: str
    round: int
    attempt: int
    num_examples: float
    took_s: float | None
    metrics: Mapping[str, float]


def participations_of(assignments: Iterable[records.Assignment]) -> list[Participation]:
    """Return assignments as participations: first the reported ones in the order of their reports, then the others."""
    ordered = sorted(assignments, key=lambda each: (each.report_number is None, each.report_number or 0))
    return [
        Participation(each.client_id, each.key.round, each.key.number, each.num_examples, each.took_s, each.metrics)
        for each in ordered
    ]


NEVER = 1 << 40
"""A round number beyond all rounds."""


class ParticipationHistory:
    """The participation history of one job's clients. `min_separation`: rounds that a client rests after taking part.

    A client that was assigned in round r is not drawn before round r + min_separation + 1, and never again after it was
    assigned in `max_participations` rounds (0: no limit). Another attempt at round r may draw it, because the attempt
    before had no result. A round counts even if the client's update was lost or is still missing: when the next round
    draws, it is unknown whether the version contains it, and counting too much costs utility, not privacy.
    """

    def __init__(self, min_separation: int = 0, max_participations: int = 0) -> None:
        self.clients: dict[str, ClientHistory] = {}
        self.utilities: list[float] = []
        self._rest = min_separation
        self._max_rounds = max_participations
        self._reported: dict[str, tuple[int, int]] = {}

    @classmethod
    def recall(cls, spec: JobSpec, participations: Iterable[Participation]) -> ParticipationHistory | None:
        """Rebuild the history from stored participations, in order of rounds; None if the job does not need one."""
        if not spec.remembers:
            return None
        history = cls(spec.selection.min_separation, spec.max_participations)
        for each in participations:
            history.record(each)
        return history

    def record(self, now: Participation) -> bool:
        """Record the current state of a participation and return whether it is new. Recording is idempotent."""
        key = (now.round, now.attempt)
        past = self.clients.get(now.client_id)
        is_new = past is None or (past.round, past.attempt) < key
        if past is None:
            past = self.clients[now.client_id] = ClientHistory(*key)
        elif is_new:
            past.num_rounds += past.round < now.round
            past.round, past.attempt = key
            past.num_participations += 1
        if now.took_s is not None and self._reported.get(now.client_id, (0, 0)) < key:
            self._reported[now.client_id] = key
            past.num_examples, past.duration_s, past.loss = now.num_examples, now.took_s, _loss(now.metrics)
            self.utilities += [0.0] * (now.round + 1 - len(self.utilities))
            self.utilities[now.round] += past.utility
        return is_new

    def rounds_to_rest(self, client_id: str, round_: int, attempt: int = 0) -> int:
        """Return how many rounds must pass before the client may be drawn; 0 if this attempt may draw it.

        `NEVER` for a client at its limit, once its rest after its last round is over. Until then the result is finite,
        because another attempt at that round may draw it.
        """
        past = self.clients.get(client_id)
        if past is None or not (self._rest or self._max_rounds) or (past.round == round_ and past.attempt != attempt):
            return 0
        is_at_limit = self.is_at_limit(client_id)
        if past.round + self._rest < round_:
            return NEVER if is_at_limit else 0
        return past.round + self._rest + 1 - round_ if self._rest or is_at_limit else 0

    def is_at_limit(self, client_id: str) -> bool:
        """Return whether the client took part in as many rounds as it may."""
        past = self.clients.get(client_id)
        return past is not None and 0 < self._max_rounds <= past.num_rounds


def rounds_to_recall(job: records.JobState) -> range:
    """Return the rounds whose participations a history needs; an empty range if the job needs no history."""
    spec, selection = job.spec, job.spec.selection
    if job.status in states.ENDED_JOBS or not spec.remembers:
        return range(0)
    whole = selection.uses_history or spec.max_participations > 0
    first = 1 if whole else max(1, job.round + 1 - selection.min_separation)
    return range(first, job.round + 2)


def _loss(metrics: Mapping[str, float]) -> float | None:
    """Return the root mean square of the loss from the metrics that the client reports; negative values count as 0."""
    squared, mean = metrics.get("loss_squared"), metrics.get("loss")
    if squared is not None and math.isfinite(squared):
        return math.sqrt(max(squared, 0.0))
    return max(mean, 0.0) if mean is not None and math.isfinite(mean) else None
