"""The pairs of silos between which rings broke, and orders of rings in which these are not next to each other.

If a chunk does not arrive, or arrives changed, then the sender, the receiver or the link between them is at fault. The
next attempt has another order, in which these two are not next to each other. If two silos report the same chunks and
different means, then one of them is at fault. A silo that failed so with more than half of the others is left out of
the round's further attempts, and what it reports does not count. So one silo cannot make all attempts fail, and only a
majority can exclude a silo, whose model would be the difference of two means.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import numpy as np

from fedplat.gossip.state import GossipState

_RING = 0x2176
_MAX_ORDERS = 100


def draw_order(state: GossipState, names: list[str]) -> list[str]:
    """Return the order of a ring: of some random ones, one in which the fewest suspects are next to each other."""
    sequence = np.random.SeedSequence([state.rules.options.seed, _RING, state.round, state.attempt])
    rng, best, fewest = np.random.default_rng(sequence), names, len(names) + 1
    for _ in range(_MAX_ORDERS):
        order = [names[position] for position in rng.permutation(len(names)).tolist()]
        number = sum(_pair(*pair) in state.suspects for pair in zip(order, [*order[1:], order[0]], strict=True))
        if number < fewest:
            best, fewest = order, number
        if not fewest:
            break
    return best


def add_broken_links(state: GossipState) -> GossipState:
    """Suspect those between whom the ring broke; exclude silos that are suspected with more than half of the others."""
    suspects = state.suspects | _find_broken_links(state)
    counts = Counter(name for pair in suspects for name in pair)
    most = max(1, (len(state.offers) - 1) // 2)  # of two silos, it is not known which is at fault
    excluded = state.excluded.union(name for name, number in counts.items() if number > most)
    return dataclasses.replace(state, suspects=suspects, excluded=excluded)


def _find_broken_links(state: GossipState) -> set[tuple[str, str]]:
    """Return the pairs of silos between which the ring broke first or a chunk changed, or of which one must lie."""
    reports = [event for event in state.broken.values() if event.silo not in state.away]
    earliest = min((event.step for event in reports), default=0)
    pairs = [(event.sender, event.silo) for event in reports if event.step == earliest]
    order = [member.silo for member in state.ring.members] if state.ring is not None else []
    for position, sender in enumerate(order):
        receiver = order[(position + 1) % len(order)]
        sent, received = state.completed.get(sender), state.completed.get(receiver)
        if sent is None or received is None or not len(sent.chunks) == len(received.chunks) == len(order):
            continue
        # The receiver has made the chunk after its own position itself, and got all others from the sender.
        own = (position + 2) % len(order)
        if any(sent.chunks[chunk] != received.chunks[chunk] for chunk in range(len(order)) if chunk != own):
            pairs.append((sender, receiver))
    for one, other in itertools.combinations(state.completed.values(), 2):
        if one.digest != other.digest and (one.chunks == other.chunks or len(one.chunks) != len(other.chunks)):
            pairs.append((one.silo, other.silo))
    members = state.offers.keys() - state.away
    return {_pair(*pair) for pair in pairs if members.issuperset(pair) and pair[0] != pair[1]}


def _pair(one: str, other: str) -> tuple[str, str]:
    return min(one, other), max(one, other)
