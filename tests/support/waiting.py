"""Candidates for the tests of policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from fedplat.sampling import ClientHistory, Labels


@dataclasses.dataclass(frozen=True)
class Waiting:
    """Clients with labels (one entry for each) and, for some, a past."""

    labels: Sequence[Labels]
    pasts: Mapping[int, ClientHistory] = dataclasses.field(default_factory=dict[int, ClientHistory])
    round: int = 1
    utilities: Sequence[float] = ()

    @classmethod
    def of(cls, total: int, pasts: Mapping[int, ClientHistory] | None = None, round_: int = 1) -> Waiting:
        """So many clients without labels."""
        return cls([{}] * total, pasts or {}, round_)

    def __len__(self) -> int:
        return len(self.labels)

    def values_of(self, label: str) -> list[str | None]:
        return [labels.get(label) for labels in self.labels]

    def list_known(self) -> list[tuple[int, ClientHistory]]:
        return sorted(self.pasts.items(), key=lambda item: item[0])


def heard(
    loss: float, duration_s: float = 1.0, *, round_: int = 1, num_examples: float = 1.0, times: int = 1
) -> ClientHistory:
    """The past of a client that reported."""
    return ClientHistory(round_, 1, times, num_examples, loss, duration_s)
