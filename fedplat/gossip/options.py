"""The table `[mode]` of a job whose silos exchange models with each other."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Topology = Literal[
    "ring", "torus", "grid", "exponential", "one-peer-exponential", "pairs", "one-pair", "complete", "edges"
]
Exchange = Literal["neighbours", "push-sum", "ring"]
Silo = Annotated[str, Meta(min_length=1, max_length=200)]
MIN_RING = 3
"""Minimum number of silos in a ring: from the mean of two models, each silo would know the other's."""


class Gossip(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="gossip"):
    """Decentralised training: silos exchange models with their neighbours, and no server holds a model."""

    topology: Topology = "ring"
    """Edges that are drawn in each round among the silos that take part. `"ring"`, `"torus"`, `"exponential"` (each
    silo and those at the distances 1, 2, 4, ...) and `"complete"` are the same in all rounds; `"one-peer-exponential"`
    has one of those distances a round, `"grid"` all pairs of a row and then of a column in turn, `"pairs"` a random
    matching, and `"one-pair"` one random pair. `"edges"` are the given ones."""
    exchange: Exchange = "neighbours"
    """`"neighbours"`: both ends of an edge get the other's model, and a lost message removes the edge for the round.
    `"push-sum"`: each link has one direction, so that a silo may send where it cannot receive. `"ring"`: all silos get
    the exact mean, by a ring all-reduce in which masks hide each model from the others; no topology."""
    edges: Annotated[tuple[tuple[Silo, Silo], ...], Meta(max_length=100_000)] = ()
    """Pairs of names of silos, with `topology = "edges"` only. On a server a name is the id of a client, as
    `fedplat client list` shows it (`edges = [["c-0a1b2c3d4e5f6071", "c-8192a3b4c5d6e7f8"]]`), and in a simulation the
    index of a silo (`edges = [["0", "1"]]`). With `exchange = "push-sum"` the first of a pair sends to the second."""
    gamma: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    """Step size of compressed gossip (CHOCO), required with `compression.uplink`; lower for a codec that omits more."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of random topologies."""
    tolerance: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.01
    """The silos agree if the root mean square distance of their models from the mean is at most this part of the root
    mean square norm. The mean is then exported; else the job fails."""
    settle_rounds: Annotated[int, Meta(ge=0, le=1_000_000)] = 100
    """Maximum number of rounds without training after the last one, until the silos agree."""

    def __post_init__(self) -> None:
        if self.exchange == "ring" and self.topology != "ring":
            raise ValueError(
                f'topology = "{self.topology}": a ring all-reduce has no other topology; expected exchange = '
                '"neighbours" or "push-sum"'
            )
        if bool(self.edges) != (self.topology == "edges"):
            raise ValueError(f'edges: expected with topology = "edges" only, and it is "{self.topology}"')
        if self.gamma is not None and self.exchange != "neighbours":
            raise ValueError(f'gamma = {self.gamma:g}: expected with exchange = "neighbours" only')
        found: set[tuple[str, str]] = set()
        for first, second in self.edges:
            if first == second:
                raise ValueError(f"edges: {first!r} is a neighbour of itself; expected two names")
            pair = (first, second) if self.is_directed or first < second else (second, first)
            if pair in found:
                raise ValueError(f"edges: {first!r} and {second!r} are there twice")
            found.add(pair)

    @property
    def named_silos(self) -> list[str]:
        """The names in the edges, sorted."""
        return sorted({name for edge in self.edges for name in edge})

    @property
    def is_directed(self) -> bool:
        """True if a link has one direction."""
        return self.exchange == "push-sum"

    def weight(self, staleness: int) -> float:
        """Return the weight of an update: 1, because no update is stale."""
        return 1.0
