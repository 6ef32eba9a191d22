"""The input of a sampling policy: the clients that it may draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from msgspec import Struct

Labels = Mapping[str, str]

LARGEST_UTILITY = 1e100
"""Upper bound of a utility: clients report both of its factors, and sums over all clients must stay finite."""


class BasePolicy(Struct, frozen=True):
    """The base of options records of policies."""

    is_trial: ClassVar[bool] = False
    """True if each client is drawn by an independent trial."""

    @property
    def remembers(self) -> bool:
        """True if the policy uses the clients' history."""
        return False


@dataclasses.dataclass(slots=True)
class ClientHistory:
    """The history of a client that participated, that is, had an assignment in a training attempt.

    `round` and `attempt` identify its last participation, `num_participations` counts all of them, and `num_rounds` the
    rounds in which they were. The other fields are from its last accepted report, and None before there is one: the
    number of examples, the time from the assignment to the report in seconds, and the root mean square of the loss over
    the examples (the metric `loss_squared` is the mean square; if it is missing, the mean `loss` replaces the root).
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
        """|B| sqrt(mean loss²), the statistical utility of Lai et al. 2021, Section 4.2; 0 if it is unknown."""
        if self.loss is None or self.num_examples is None:
            return 0.0
        return min(self.num_examples * self.loss, LARGEST_UTILITY)


class Candidates(Protocol):
    """The clients that may be drawn, numbered from 0 in arbitrary order.

    Implementations do not copy the clients: a thousand may be drawn from a million.
    """

    @property
    def round(self) -> int:
        """The number of the round for which clients are drawn, from 1."""
        ...

    @property
    def utilities(self) -> Sequence[float]:
        """For each round, from round 0 (which has no reports), the sum of `ClientHistory.utility` over its reports."""
        ...

    def __len__(self) -> int:
        """Return the number of candidates."""
        ...

    def values_of(self, label: str) -> Sequence[str | None]:
        """Return one label of every candidate, None if it does not have the label. Time is linear in the candidates."""
        ...

    def list_known(self) -> Sequence[tuple[int, ClientHistory]]:
        """Return the numbers, in ascending order, and the history of the candidates that participated before."""
        ...
