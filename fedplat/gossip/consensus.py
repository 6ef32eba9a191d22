"""How far the models of silos are apart, from what they report: squared distances to neighbours, and squared norms.

No process has all models. With d_ij = ‖x_i - x_j‖ for the confirmed edges and V = Σ_i ‖x_i - x̄‖², the Laplacian L of
these edges gives Σ d_ij² = tr(Xᵀ L X) ≥ λ₂(L) V. So V is at most Σ d_ij² / λ₂(L) if they connect all silos, and equal
to it for a complete graph. Of random pairs the mean of d_ij² is 2 n / (n - 1) times V / n: the estimate otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from fedplat.gossip.topology import MAX_MATRIX, Edges

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
