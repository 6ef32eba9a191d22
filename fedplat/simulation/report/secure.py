"""What clients and server pay for secure aggregation, over a run."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from fedplat import texts
from fedplat.simulation.recording.result import Result

_NAMES = {
    "ADVERTISING": "before they sent their keys",
    "SHARING": "while sharing",
    "COLLECTING": "before their update",
    "CONFIRMING": "while confirming",
    "UNMASKING": "while unmasking",
}


class SecureSummary(Struct, frozen=True, kw_only=True):
    """The means of `SecureCosts` over the attempts that committed, and the sums of drop-outs over all attempts.

    `protocol` is "real" if keys, shares and masks were computed, and "model" if only their cost was; results and costs
    are the same.
    """

    protocol: str
    attempts: int
    committed: int
    groups: int
    dropped: dict[str, int]
    bytes_down: float
    bytes_up: float
    client_s: float
    server_s: float

    def describe(self) -> str:
        """Return the summary as a sentence."""
        groups = "" if self.groups == 1 else f"{self.groups} groups, "
        lost = ", ".join(f"{count} {_NAMES[phase]}" for phase, count in self.dropped.items() if count)
        return (
            f"{groups}a client pays {texts.size(self.bytes_up)} up, {texts.size(self.bytes_down)} down and "
            f"{self.client_s:.3g} s of a core in a round, the server {self.server_s:.3g} s; "
            f"lost clients: {lost or 'none'}"
            + ("" if self.protocol == "real" else "; without keys and masks, which change no result")
        )


def summarize_costs(result: Result, *, runs_protocol: bool) -> SecureSummary | None:
    """Return the costs of a run; None if it had no secure aggregation."""
    costs = [each for _, each in result.secure_costs]
    if not costs:
        return None
    paid = [each for record, each in result.secure_costs if record.committed]
    dropped: Counter[str] = Counter()
    for each in costs:
        dropped.update(each.dropped)
    count = max(len(paid), 1)
    return SecureSummary(
        protocol="real" if runs_protocol else "model",
        attempts=len(costs),
        committed=len(paid),
        groups=max(each.groups for each in costs),
        dropped={phase: dropped[phase] for phase in _NAMES if phase in dropped},
        bytes_down=sum(each.bytes_down for each in paid) / count,
        bytes_up=sum(each.bytes_up for each in paid) / count,
        client_s=sum(each.client_s for each in paid) / count,
        server_s=sum(each.server_s for each in paid) / count,
    )
