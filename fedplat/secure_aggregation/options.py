"""The table `[secure_aggregation]` of a job file."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MAX_GROUP = 1000
"""Maximum number of clients that share masks with each other."""
MIN_GROUP = 3
"""Minimum number: from the sum of two updates, each client would know the other's."""

Finite = Annotated[float, Meta(ge=-1e30, le=1e30)]


class SecureAggregation(Struct, frozen=True, forbid_unknown_fields=True):
    """Secure aggregation: the server learns the sum of the updates, and no single update."""

    threshold: Annotated[float, Meta(gt=0.5, le=1.0)] = 2 / 3
    """Part of the clients that hold shares of a client's secrets (its neighbours and itself) whose answers remove its
    masks. If fewer answer, the attempt fails; if as many collude with the server, they can read its update."""
    neighbours: Annotated[int, Meta(ge=0, le=MAX_GROUP - 1)] = 0
    """Number of other clients with which each client shares masks, even; 0: all others in a group of up to 100, and in
    a larger one enough for 10 % of clients that collude and 10 % that drop out."""
    group: Annotated[int, Meta(ge=MIN_GROUP, le=MAX_GROUP)] = MAX_GROUP
    """Maximum number of clients in a group. A larger cohort is divided into groups of nearly equal size, of each of
    which the server learns the sum."""
    bits: Annotated[int, Meta(ge=2, le=24)] = 20
    """Bits of a quantized entry: the range from -`updates.clip_norm` to `updates.clip_norm` has 2^bits - 2 steps. With
    `privacy.trust = "none"` it has fewer if the sum with its noise would not fit `modulus`."""
    modulus: Annotated[int, Meta(ge=8, le=32)] = 32
    """Bits of a masked entry, which is what a client sends; the sum of the quantized entries has to fit."""
    step_s: Annotated[float, Meta(ge=0.01, le=31_536_000.0)] = 60.0
    """Time for each step of the protocol but the training and the upload, in seconds."""
    confirm: bool = False
    """Whether clients confirm to each other which of them have sent their update, before any mask is removed. It costs
    one more step, and protects against a server that tells different clients different things."""
    metrics: Annotated[dict[str, tuple[Finite, Finite]], Meta(max_length=100)] = {}
    """Lowest and highest value of each metric of clients, such as `metrics = { loss = [0.0, 5.0] }`: the server learns
    the mean of each. Other metrics are not sent."""

    def __post_init__(self) -> None:
        if self.neighbours % 2:
            raise ValueError(f"neighbours = {self.neighbours}: expected an even number")
        if self.neighbours >= self.group:
            raise ValueError(
                f"neighbours = {self.neighbours}: expected fewer than the clients of a group, {self.group}"
            )
        if self.bits >= self.modulus:
            raise ValueError(f"bits = {self.bits}: expected less than modulus, which is {self.modulus}")
        for name, (low, high) in self.metrics.items():
            if not low < high:
                raise ValueError(f"metrics.{name} = [{low:g}, {high:g}]: expected the lowest value before the highest")
