"""What is made of the numbers that silos state: how far they are apart, and what each weighs in a mean.

No silo can be checked, so no number counts for more than its median allows (`shares`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fedplat.gossip import shares
from fedplat.gossip.consensus import Consensus, measure_consensus
from fedplat.gossip.messages import CommitRow
from fedplat.gossip.state import GossipState
from fedplat.gossip.topology import Edges


def push_masses(masses: Mapping[str, float], rows: Mapping[str, CommitRow]) -> dict[str, float]:
    """Return the weights of push-sum after a round, which silos compute from the same rows."""
    return {
        name: row.own * masses.get(name, 1.0)
        + math.fsum(weight * masses.get(sender, 1.0) for sender, weight in row.neighbours)
        for name, row in rows.items()
    }


def measure_round(state: GossipState, names: list[str], edges: Edges, pairs: list[tuple[str, str]]) -> Consensus:
    """Return the distance of the silos before they mix; of the two reports of an edge the larger counts.

    No two models are further apart than their norms allow, and no norm counts for more than a hundred times the median,
    so that one silo cannot decide with a number whether all of them agree.
    """
    nothing: dict[str, float] = {}
    stated = {name: state.announced[name].squared_norm for name in names}
    most = shares.limit(stated.values())
    norms = {name: min(norm, most) for name, norm in stated.items()}
    distances = [
        min(
            max(state.received.get(a, nothing).get(b, 0.0), state.received.get(b, nothing).get(a, 0.0)),
            (math.sqrt(norms[a]) + math.sqrt(norms[b])) ** 2,
        )
        for a, b in pairs
    ]
    return measure_consensus(edges, distances, list(norms.values()))


def weigh(state: GossipState, silos: Iterable[str]) -> dict[str, float]:
    """Return the weights of the silos of a ring.

    In push-sum they are those of the silos' sums, so that the mean is the sum of all sums, which no lost message
    changes, divided by that of all weights. The plain mean of the models differs from it while they are apart.
    """
    if state.rules.options.is_directed:
        return {name: state.masses.get(name, 1.0) for name in silos}
    if not state.rules.by_examples:
        return dict.fromkeys(silos, 1.0)
    return shares.limit_weights({name: state.announced[name].num_examples for name in silos})


def average_stated(numbers: Sequence[float]) -> float:
    """Return the mean of what silos state, none of which counts for more than a hundred times the median."""
    most = shares.limit(numbers)
    return math.fsum(min(number, most) for number in numbers) / len(numbers)
