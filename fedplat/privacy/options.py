"""The table `[privacy]` of a job file, the releases of such a job, and its guarantee in words."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from fedplat import metrics

Delta = Annotated[float, Meta(gt=0.0, lt=1.0)]
Epsilon = Annotated[float, Meta(gt=0.0, le=1e6)]
Finite = Annotated[float, Meta(ge=-1e30, le=1e30)]


class PublishedMetrics(Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics of clients that are released with noise of their own.

    A round's value is the middle of the bounds plus the clients' differences from it, divided by the expected number
    of reports. The noise of a round as a whole is then (z⁻² + z_m⁻²)^(-1/2), so the metrics cost.
    """

    noise_multiplier: Multiplier
    """z_m: the noise over what one client can change in all of the metrics together (L2)."""
    bounds: Annotated[dict[str, tuple[Finite, Finite]], Meta(min_length=1, max_length=100)]
    """Lowest and highest value of each metric, such as `bounds = { loss = [0.0, 5.0] }`."""

    def __post_init__(self) -> None:
        metrics.check_bounds(self.bounds, "bounds")


class Privacy(Struct, frozen=True, forbid_unknown_fields=True):
    """Differential privacy of clients.

    The sum of the updates is divided by `selection.goal` times `expected_weight`, whatever the number of reports.
    """

    delta: Delta
    """δ of the promise."""
    participation: Literal["poisson", "min_separation", "fixed"]
    """Basis of the promise. `"poisson"`: the chance that a client is not drawn (with `selection.sampling` Poisson).
    `"min_separation"`: the rounds between two participations of a client (with `selection.min_separation`; the noise is
    that of a tree). `"fixed"`: no assumption."""
    trust: Literal["server", "none"] = "server"
    """Who adds the noise. `"server"`: the server, which sees the updates without it. `"none"`: each client adds its
    part before `[secure_aggregation]`, so the server learns only sums with noise. Needs `participation = "fixed"`. Each
    attempt whose masks were requested is then a release, in which every client counts."""
    epsilon: Epsilon | None = None
    """Bound on the cost of all releases together at `delta`. Without `noise_multiplier` the noise is calibrated for it
    and for `rounds`; the job pauses before the round that would exceed it. None: no bound."""
    noise_multiplier: Multiplier | None = None
    """z: the standard deviation of the noise over what one client can change in a round's sum; none: calibrated for
    `epsilon`."""
    max_participations: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """A client that was assigned in this many rounds is not drawn again, even if its updates were lost; 0: no limit.
    Not with `"poisson"`."""
    expected_weight: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Expected mean weight of a report, if reports weigh less than 1."""
    count_noise: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    """Standard deviation of the noise of the count that adaptive clipping follows; 0: a twentieth of the goal."""
    metrics: PublishedMetrics | None = None
    """Metrics of clients that are released with noise; none: they are withheld."""
    max_releases: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    """Bound on the rounds in addition to `rounds`; the server writes the number that the budget allows into the stored
    job."""

    def __post_init__(self) -> None:
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError("expected epsilon, for which the noise is calibrated, or noise_multiplier, or both")
        if self.metrics is not None and self.participation == "min_separation":
            raise ValueError(
                'metrics: expected none with participation = "min_separation", whose noise spans all rounds'
            )

    def total_multiplier(self, noise_multiplier: float) -> float:
        """Return the multiplier of a round's release with its metrics, from that of the model alone.

        Two Gaussian mechanisms on the same clients are one, with z⁻² the sum of theirs.
        """
        if self.metrics is None:
            return noise_multiplier
        return (noise_multiplier**-2 + self.metrics.noise_multiplier**-2) ** -0.5

    def model_multiplier(self, whole: float) -> float:
        """Return the multiplier of the model alone, rounded up, from that of a round's release with its metrics.

        Raises `ValueError` if the metrics alone cost more.
        """
        if self.metrics is None:
            return whole
        left = whole**-2 - self.metrics.noise_multiplier**-2
        if left <= 0:
            raise ValueError(
                f"privacy.metrics.noise_multiplier = {self.metrics.noise_multiplier:g}: expected more than {whole:g}, "
                "the noise that the whole round needs"
            )
        return math.ceil(left**-0.5 * 1e6) / 1e6

    def count_deviation(self, goal: int) -> float:
        """Return the deviation of the noise of adaptive clipping's count; Andrew et al. 2021, Section 3.2: m / 20."""
        return self.count_noise or goal / 20.0


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

    - `skellam`: independent noise in each round, which the clients added to whole numbers (`noise.py`). One client
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


ADJACENCY = {"add-or-remove": "one client more or less", "zero-out": "one client's reports replaced by zeros"}
"""The difference between two populations that cannot be distinguished, by the name of the adjacency."""
NOT_COVERED = (
    "the server and its operators: updates and reports reach them without noise",
    "who took part, when, for how long and with how many bytes, which operators see",
    "several clients of one person: the promise is made to each client",
    "what other jobs release, unless the population has a budget that covers them together",
)
"""What no mechanism of the server protects."""
NOT_COVERED_BY_CLIENTS = (
    "clients that work together with the server, which then knows their part of the noise",
    *NOT_COVERED[1:],
)
"""What the noise of clients does not protect."""


def adjacency(mechanism: Mechanism) -> Literal["add-or-remove", "zero-out"]:
    """Return the name of the mechanism's adjacency."""
    return "add-or-remove" if mechanism.kind == "poisson" else "zero-out"


def describe_adjacency(mechanism: Mechanism) -> str:
    """Return the difference between two populations that the mechanism makes indistinguishable."""
    return ADJACENCY[adjacency(mechanism)]


def describe_not_covered(mechanism: Mechanism) -> tuple[str, ...]:
    """Return what the mechanism does not protect, or not from whom."""
    return NOT_COVERED_BY_CLIENTS if mechanism.kind == "skellam" else NOT_COVERED


def describe_participation(mechanism: Mechanism) -> Literal["poisson", "fixed", "min_separation"]:
    """Return the `[privacy] participation` of this mechanism."""
    match mechanism.kind:
        case "tree":
            return "min_separation"
        case "skellam":
            return "fixed"
        case "poisson" | "fixed":
            return mechanism.kind


def describe_sampling(mechanism: Mechanism) -> str:
    """Describe what the accounting assumes about participation."""
    if mechanism.kind == "poisson":
        return (
            f"each client takes part in each round with probability {mechanism.sampling_probability:g}, by a secret "
            "trial of its own"
        )
    limit = (
        "a client takes part in any round" if mechanism.separation == 1 else _describe_separation(mechanism.separation)
    )
    at_most = f", {mechanism.max_participations} times in all" if mechanism.max_participations else ""
    return f"{limit}{at_most}; the participants may be known"


def _describe_separation(separation: int) -> str:
    return f"a client takes part in one of any {separation} consecutive rounds at most"
