"""The cost of a job's releases so far."""

from __future__ import annotations

from msgspec import Struct

from fedplat.privacy import accounting
from fedplat.privacy.descriptions import describe_adjacency
from fedplat.privacy.options import Privacy
from fedplat.privacy.releases import Charge, Mechanism


class Cost(Struct, frozen=True, kw_only=True):
    """A number of releases, and their total epsilon at `delta`, by PLD and, as a cross-check, by RDP.

    `budget` is the job's bound on epsilon; None: it has noise, but no bound.
    """

    releases: int
    epsilon: float
    epsilon_rdp: float
    delta: float
    noise_multiplier: float
    adjacency: str
    budget: float | None = None


def cost_of(options: Privacy, mechanism: Mechanism, releases: int) -> Cost:
    """Return the cost of a number of releases of a private job. Raises `MissingExtraError` without extra `privacy`."""
    charges = [Charge(mechanism, releases)]
    return Cost(
        releases=releases,
        epsilon=accounting.epsilon(charges, options.delta),
        epsilon_rdp=accounting.epsilon_rdp(charges, options.delta),
        delta=options.delta,
        noise_multiplier=mechanism.noise_multiplier,
        adjacency=describe_adjacency(mechanism),
        budget=options.epsilon,
    )
