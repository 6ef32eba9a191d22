"""The table `[privacy]` of a job file: client-level differential privacy, with noise that the server adds."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from fedplat.privacy.releases import Multiplier

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
        for name, (low, high) in self.bounds.items():
            if not low < high:
                raise ValueError(f"bounds.{name} = [{low:g}, {high:g}]: expected the lowest value before the highest")


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
