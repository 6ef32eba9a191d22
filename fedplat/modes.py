"""When updates become a version: in synchronous rounds, or whenever a buffer of them is full.

Buffered asynchronous training is FedBuff: Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous
Aggregation", arXiv 2106.06639, Algorithm 1. An update counts for less the more versions were committed since the one
that its client began with. The weights s(τ) are those of Xie et al. 2019, "Asynchronous Federated Optimization", arXiv
1903.03934, section 5.2; FedBuff's is the polynomial one with a = 1/2.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Exponent = Annotated[float, Meta(ge=0.0, le=100.0)]
Slope = Annotated[float, Meta(gt=0.0, le=1e6)]
Versions = Annotated[int, Meta(ge=0, le=1_000_000)]


class Sync(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="sync"):
    """Rounds: a cohort begins with one version, and its updates make the next."""

    def weight(self, staleness: int) -> float:
        """What an update counts for: there are no stale ones."""
        return 1.0


class Buffered(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="buffered"):
    """Clients work all the time, each with the version that is the latest when it begins.

    `selection.goal` updates fill the buffer and make a version. The staleness τ of an update is the number of versions
    that were committed since its client began.

    >>> [Buffered(concurrency=1).weight(tau) for tau in (0, 3)]
    [1.0, 0.5]
    """

    concurrency: Annotated[int, Meta(ge=1, le=1_000_000)]
    """Number of clients at work at the same time."""
    max_staleness: Versions | None = None
    """A client whose base version is more versions old is stopped (`TOO_STALE`); none: never."""
    staleness: Literal["polynomial", "constant", "hinge"] = "polynomial"
    """Factor of an update's weight: `"polynomial"`: (1 + τ)^-`exponent`; `"constant"`: 1; `"hinge"`: 1 up to τ =
    `grace`, then 1 / (`slope` (τ - `grace`) + 1)."""
    exponent: Exponent | None = None
    """With `"polynomial"`; when it is not set: 0.5, FedBuff's 1/√(1 + τ)."""
    slope: Slope | None = None
    """With `"hinge"`; when it is not set: 10."""
    grace: Versions | None = None
    """With `"hinge"`; when it is not set: 4."""

    def __post_init__(self) -> None:
        for name, owner in (("exponent", "polynomial"), ("slope", "hinge"), ("grace", "hinge")):
            if getattr(self, name) is not None and self.staleness != owner:
                raise ValueError(
                    f'{name} = {getattr(self, name)}: expected with staleness = "{owner}" only, '
                    f'and it is "{self.staleness}"'
                )

    def weight(self, staleness: int) -> float:
        """What an update counts for whose base version is `staleness` versions old; 1 for a fresh one."""
        if self.staleness == "polynomial":
            return (1.0 + staleness) ** -(0.5 if self.exponent is None else self.exponent)
        if self.staleness == "constant":
            return 1.0
        beyond = staleness - (4 if self.grace is None else self.grace)
        return 1.0 if beyond <= 0 else 1.0 / ((10.0 if self.slope is None else self.slope) * beyond + 1.0)

    def is_too_stale(self, staleness: int) -> bool:
        """Whether an update of this staleness is refused."""
        return self.max_staleness is not None and staleness > self.max_staleness
