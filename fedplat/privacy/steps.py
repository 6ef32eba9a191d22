"""Example-level privacy: the cost of private training steps at one client, and its ledger.

A step draws each example with the same probability, by its own trial, and adds noise to the sum of the clipped
gradients of the drawn examples (DP-SGD: Abadi et al. 2016, "Deep Learning with Differential Privacy", arXiv 1607.00133,
Algorithm 1). Adjacency: one example more or less. Plain numbers: the arithmetic is in `fedplat.pytorch.dp`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Protocol

from msgspec import Meta, Struct
from msgspec.structs import replace


class StepCharge(Struct, frozen=True, forbid_unknown_fields=True):
    """A number of equal steps. `noise_multiplier` is the noise's standard deviation over the clipping norm."""

    noise_multiplier: Annotated[float, Meta(gt=0.0)]
    sampling_probability: Annotated[float, Meta(gt=0.0, le=1.0)]
    num_steps: Annotated[int, Meta(ge=0)]


class StepLedger(Protocol):
    """A ledger of the steps on one client's data; it may count too many and never too few."""

    def charge(self, planned: StepCharge) -> None:
        """Record the planned steps durably, before the first. Raises `PrivacyLimitError` if they exceed the limit."""
        ...

    def settle(self, planned: StepCharge, made: int) -> Sequence[StepCharge]:
        """Remove the planned steps that were not made; return all steps that the job has made so far."""
        ...


def merge_charges(charges: Iterable[StepCharge], *more: StepCharge) -> list[StepCharge]:
    """Return all charges, with equal steps merged."""
    counts: Counter[StepCharge] = Counter()
    for charge in (*charges, *more):
        counts[replace(charge, num_steps=0)] += charge.num_steps
    return [replace(kind, num_steps=count) for kind, count in counts.items() if count]


def drop_charges(charges: Iterable[StepCharge], unmade: StepCharge) -> list[StepCharge]:
    """Return the charges without steps that were not made. Raises `ValueError` if fewer were charged."""
    counts = {replace(charge, num_steps=0): charge.num_steps for charge in merge_charges(charges)}
    kind = replace(unmade, num_steps=0)
    counts[kind] = counts.get(kind, 0) - unmade.num_steps
    if counts[kind] < 0:
        raise ValueError(f"{unmade.num_steps} steps cannot be subtracted; fewer were charged")
    return [replace(kind, num_steps=count) for kind, count in counts.items() if count]
