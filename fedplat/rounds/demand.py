"""The demand of an attempt for clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from fedplat.config import label_expressions
from fedplat.rounds.eligible import Gate
from fedplat.rounds.events import ClientCheckedIn
from fedplat.rounds.records import AttemptKey
from fedplat.rounds.states import AttemptKind
from fedplat.sampling import Policy


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
    drawn when the time for selection is over. `codecs`, `algorithms` and `features` are
    those that a client must support. Clients in `excluded` are not drawn: they take part already. If there is a
    `cohort`, only its clients are drawn, and never those in `barred`. `gate` is that of a job with clocks.
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
