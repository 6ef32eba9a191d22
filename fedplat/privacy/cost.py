"""The cost of a job's releases so far."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from fedplat.privacy import accounting
from fedplat.privacy.descriptions import describe_adjacency
from fedplat.privacy.options import Privacy
from fedplat.privacy.releases import Charge, Mechanism


class Cost(Struct, frozen=True, kw_only=True):
    """A number of releases, and their total epsilon at `delta`, by PLD and, as a cross-check, by RDP.

    With noise that clients add, both are by RDP. `noise_multiplier` is that of the release with the least noise.
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
    return cost_of_charges(options, mechanism, [Charge(mechanism, releases)])


def cost_of_charges(options: Privacy, mechanism: Mechanism, charges: Sequence[Charge]) -> Cost:
    """Return the cost of releases whose mechanisms may have more noise than that of the job, `mechanism`."""
    return Cost(
        releases=sum(charge.releases for charge in charges),
        epsilon=accounting.epsilon(charges, options.delta),
        epsilon_rdp=accounting.epsilon_rdp(charges, options.delta),
        delta=options.delta,
        noise_multiplier=mechanism.noise_multiplier,
        adjacency=describe_adjacency(mechanism),
        budget=options.epsilon,
    )
