"""The state of a decentralised job: what its coordinator knows of the silos, and how far their models are apart.

No process has all models. With d_ij = ‖x_i - x_j‖ for the confirmed edges and V = Σ_i ‖x_i - x̄‖², the Laplacian L of
these edges gives Σ d_ij² = tr(Xᵀ L X) ≥ λ₂(L) V. So V is at most Σ d_ij² / λ₂(L) if they connect all silos, and equal
to it for a complete graph. Of random pairs the mean of d_ij² is 2 n / (n - 1) times V / n: the estimate otherwise.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fedplat.config.decoding import prepare_type
from fedplat.gossip import messages
from fedplat.gossip.topology import MAX_MATRIX, Edges, Gossip

_ZERO = 1e-9


class Consensus(Struct, frozen=True, kw_only=True):
    """The root mean square distance of the silos' models from their mean, as far as their reports determine it.

    `bound` is the largest that it can be, infinite if the edges do not connect all silos; `estimate` assumes that
    neighbours are as far apart as any two silos. `norm` is the root mean square norm of the models.
    """

    bound: float = math.inf
    estimate: float = math.inf
    norm: float = 0.0

    @property
    def relative(self) -> float:
        """The bound, or without one the estimate, as a part of the norm."""
        distance = self.bound if math.isfinite(self.bound) else self.estimate
        if distance == 0.0:
            return 0.0
        return distance / self.norm if self.norm else math.inf


def measure_consensus(edges: Edges, squared_distances: Sequence[float], squared_norms: Sequence[float]) -> Consensus:
    """Return the distance of silos from their mean; with a distance for each edge, a norm for each silo.

    The bound is not computed for more than `MAX_MATRIX` silos.
    """
    count = len(squared_norms)
    norm = math.sqrt(math.fsum(squared_norms) / count) if count else 0.0
    if count < 2:
        return Consensus(bound=0.0, estimate=0.0, norm=norm)
    if not len(edges):
        return Consensus(norm=norm)
    total = math.fsum(squared_distances)
    estimate = math.sqrt(total / len(edges) * (count - 1) / (2 * count))
    connectivity = _connectivity(count, edges) if count <= MAX_MATRIX else 0.0
    bound = math.sqrt(total / connectivity / count) if connectivity > _ZERO else math.inf
    return Consensus(bound=bound, estimate=min(estimate, bound), norm=norm)


def distance_from_mean(models: npt.NDArray[np.floating]) -> float:
    """Return the root mean square distance of models from their mean, shape [silos, entries]: for simulations."""
    away = models - models.mean(axis=0)
    return math.sqrt(float(np.sum(away * away)) / len(models))


def _connectivity(count: int, edges: Edges) -> float:
    """Return λ₂ of the Laplacian, which is 0 if the edges do not connect all."""
    laplacian = np.zeros((count, count))
    laplacian[edges[:, 0], edges[:, 1]] = laplacian[edges[:, 1], edges[:, 0]] = -1.0
    np.fill_diagonal(laplacian, -laplacian.sum(axis=1))
    return float(np.linalg.eigvalsh(laplacian)[1])


class GossipPhase(enum.Enum):
    """What the silos of a job are asked for."""

    ANNOUNCING = "ANNOUNCING"
    EXCHANGING = "EXCHANGING"
    OFFERING_KEYS = "OFFERING_KEYS"
    REDUCING = "REDUCING"
    ENDED = "ENDED"


class GossipRules(Struct, frozen=True, kw_only=True):
    """What a job file says about a decentralised job.

    A round begins its exchange when `goal` silos have announced a model, or after `training_s` if there are `minimum`.
    `exchange_s` is the time for each later phase. The job fails after `max_attempts` phases in a row without enough
    silos (0: never). With `by_examples` a ring weighs models by their silos' examples.
    """

    options: Gossip
    rounds: int
    goal: int
    minimum: int
    training_s: float
    exchange_s: float
    max_attempts: int = 0
    by_examples: bool = False


@dataclasses.dataclass(frozen=True)
class GossipState:
    """The state of a job.

    `rows` are not yet mixed. In push-sum `masses` are the weights of silos that follow from all rows so far, 1 at
    first: a silo's model is its sum divided by its weight.

    For each receiver of the round, `senders` are those whose models it gets, `awaited` those of which it has reported
    neither success nor failure, and `received` has the squared distances of those that it has got.

    `announced`, `edges`, `offers`, `ring`, `completed` and `broken` are of the current round or attempt; `away` are
    silos that left and are still away, and `members` those that have announced a model or come back since. `unfinished`
    are the offers of the last attempt of the round, of which no mean stands, and `late` the means of it that silos have
    reported. `suspects` are pairs of silos between which rings of this round broke, `excluded` silos that no ring of it
    has any more, and `restarts` counts how often each silo has given up a ring of it by itself. `left_out` are silos
    whose numbers exclude them, and why. `consensus` is of the last exchange or ring, `average` the last committed mean,
    and `reason` why a phase was repeated.
    """

    rules: GossipRules
    phase: GossipPhase = GossipPhase.ENDED
    round: int = 0
    attempt: int = 0
    timer: int = 0
    failures: int = 0
    announced: Mapping[str, messages.Announcement] = dataclasses.field(default_factory=dict[str, messages.Announcement])
    away: frozenset[str] = frozenset()
    members: frozenset[str] = frozenset()
    edges: frozenset[tuple[str, str]] = frozenset()
    senders: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict[str, frozenset[str]])
    awaited: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict[str, frozenset[str]])
    received: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict[str, Mapping[str, float]])
    rows: Mapping[str, messages.CommitRow] = dataclasses.field(default_factory=dict[str, messages.CommitRow])
    masses: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    offers: Mapping[str, messages.KeyOffered] = dataclasses.field(default_factory=dict[str, messages.KeyOffered])
    unfinished: Mapping[str, messages.KeyOffered] = dataclasses.field(default_factory=dict[str, messages.KeyOffered])
    late: Mapping[str, messages.RingCompleted] = dataclasses.field(default_factory=dict[str, messages.RingCompleted])
    ring: messages.BeginRing | None = None
    completed: Mapping[str, messages.RingCompleted] = dataclasses.field(
        default_factory=dict[str, messages.RingCompleted]
    )
    broken: Mapping[str, messages.RingBroken] = dataclasses.field(default_factory=dict[str, messages.RingBroken])
    suspects: frozenset[tuple[str, str]] = frozenset()
    excluded: frozenset[str] = frozenset()
    restarts: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    confirmed: int = 0
    consensus: Consensus = dataclasses.field(default_factory=Consensus)
    average: messages.CommitAverage | None = None
    reason: str = ""
    outcome: messages.EndJob | None = None

    @property
    def present(self) -> list[str]:
        """The silos that have announced a model of the round and have not left, sorted."""
        return sorted(self.announced.keys() - self.away)

    @property
    def candidates(self) -> list[str]:
        """The silos that a ring of the round may have, sorted; those of a ring whose mean a silo alone has reported."""
        possible = self.unfinished if self.late else self.announced
        return [name for name in self.present if name in possible and name not in self.excluded]

    @property
    def has_all(self) -> bool:
        """True if all silos that have not left have announced a model, and these are enough.

        A silo that has taken the place of one that left is waited for, as the others are.
        """
        goal = self.rules.goal
        expected = max(goal - len(self.away), min(goal, len(self.members)))
        return len(self.present) >= max(self.rules.minimum, expected)


def state_to_builtins(state: GossipState) -> dict[str, Any]:
    """Return what is stored of a state. Infinite distances, which JSON does not support, are left out."""
    names = (field.name for field in dataclasses.fields(state))
    stored = {name: msgspec.to_builtins(getattr(state, name)) for name in names if name != "rules"}
    stored["consensus"] = {name: x for name, x in stored["consensus"].items() if math.isfinite(x)}
    return stored


def state_from_builtins(stored: object, rules: GossipRules) -> GossipState:
    """Return a state from its stored form. Raises `msgspec.ValidationError` if it has none."""
    if not isinstance(stored, dict):
        raise msgspec.ValidationError(f"Expected `object`, got `{type(stored).__name__}`")
    whole = {**stored, "rules": msgspec.to_builtins(rules)}
    return msgspec.convert(whole, prepare_type(GossipState))
