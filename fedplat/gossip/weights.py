"""Mixing weights of the edges that count in a round, and how fast they bring silos together.

An edge counts only if it is confirmed, so lost messages change which edges there are, never the sums of the weights:
with Metropolis weights each row and column of W adds up to 1, and the mean of the models does not change; with
push-sum each column does, and the sums of numerators and weights do not change.

Sources: Xiao, Boyd and Kim 2007, "Distributed average consensus with least-mean-square deviation", equation 9
(Metropolis); Kempe, Dobra and Gehrke 2003 and Assran et al. 2019, arXiv 1811.10792, Algorithm 1 (push-sum).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedplat.gossip.topology import Edges

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
