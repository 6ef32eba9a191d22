"""What is made of the numbers that silos state, within limits: distances, weights, means of rings, and broken rings.

No silo can be checked, so no number counts for more than its median allows.

Two silos that report the same mean are enough: then it stands, and all others get it. One silo alone could report any
model, so the same silos repeat the ring, with the same shares and bound: their mean has the same bits, whatever the
order. If one of the others has left, they cannot. Then the report of one silo counts, because the difference of its
mean and one without the silo that left would reveal that silo's model.

If a chunk does not arrive, or arrives changed, then the sender, the receiver or the link between them is at fault. The
next attempt has another order, in which these two are not next to each other. If two silos report the same chunks and
different means, then one of them is at fault. A silo that failed so with more than half of the others is left out of
the round's further attempts, and what it reports does not count. So one silo cannot make all attempts fail, and only a
majority can exclude a silo, whose model would be the difference of two means.

Each silo knows its own model, and can subtract it from the mean. So the mean shows a silo's model not only if that is
nearly all of the mean, but also if it is nearly all of what remains after another silo subtracts its own model. A
coordinator that keeps these limits makes no ring that a silo with the default options refuses.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median_low

import numpy as np

from fedplat.gossip.messages import CommitRow, RingCompleted
from fedplat.gossip.state import Consensus, GossipState, measure_consensus
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
    most = limit_of(stated.values())
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
    return limit_weights({name: state.announced[name].num_examples for name in silos})


def average_stated(numbers: Sequence[float]) -> float:
    """Return the mean of what silos state, none of which counts for more than a hundred times the median."""
    most = limit_of(numbers)
    return math.fsum(min(number, most) for number in numbers) / len(numbers)


def find_mean(
    state: GossipState, members: Collection[str], reports: Mapping[str, RingCompleted], following: Iterable[str]
) -> str | None:
    """Return the digest of the mean that stands; None if none does.

    `members` are those of the ring, and `following` those of a ring that would repeat it. Reports of excluded silos do
    not count.
    """
    counted = _drop_excluded(state, reports)
    digests = {event.digest for event in counted.values()}
    can_repeat = set(members) - counted.keys() <= set(following)
    if len(digests) != 1 or (len(counted) == 1 and can_repeat):
        return None
    return digests.pop()


def keep_unfinished(state: GossipState) -> GossipState:
    """Keep what is known of a ring whose mean does not stand, for reports of it that come late.

    A report of the ring before counts further if that had the same silos, and so the same mean.
    """
    late = _drop_excluded(state, state.completed)
    if not late and state.unfinished.keys() == state.offers.keys():
        late = _drop_excluded(state, state.late)
    return dataclasses.replace(state, unfinished=state.offers, late=late)


def _drop_excluded(state: GossipState, reports: Mapping[str, RingCompleted]) -> dict[str, RingCompleted]:
    return {silo: event for silo, event in reports.items() if silo not in state.excluded}


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


MAX_WEIGHT_FACTOR = 10.0
"""How many times the median of examples a silo counts for at most, as in rounds with a server."""
MAX_SHARE = 0.5
"""How much of a mean one model may be."""
MAX_REMAINDER = 0.75
"""How much of a mean without a silo's own model one other model may be; of three equal ones it is 0.5."""
MAX_BOUND_FACTOR = 100.0
"""How many times the median the largest number of a model may be, which determines the steps of all silos."""
MAX_OWN_BOUND_FACTOR = 2.0**12
"""How many times a silo's own largest number the bound of a ring may be: a step is then 2^-17 of that number."""
MIN_MEDIAN = 3
"""With fewer numbers, none is an outlier: of two, either could be the wrong one."""
_ROUNDING = 1e-6


def limit_weights(num_examples: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of silos from the examples that they claim, so that no claim alone decides the mean.

    A weight is at most `MAX_WEIGHT_FACTOR` times the lower median, and the largest ones are such that the shares are
    within `MAX_SHARE` and `MAX_REMAINDER`.
    """
    claims = sorted((number for number in num_examples.values() if number > 0.0), reverse=True)
    if len(claims) < MIN_MEDIAN:
        return dict(num_examples)
    rest = math.fsum(claims[2:])
    most = min(MAX_WEIGHT_FACTOR * median_low(claims), rest * MAX_REMAINDER / (1.0 - MAX_REMAINDER), rest + claims[1])
    return {silo: min(number, most) for silo, number in num_examples.items()}


def find_outliers(largest: Mapping[str, float]) -> dict[str, str]:
    """Return the silos whose largest number would make the steps of all others too coarse, and why."""
    median = limit_of(largest.values())
    return {
        silo: f"the largest number of its model is {value:.3g}, more than {MAX_BOUND_FACTOR:g} times the median of all "
        f"silos, {median / MAX_BOUND_FACTOR:.3g}"
        for silo, value in largest.items()
        if value > median > 0.0
    }


def limit_of(values: Collection[float], factor: float = MAX_BOUND_FACTOR) -> float:
    """Return `factor` times the lower median of what silos state; infinity of fewer than `MIN_MEDIAN` numbers."""
    return factor * median_low(values) if len(values) >= MIN_MEDIAN else math.inf


def check_shares(shares: Sequence[float], max_share: float = MAX_SHARE) -> None:
    """Raise `ValueError` if a mean with these shares would show one silo's model, to others or to one of them."""
    first, second = sorted(shares, reverse=True)[:2]
    if min(shares) < 0.0:
        raise ValueError(f"a share is {min(shares):.3g}; expected at least 0")
    most = min(max_share, 1.0 - 1.0 / len(shares))
    if first > most + _ROUNDING:
        raise ValueError(f"one model is {first:.3g} of the mean, and would be seen in it; expected at most {most:.3g}")
    if first > MAX_REMAINDER * (1.0 - second) + _ROUNDING:
        raise ValueError(
            f"one model is {first:.3g} of the mean and another one {second:.3g}, so that each of these two silos would "
            f"see the other's; expected at most {MAX_REMAINDER:g} of what is left without either"
        )


def check_bound(bound: float, largest: float) -> None:
    """Raise `ValueError` if the steps of a quantizer would be too coarse for a model with this largest number."""
    if bound > MAX_OWN_BOUND_FACTOR * largest > 0.0:
        raise ValueError(
            f"the bound is {bound:.3g}, and the largest number of the own model {largest:.3g}, which would be lost in "
            f"rounding; expected at most {MAX_OWN_BOUND_FACTOR:g} times as much"
        )
