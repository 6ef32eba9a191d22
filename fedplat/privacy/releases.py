"""The releases of a private job, as an accountant sees them. Plain numbers: the arithmetic is in `accounting.py`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

Multiplier = Annotated[float, Meta(gt=0.0, le=1e6)]


class Mechanism(Struct, frozen=True, forbid_unknown_fields=True):
    """The mechanism of a job's releases, the same for each of them.

    `noise_multiplier` is the standard deviation of the noise divided by what one client can change (L2), over all that
    a round releases together.

    - `poisson`: each client takes part with `sampling_probability`, by its own trial in each round. More than a cap
      are never drawn: `overflow` is the probability, in a round, that without a given client so many are drawn that
      the cap would drop one of them if that client were drawn too. Adjacency: one client more or less.
    - `fixed`: independent noise in each round; the participants are known. Adjacency: one client's reports replaced by
      zeros.
    - `tree`: the noise of round t completes that of a binary tree over the rounds (DP-FTRL, Kairouz et al. 2021, arXiv
      2103.00039), in which every node has `noise_multiplier`. Adjacency: one client's reports replaced by zeros.

    - `skellam`: independent noise in each round, which the clients added to whole numbers (`skellam.py`). One client
      changes a round by at least `steps` of the quantizer, without which the noise would be finer than its steps. The
      participants are known. Adjacency: one client's reports replaced by zeros.

    A client takes part in at most one of any `separation` consecutive rounds, and, unless it is 0, in at most
    `max_participations` rounds of the job.
    """

    kind: Literal["poisson", "fixed", "tree", "skellam"]
    noise_multiplier: Multiplier
    sampling_probability: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    overflow: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    separation: Annotated[int, Meta(ge=1, le=1_000_001)] = 1
    max_participations: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    steps: Annotated[float, Meta(ge=0.0)] = 0.0

    def participations(self, releases: int) -> int:
        """Return the maximum number of participations of a client in a number of rounds."""
        most = math.ceil(releases / self.separation)
        return min(most, self.max_participations) if self.max_participations else most


class Charge(Struct, frozen=True, forbid_unknown_fields=True):
    """A number of releases of a mechanism, as a job's part of all releases."""

    mechanism: Mechanism
    releases: Annotated[int, Meta(ge=0)]


def tree_sensitivity(releases: int, separation: int, participations: int) -> float:
    """Return how much one client can change in all nodes of the tree (L2), relative to its change in one round.

    Of the nodes that cover 2^l rounds each, the client is in at most one per participation, and at most
    ceil(2^l / separation) times in the same one. The sum of c² over nodes is at most the largest c times the sum of c.
    """
    if not releases or not participations:
        return 0.0
    squared = 0
    for level in range(releases.bit_length()):
        squared += min(math.ceil(2**level / separation), participations)
    return math.sqrt(participations * squared)
