"""Who shares masks with whom: a complete graph in small groups, a Harary graph in large ones.

Source: Bell et al. 2020, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead" (CCS), Section 3. The
positions of a group are a random order of its clients, so that a graph in which each is connected to the nearest ones
is a random one to them. The server draws this order. One that does not draw it at random could surround a client with
its accomplices in a large group; `ParticipantLimits.trusted_keys` keeps those out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator

from fedplat.errors import SecureAggregationError
from fedplat.secure_aggregation.options import SecureAggregation

MAX_COMPLETE = 100
"""Maximum number of clients of a group with a complete graph, unless the job says otherwise."""
ADVERSARIES = 0.1
"""Part of the clients that may collude with the server, for which default numbers of neighbours are enough."""
DROPOUTS = 0.1
"""Part of the clients that may drop out."""
_SECURITY = 2**41
"""One in how many graphs may be disconnected, and one in how many may have too many colluding neighbours."""
_CORRECTNESS = 2**20
"""One in how many graphs may fail because of drop-outs."""


@dataclasses.dataclass(frozen=True)
class Graph:
    """A circle of `size` positions, each of which is connected to the `degree` nearest ones.

    `threshold` shares of the `degree` + 1 of a secret recover it.
    """

    size: int
    degree: int
    threshold: int

    @classmethod
    def of(cls, options: SecureAggregation, size: int) -> Graph:
        """Return the graph of a group."""
        degree = min(options.neighbours or default_degree(size, options.threshold), size - 1)
        return cls(size, degree, _count_threshold(options.threshold, degree))

    def neighbours(self, position: int) -> list[int]:
        """Return the positions that share masks with one, in ascending order."""
        if not 0 <= position < self.size:
            raise SecureAggregationError(f"position {position} is not in a group of {self.size}")
        if self.degree == self.size - 1:
            return [other for other in range(self.size) if other != position]
        half = self.degree // 2
        steps = [step for step in range(-half, half + 1) if step]
        return sorted((position + step) % self.size for step in steps)

    def holders(self, position: int) -> list[int]:
        """Return the positions that hold shares of the secrets of one: its neighbours and itself."""
        return sorted((position, *self.neighbours(position)))

    def is_recoverable(self, secrets: Collection[int], answered: Collection[int]) -> bool:
        """Return whether enough holders have answered to recover a secret of each of the positions `secrets`.

        The work is linear in the size of the group, because the server asks after every answer.
        """
        found = frozenset(answered)
        if self.degree == self.size - 1 or not secrets:
            return not secrets or len(found) >= self.threshold
        marks = [position in found for position in range(self.size)]
        half = self.degree // 2
        sums = [0, *itertools.accumulate(marks[-half:] + marks + marks[:half])]  # around the circle
        return all(sums[each + self.degree + 1] - sums[each] >= self.threshold for each in secrets)


@functools.lru_cache(maxsize=64)
def default_degree(size: int, threshold: float) -> int:
    """Return the number of neighbours of each client in a group, for a threshold as a part of their holders.

    Fewer than 2^-40 of the graphs let a server that tells clients different things read an update with the help of
    `ADVERSARIES` of the clients, and fewer than 2^-20 fail with `DROPOUTS`. The graph is complete in small groups, and
    for thresholds that no smaller number of neighbours makes safe.
    """
    if size > MAX_COMPLETE:
        for degree in range(2, size - 1, 2):
            shares = _count_threshold(threshold, degree)
            bounds = _bound_threshold(size, degree, ADVERSARIES, DROPOUTS)
            # Honest holders answer once, the client itself included, and colluding ones for both of its secrets.
            if bounds is not None and shares <= bounds[1] and 2 * shares > degree + 1 + bounds[0]:
                return degree
    return size - 1


def find_parameters(size: int, adversaries: float, dropouts: float, *, is_active: bool) -> tuple[int, int]:
    """Return the smallest number of neighbours, and a threshold for it, for a group of which parts collude or drop out.

    This is the computation of google/federated-compute (`fcp/secagg/server/graph_parameter_finder.cc`), with exact
    tails. `is_active` is for a server that tells clients different things; otherwise it only is curious.
    """
    for degree in range(2, size - 1, 2):
        bounds = _bound_threshold(size, degree, adversaries, dropouts)
        if bounds is None:
            continue
        colluding, surviving = bounds
        least = max(2, (colluding + degree) // 2 + 1 if is_active else colluding + 1)
        if least <= surviving:
            return degree, least
    raise SecureAggregationError(f"no graph of {size} clients is safe with so many that collude or drop out")


def _count_threshold(threshold: float, degree: int) -> int:
    holders = degree + 1
    return max(holders // 2 + 1, math.ceil(round(threshold * holders, 9)))


def _bound_threshold(size: int, degree: int, adversaries: float, dropouts: float) -> tuple[int, int] | None:
    """Return how many of a client's neighbours collude at most, and how many survive at least.

    Both hold for all clients but for the chances above. None: the graph of the honest survivors may be disconnected.
    """
    colluding, dropped = (math.floor(part * size + 1e-9) for part in (adversaries, dropouts))
    if not _is_connected(size, degree, colluding + dropped):
        return None
    return (
        _bound_tail(size, colluding, degree, size * _SECURITY),
        degree - _bound_tail(size, dropped, degree, size * _CORRECTNESS),
    )


def _is_connected(size: int, degree: int, missing: int) -> bool:
    """Return whether the graph without `missing` random positions is connected, but for one in `_SECURITY`.

    To cut the circle, half of `degree` consecutive positions must be missing in two places.
    """
    if degree > missing:
        return True
    places = size * (size - degree - 1) // 2
    return places * math.comb(size - degree, missing - degree) * _SECURITY < math.comb(size, missing)


def _bound_tail(size: int, marked: int, draws: int, one_in: int) -> int:
    """Return the least number that the marked ones among `draws` of `size` exceed in at most one of `one_in` cases."""
    total, cases = math.comb(size, draws), 0
    for number, ways in _count_ways(size, marked, draws):
        cases += ways
        if cases * one_in > total:
            return number
    return -1


def _count_ways(size: int, marked: int, draws: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of marked ones among those drawn, from the highest, and the ways to draw so many."""
    for number in range(min(marked, draws), -1, -1):
        yield number, math.comb(marked, number) * math.comb(size - marked, draws - number)
