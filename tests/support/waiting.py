"""Candidates for the tests of policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fedplat.sampling import ClientHistory
from fedplat.testing.policies import ExampleFleet


@dataclasses.dataclass(frozen=True)
class Waiting(ExampleFleet):
    """Clients with labels (one entry for each) and, for some, a history."""

    @classmethod
    def of(cls, total: int, histories: Mapping[int, ClientHistory] | None = None, round_: int = 1) -> Waiting:
        """So many clients without labels."""
        return cls([{}] * total, histories or {}, round_)


def heard(
    loss: float, duration_s: float = 1.0, *, round_: int = 1, num_examples: float = 1.0, times: int = 1
) -> ClientHistory:
    """The past of a client that reported."""
    return ClientHistory(round_, 1, times, num_examples, loss, duration_s)
