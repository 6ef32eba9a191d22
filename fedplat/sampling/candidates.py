"""What a policy is told of the clients that it may draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

Labels = Mapping[str, str]

LARGEST_UTILITY = 1e100
"""Clients say both factors of it, and sums over all of them shall be finite."""


@dataclasses.dataclass(slots=True)
class ClientHistory:
    """What is remembered of a client that took part, which is: was assigned in an attempt to train.

    `round` and `attempt` name the last time, `num_participations` counts them all, `num_rounds` the rounds that they
    were in. The rest is of its last accepted report and None before there is one: the number of examples, the time from
    the assignment to the report in seconds, and the root mean square of the loss over the examples (`loss_squared` of
    the report's metrics is the mean square; where it is missing, the mean `loss` stands for its root).
    """

    round: int
    attempt: int
    num_participations: int = 1
    num_examples: float | None = None
    loss: float | None = None
    duration_s: float | None = None
    num_rounds: int = 1

    @property
    def utility(self) -> float:
        """|B| sqrt(mean loss²), the statistical utility of Lai et al. 2021, Section 4.2; 0 where it is not known."""
        if self.loss is None or self.num_examples is None:
            return 0.0
        return min(self.num_examples * self.loss, LARGEST_UTILITY)


class Candidates(Protocol):
    """The clients that may be drawn, numbered from 0 in an order that means nothing.

    Nothing is copied to make one: there may be a million of them, of which a thousand are drawn.
    """

    @property
    def round(self) -> int:
        """The round that they are drawn for, from 1."""
        ...

    @property
    def utilities(self) -> Sequence[float]:
        """For each round, from round 0 (which has none), the sum of `ClientHistory.utility` over its reports."""
        ...

    def __len__(self) -> int:
        """How many there are."""
        ...

    def values_of(self, label: str) -> Sequence[str | None]:
        """One label of all of them; None of those that do not have it. Takes time for each."""
        ...

    def list_known(self) -> Sequence[tuple[int, ClientHistory]]:
        """The numbers, in order, and the past of those that took part before."""
        ...
