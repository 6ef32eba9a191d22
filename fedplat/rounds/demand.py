"""The demand of an attempt for clients, and the waiting clients that a job may draw from.

A million clients may wait, and a thousand be drawn a hundred times. So entering and leaving take constant time, drawing
k clients uniformly takes O(k) time, and the structure is kept between rounds: a client is examined again only when its
rest has ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fedplat.config import label_expressions
from fedplat.rounds import records, states
from fedplat.rounds.events import ClientCheckedIn
from fedplat.rounds.participation import NEVER, ParticipationHistory
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
    drawn, and never those in `barred`. `gate` keeps out clients by what the kind of the job remembers of them.
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
