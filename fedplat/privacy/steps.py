"""Example-level privacy: what private steps at one client cost, and who keeps the count.

A step draws each example with the same probability, by a trial of its own, and adds noise to the sum of what the drawn
ones give, each of which is clipped (DP-SGD: Abadi et al. 2016, "Deep Learning with Differential Privacy", arXiv
1607.00133, Algorithm 1). Adjacency: one example more or less. Plain numbers: the arithmetic is in
`fedplat.pytorch.dp`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Protocol

from msgspec import Meta, Struct
from msgspec.structs import replace


class StepCharge(Struct, frozen=True, forbid_unknown_fields=True):
    """So many steps made alike. `noise_multiplier` is the noise's standard deviation over the clipping norm."""

    noise_multiplier: Annotated[float, Meta(gt=0.0)]
    sampling_probability: Annotated[float, Meta(gt=0.0, le=1.0)]
    num_steps: Annotated[int, Meta(ge=0)]


class StepLedger(Protocol):
    """Keeps what steps on one client's data have cost; it may count too many and never too few."""

    def charge(self, planned: StepCharge) -> None:
        """Notes a training's steps for good, before the first is made. Raises `PrivacyLimitError`: then none may be."""
        ...

    def settle(self, planned: StepCharge, made: int) -> Sequence[StepCharge]:
        """Takes back what was charged for steps that were not made; returns all that the job has made so far."""
        ...


def merge_charges(charges: Iterable[StepCharge], *more: StepCharge) -> list[StepCharge]:
    """All charges, equal steps together."""
    counts: Counter[StepCharge] = Counter()
    for charge in (*charges, *more):
        counts[replace(charge, num_steps=0)] += charge.num_steps
    return [replace(kind, num_steps=count) for kind, count in counts.items() if count]


def taken_back(charges: Iterable[StepCharge], unmade: StepCharge) -> list[StepCharge]:
    """The charges without steps that were not made. Raises `ValueError` if so many were never charged."""
    counts = {replace(charge, num_steps=0): charge.num_steps for charge in merge_charges(charges)}
    kind = replace(unmade, num_steps=0)
    counts[kind] = counts.get(kind, 0) - unmade.num_steps
    if counts[kind] < 0:
        raise ValueError(f"{unmade.num_steps} steps cannot be taken back; so many were not charged")
    return [replace(kind, num_steps=count) for kind, count in counts.items() if count]
