"""The groups of a secure aggregation, as they follow from the messages that an attempt has stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property

from fedplat.rounds import Assignment, Attempt
from fedplat.rounds.protocols.secure_phases import find_survivors, list_groups, messages_of
from fedplat.rounds.records import SecureMessages
from fedplat.secure_aggregation.graph import Graph
from fedplat.secure_aggregation.messages import Confirmation, SealedShares, Survivors, UnmaskAnswer
from fedplat.secure_aggregation.options import SecureAggregation


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedGroup:
    """The assignments of a group, in the order of their positions, and its graph.

    It is of one moment: a later phase has other messages, and so other groups.
    """

    graph: Graph
    assignments: tuple[Assignment, ...]

    @cached_property
    def parts(self) -> tuple[SecureMessages, ...]:
        """The messages of all members."""
        return tuple(messages_of(each) for each in self.assignments)

    @cached_property
    def senders(self) -> frozenset[int]:
        """The positions of those that have sent shares."""
        return frozenset(position for position, each in enumerate(self.parts) if each.shares)

    @cached_property
    def survivors(self) -> Survivors:
        """The positions whose updates are in the sum, and those that dropped out; fixed once COLLECTING is over."""
        return find_survivors(self.assignments)

    @cached_property
    def confirmed(self) -> frozenset[int]:
        """The positions of those that have confirmed the survivors."""
        return frozenset(position for position, each in enumerate(self.parts) if each.confirmation)

    @cached_property
    def sent(self) -> Mapping[int, SealedShares]:
        """The shares that members have sent."""
        return {position: SealedShares.from_bytes(self.parts[position].shares) for position in sorted(self.senders)}

    @cached_property
    def confirmations(self) -> Mapping[int, Confirmation]:
        """The confirmations of members."""
        return {
            position: Confirmation.from_bytes(self.parts[position].confirmation) for position in sorted(self.confirmed)
        }

    @cached_property
    def answers(self) -> Mapping[int, UnmaskAnswer]:
        """The answers of members."""
        return {
            position: UnmaskAnswer.from_bytes(each.answer) for position, each in enumerate(self.parts) if each.answer
        }


def read_groups(options: SecureAggregation, attempt: Attempt) -> list[MaskedGroup]:
    """Return the groups of an attempt in order; none before its roster is closed."""
    return [MaskedGroup(Graph.of(options, len(members)), tuple(members)) for members in list_groups(attempt)]
