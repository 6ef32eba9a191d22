"""The table `[mode]` of a decentralised job, and its topologies: the edges of a round, and their mixing weights.

Edges are pairs of positions in the sorted names of the silos, int64 [edges, 2]: the lower position first, or sender
and receiver of directed links. Sources: ring and torus as in Lian et al. 2017 (D-PSGD, arXiv 1705.09056); exponential
graphs and one peer of them a round in Assran et al. 2019 (SGP, arXiv 1811.10792), Section 3; random pairs in Boyd et
al. 2006, "Randomized Gossip Algorithms"; rows and columns of a grid in Ryabinin et al. 2021 (Moshpit SGD, arXiv
2103.03239).

An edge counts only if it is confirmed, so lost messages change which edges there are, never the sums of the weights:
with Metropolis weights each row and column of W adds up to 1, and the mean of the models does not change; with
push-sum each column does, and the sums of numerators and weights do not change.

Sources: Xiao, Boyd and Kim 2007, "Distributed average consensus with least-mean-square deviation", equation 9
(Metropolis); Kempe, Dobra and Gehrke 2003 and Assran et al. 2019, arXiv 1811.10792, Algorithm 1 (push-sum).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from fedplat.texts import quote

Edges = npt.NDArray[np.int64]
_SHOWN = 3


def draw_edges(options: Gossip, names: Sequence[str], round_number: int) -> Edges:
    """Return the edges of a round (from 1) among the silos `names`, without duplicates and in order.

    Positions are those in `names`, which must be sorted, so that everyone draws the same.

    >>> draw_edges(Gossip(), ["a", "b", "c", "d"], 1).tolist()
    [[0, 1], [0, 3], [1, 2], [2, 3]]
    """
    if any(first >= second for first, second in itertools.pairwise(names)):
        raise ValueError("the names of the silos are not sorted, or one is there twice")
    count, turn = len(names), round_number - 1
    if count < 2:
        return np.empty((0, 2), np.int64)
    if options.topology == "edges":
        return _clean(_keep_present(options.edges, {name: position for position, name in enumerate(names)}), options)
    rng = np.random.default_rng(np.random.SeedSequence([options.seed, round_number]))
    return _clean(_draw(options, count, turn, rng), options)


def describe_unknown(options: Gossip, known: Collection[str]) -> str:
    """Return which silos the given edges name that do not exist, or ""."""
    unknown = [name for name in options.named_silos if name not in known]
    more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    return f"mode.edges: there is no silo {', '.join(map(quote, unknown[:_SHOWN]))}{more}" if unknown else ""


def describe_edges_problem(options: Gossip, num_silos: int) -> str:
    """Return why silos that the given edges name can never agree, or ""; silos without an edge are alone."""
    names = options.named_silos
    if len(names) != num_silos:
        return (
            f"mode.edges name {len(names)} silos, and {num_silos} take part (selection.goal); expected an edge for each"
        )
    reached, edges = {names[0]}, [*options.edges, *(edge[::-1] for edge in options.edges)]
    while more := {second for first, second in edges if first in reached} - reached:
        reached |= more
    if alone := sorted(set(names) - reached):
        return f"mode.edges have no way from the silo {names[0]} to {alone[0]}; expected that they connect all silos"
    return ""


def count_turns(options: Gossip, count: int) -> int:
    """Return the number of rounds after which the edges of a topology that is not random repeat; 1 if it is random."""
    if count < 2:
        return 1
    return {"one-peer-exponential": _num_distances(count), "grid": 2}.get(options.topology, 1)


def _draw(options: Gossip, count: int, turn: int, rng: np.random.Generator) -> Edges:
    positions = np.arange(count)
    match options.topology:
        case "ring":
            return _shift(positions, 1)
        case "torus":
            return _torus(count, both_ways=options.is_directed)
        case "grid":
            width = math.ceil(math.sqrt(count))
            return _within(positions // width if turn % 2 == 0 else positions % width)
        case "exponential":
            return np.concatenate([_shift(positions, 1 << power) for power in range(_num_distances(count))])
        case "one-peer-exponential":
            return _one_peer(positions, 1 << turn % _num_distances(count), directed=options.is_directed)
        case "pairs":
            return rng.permutation(count)[: count // 2 * 2].reshape(-1, 2)
        case "one-pair":
            return rng.permutation(count)[:2].reshape(1, 2)
        case _:  # "complete": `draw_edges` has returned the given edges
            return _within(np.zeros(count, np.int64))


def _clean(edges: Edges, options: Gossip) -> Edges:
    """Return edges in order and once each; those of a topology without directions go both ways if links have one."""
    if options.is_directed:
        if options.topology in ("grid", "complete", "pairs", "one-pair"):
            edges = np.concatenate([edges, edges[:, ::-1]])
    else:
        edges = np.sort(edges, axis=1)
    edges = np.unique(edges, axis=0)
    return edges[edges[:, 0] != edges[:, 1]]


def _keep_present(edges: Sequence[tuple[str, str]], positions: Mapping[str, int]) -> Edges:
    """Return the given edges between silos that take part."""
    present = [(positions[a], positions[b]) for a, b in edges if a in positions and b in positions]
    return np.array(present, np.int64).reshape(-1, 2)


def _shift(positions: npt.NDArray[np.int64], distance: int) -> Edges:
    """Return the edge from each position to the one at a distance, round the circle."""
    return np.stack([positions, (positions + distance) % len(positions)], axis=1)


def _one_peer(positions: npt.NDArray[np.int64], distance: int, *, directed: bool) -> Edges:
    """Return the edges at one distance: round the circle, or if they have no direction, pairs at that XOR.

    Both are exact after log2(n) rounds if n is a power of two.
    """
    if directed:
        return _shift(positions, distance)
    partners = positions ^ distance
    return np.stack([positions, partners], axis=1)[partners < len(positions)]


def _num_distances(count: int) -> int:
    """Return the number of powers of two below `count`."""
    return max(1, (count - 1).bit_length())


def _torus(count: int, *, both_ways: bool) -> Edges:
    """Return the edges of the torus that is closest to a square; a prime number of silos is a ring."""
    height = next(number for number in range(math.isqrt(count), 0, -1) if count % number == 0)
    width = count // height
    rows, columns = np.divmod(np.arange(count), width)
    ends = [rows * width + (columns + 1) % width, (rows + 1) % height * width + columns]
    edges = np.concatenate([np.stack([np.arange(count), end], axis=1) for end in ends])
    return np.concatenate([edges, edges[:, ::-1]]) if both_ways else edges


def _within(groups: npt.NDArray[np.int64]) -> Edges:
    """Return all pairs of positions with the same group."""
    parts: list[Edges] = []
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        first, second = np.triu_indices(len(members), 1)
        parts.append(np.stack([members[first], members[second]], axis=1))
    return np.concatenate(parts)


Floats = npt.NDArray[np.float64]
MAX_MATRIX = 2000
"""Largest number of silos whose matrix is computed: its eigenvalues take seconds."""


@dataclasses.dataclass(frozen=True, eq=False)
class Links:
    """The weights of W off the diagonal, by receiver: row `receivers[k]` has `weights[k]` for `senders[k]`.

    All arrays have one entry for each direction of an edge; the diagonal is `own`, shape [silos].
    """

    receivers: npt.NDArray[np.int64]
    senders: npt.NDArray[np.int64]
    weights: Floats
    own: Floats

    def row(self, position: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        """Return a silo's row: its own weight, and position and weight of each neighbour."""
        first, last = np.searchsorted(self.receivers, [position, position + 1])
        pairs = zip(self.senders[first:last].tolist(), self.weights[first:last].tolist(), strict=True)
        return float(self.own[position]), tuple(pairs)

    def matrix(self) -> Floats:
        """Return W, shape [silos, silos]. Raises `ValueError` for more than `MAX_MATRIX` silos."""
        count = len(self.own)
        if count > MAX_MATRIX:
            raise ValueError(f"the matrix of {count} silos is too large; expected at most {MAX_MATRIX}")
        matrix = np.diag(self.own)
        matrix[self.receivers, self.senders] = self.weights
        return matrix


def metropolis(count: int, edges: Edges) -> Links:
    """Return the Metropolis weights of confirmed edges: 1 / (1 + the larger degree of the two ends).

    W is symmetric, and its rows and columns add up to 1. A silo without a confirmed edge has the row e_i.
    """
    degrees = np.bincount(edges.reshape(-1), minlength=count)
    weights: Floats = 1.0 / (1.0 + np.maximum(degrees[edges[:, 0]], degrees[edges[:, 1]]).astype(np.float64))
    both = np.concatenate([edges, edges[:, ::-1]])
    links = _sort(both[:, 0], both[:, 1], np.concatenate([weights, weights]))
    return Links(*links, 1.0 - np.bincount(links[0], links[2], minlength=count).astype(np.float64))


def push_sum(count: int, links: Edges) -> Links:
    """Return the push-sum weights of confirmed links from sender to receiver: 1 / (1 + the sender's confirmed links).

    The columns of W add up to 1. A silo mixes the sums and the weights with its row; the model is their quotient.
    """
    shares: Floats = 1.0 / (1.0 + np.bincount(links[:, 0], minlength=count).astype(np.float64))
    return Links(*_sort(links[:, 1], links[:, 0], shares[links[:, 0]]), shares)


def mix_all(links: Links, values: Floats) -> Floats:
    """Return W x of all silos at once, shape [silos, entries].

    With symmetric weights the sum over the silos changes by rounding only, because each edge adds what it subtracts.
    """
    return values + _gather(links, links.weights[:, None] * (values[links.senders] - values[links.receivers]), values)


def push_all(links: Links, sums: Floats) -> Floats:
    """Return A s of all silos at once, shape [silos, entries], for column-stochastic weights A."""
    return links.own[:, None] * sums + _gather(links, links.weights[:, None] * sums[links.senders], sums)


def spectral_gap(links: Links) -> float:
    """Return 1 - the largest magnitude of an eigenvalue of W besides 1: the part of the error that a round removes."""
    return gap_of(lambda turn: links, 1)


def gap_of(draw: Callable[[int], Links], turns: int) -> float:
    """Return the mean gap of the weights `draw(turn)` of some rounds, from 0: 1 - ‖W_T ... W_1 - J‖^(1/T).

    J has all entries 1/n. Without a gap (0) the silos do not come together; with 1 they agree after those rounds.
    Raises `ValueError` for more than `MAX_MATRIX` silos.
    """
    product = draw(0).matrix()
    for turn in range(1, turns):
        product = draw(turn).matrix() @ product
    norm = float(np.linalg.norm(product - 1.0 / len(product), 2))
    return 1.0 - min(norm, 1.0) ** (1.0 / turns)


def _gather(links: Links, parts: Floats, like: Floats) -> Floats:
    """Return the sums of parts by receiver, which `_sort` has ordered."""
    total = np.zeros_like(like)
    if len(parts):
        receivers, begins = np.unique(links.receivers, return_index=True)
        total[receivers] = np.add.reduceat(parts, begins, axis=0)
    return total


def _sort(
    receivers: npt.NDArray[np.int64], senders: npt.NDArray[np.int64], weights: Floats
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
    order = np.lexsort((senders, receivers))
    return receivers[order], senders[order], weights[order]


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
