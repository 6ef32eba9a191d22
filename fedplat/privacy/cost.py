"""What a job's releases have cost so far."""

from __future__ import annotations

from msgspec import Struct

from fedplat.privacy import accounting
from fedplat.privacy.descriptions import describe_adjacency
from fedplat.privacy.options import Privacy
from fedplat.privacy.releases import Charge, Mechanism


class Cost(Struct, frozen=True, kw_only=True):
    """So many releases, and epsilon at `delta` of all of them together, by PLD and, as a cross-check, by RDP.

    `budget` is the most that the job may cost; None: it has noise, and no bound on epsilon.
    """

    releases: int
    epsilon: float
    epsilon_rdp: float
    delta: float
    noise_multiplier: float
    adjacency: str
    budget: float | None = None


def cost_of(options: Privacy, mechanism: Mechanism, releases: int) -> Cost:
    """The cost of so many releases of a private job. Raises `MissingExtraError` without the extra `privacy`."""
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
