"""The guarantee of a mechanism, in words."""

from __future__ import annotations

from typing import Literal

from fedplat.privacy.releases import Mechanism

ADJACENCY = {
    "add-or-remove": "one client more or less",
    "zero-out": "one client's reports replaced by zeros",
}
"""The difference between two populations that cannot be distinguished, by the name of the adjacency."""
NOT_COVERED = (
    "the server and its operators: updates and reports reach them without noise",
    "who took part, when, for how long and with how many bytes, which operators see",
    "several clients of one person: the promise is made to each client",
    "what other jobs release, unless the population has a budget that covers them together",
)
"""What no mechanism of the server protects."""
NOT_COVERED_BY_CLIENTS = (
    "clients that work together with the server, which then knows their part of the noise",
    *NOT_COVERED[1:],
)
"""What the noise of clients does not protect."""


def adjacency(mechanism: Mechanism) -> Literal["add-or-remove", "zero-out"]:
    """Return the name of the mechanism's adjacency."""
    return "add-or-remove" if mechanism.kind == "poisson" else "zero-out"


def describe_adjacency(mechanism: Mechanism) -> str:
    """Return the difference between two populations that the mechanism makes indistinguishable."""
    return ADJACENCY[adjacency(mechanism)]


def not_covered(mechanism: Mechanism) -> tuple[str, ...]:
    """Return what the mechanism does not protect, or not from whom."""
    return NOT_COVERED_BY_CLIENTS if mechanism.kind == "skellam" else NOT_COVERED


def participation(mechanism: Mechanism) -> Literal["poisson", "fixed", "min_separation"]:
    """Return the `[privacy] participation` of this mechanism."""
    match mechanism.kind:
        case "tree":
            return "min_separation"
        case "skellam":
            return "fixed"
        case "poisson" | "fixed":
            return mechanism.kind


def sampling(mechanism: Mechanism) -> str:
    """Describe what the accounting assumes about participation."""
    if mechanism.kind == "poisson":
        return (
            f"each client takes part in each round with probability {mechanism.sampling_probability:g}, by a secret "
            "trial of its own"
        )
    limit = (
        "a client takes part in any round" if mechanism.separation == 1 else _describe_separation(mechanism.separation)
    )
    at_most = f", {mechanism.max_participations} times in all" if mechanism.max_participations else ""
    return f"{limit}{at_most}; the participants may be known"


def _describe_separation(separation: int) -> str:
    return f"a client takes part in one of any {separation} consecutive rounds at most"
