"""Training modes: updates become a version in synchronous rounds, or whenever a buffer of updates is full.

Buffered asynchronous training is FedBuff: Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous
Aggregation", arXiv 2106.06639, Algorithm 1. The weight of an update decreases with the number of versions committed
since the version that its client started from. The weights s(τ) are those of Xie et al. 2019, "Asynchronous Federated
Optimization", arXiv 1903.03934, section 5.2; FedBuff's is the polynomial one with a = 1/2.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Exponent = Annotated[float, Meta(ge=0.0, le=100.0)]
Slope = Annotated[float, Meta(gt=0.0, le=1e6)]
Versions = Annotated[int, Meta(ge=0, le=1_000_000)]


class Sync(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="sync"):
    """Synchronous rounds: a cohort starts from one version, and its updates make the next."""

    def weight(self, staleness: int) -> float:
        """Return the weight of an update: 1, because no update is stale."""
        return 1.0


class Buffered(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="buffered"):
    """Buffered asynchronous training: clients train continuously, each from the version that is then the latest.

    `selection.goal` updates fill the buffer and make a version. The staleness τ of an update is the number of versions
    committed since its client started.

    >>> [Buffered(concurrency=1).weight(tau) for tau in (0, 3)]
    [1.0, 0.5]
    """

    concurrency: Annotated[int, Meta(ge=1, le=1_000_000)]
    """Number of clients that train at the same time."""
    max_staleness: Versions | None = None
    """Largest accepted staleness: a client with an older base version is stopped (`TOO_STALE`); unset: no limit."""
    staleness: Literal["polynomial", "constant", "hinge"] = "polynomial"
    """Factor of an update's weight: `"polynomial"`: (1 + τ)^-`exponent`; `"constant"`: 1; `"hinge"`: 1 up to τ =
    `grace`, then 1 / (`slope` (τ - `grace`) + 1)."""
    exponent: Exponent | None = None
    """Only with `"polynomial"`; unset: 0.5, FedBuff's 1/√(1 + τ)."""
    slope: Slope | None = None
    """Only with `"hinge"`; unset: 10."""
    grace: Versions | None = None
    """Only with `"hinge"`; unset: 4."""

    def __post_init__(self) -> None:
        for name, owner in (("exponent", "polynomial"), ("slope", "hinge"), ("grace", "hinge")):
            if getattr(self, name) is not None and self.staleness != owner:
                raise ValueError(
                    f'{name} = {getattr(self, name)}: expected with staleness = "{owner}" only, '
                    f'and it is "{self.staleness}"'
                )

    def weight(self, staleness: int) -> float:
        """Return the weight of an update with a base version that is `staleness` versions old; 1 for a fresh one."""
        if self.staleness == "polynomial":
            return (1.0 + staleness) ** -(0.5 if self.exponent is None else self.exponent)
        if self.staleness == "constant":
            return 1.0
        beyond = staleness - (4 if self.grace is None else self.grace)
        return 1.0 if beyond <= 0 else 1.0 / ((10.0 if self.slope is None else self.slope) * beyond + 1.0)

    def is_too_stale(self, staleness: int) -> bool:
        """Return whether an update of this staleness is refused."""
        return self.max_staleness is not None and staleness > self.max_staleness
