"""What a private job releases, as an accountant sees it. Plain numbers: the arithmetic is in `accounting.py`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

Multiplier = Annotated[float, Meta(gt=0.0, le=1e6)]


class Mechanism(Struct, frozen=True, forbid_unknown_fields=True):
    """How each release of a job is made; all of them are made alike.

    `noise_multiplier` is the standard deviation of the noise over what one client can change (L2), of all that a round
    releases taken together.

    - `poisson`: each client takes part with `sampling_probability`, by a trial of its own in each round. More than a
      cap are never drawn: `overflow` is the chance, in a round, that so many are drawn without a given client that the
      cap lets one of them go if that client is drawn too. Adjacency: one client more or less.
    - `fixed`: independent noise in each round; whoever takes part is known. Adjacency: one client's reports count for
      nothing.
    - `tree`: the noise of round t completes that of a binary tree over the rounds (DP-FTRL, Kairouz et al. 2021, arXiv
      2103.00039), whose every node has `noise_multiplier`. Adjacency: one client's reports count for nothing.

    A client takes part in one of any `separation` consecutive rounds at most, and, unless it is 0, in
    `max_participations` rounds of the job.
    """

    kind: Literal["poisson", "fixed", "tree"]
    noise_multiplier: Multiplier
    sampling_probability: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    overflow: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    separation: Annotated[int, Meta(ge=1, le=1_000_001)] = 1
    max_participations: Annotated[int, Meta(ge=0, le=1_000_000)] = 0

    def participations(self, releases: int) -> int:
        """In how many of so many rounds a client takes part at most."""
        most = math.ceil(releases / self.separation)
        return min(most, self.max_participations) if self.max_participations else most


class Charge(Struct, frozen=True, forbid_unknown_fields=True):
    """A job's part of what was released: so many releases of a mechanism."""

    mechanism: Mechanism
    releases: Annotated[int, Meta(ge=0)]


def tree_sensitivity(releases: int, separation: int, participations: int) -> float:
    """What one client can change in all nodes of the tree together (L2), in units of what it can change in one round.

    Of the nodes that cover 2^l rounds each, the client is in one at most per participation, and at most
    ceil(2^l / separation) times in the same one. The sum of c² over nodes is at most the largest c times the sum of c.
    """
    if not releases or not participations:
        return 0.0
    squared = 0
    for level in range(releases.bit_length()):
        squared += min(math.ceil(2**level / separation), participations)
    return math.sqrt(participations * squared)
