"""Topologies: the edges of a round, as a pure function of the silos, the round and a seed.

Edges are pairs of positions in the sorted names of the silos, int64 [edges, 2]: the lower position first, or sender
and receiver of directed links. Sources: ring and torus as in Lian et al. 2017 (D-PSGD, arXiv 1705.09056); exponential
graphs and one peer of them a round in Assran et al. 2019 (SGP, arXiv 1811.10792), Section 3; random pairs in Boyd et
al. 2006, "Randomized Gossip Algorithms"; rows and columns of a grid in Ryabinin et al. 2021 (Moshpit SGD, arXiv
2103.03239).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fedplat.gossip.options import Gossip
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
