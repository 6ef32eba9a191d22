"""The groups of a secure aggregation, and the clients' and the server's part in it, carried out or left out.

`real.RealProtocol` runs `fedplat.secure_aggregation` with all its cryptography. `ModelledProtocol` is for cohorts for
which that would take too long: updates are encoded and added as always, only keys, shares and masks are missing.
Results are the same, bit for bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedplat.rounds import Assignment, AssignmentId, Attempt, records, states
from fedplat.rounds.protocols.secure_phases import find_survivors, list_groups, messages_of
from fedplat.secure_aggregation.messages import (
    SIGNATURE_BYTES,
    Confirmation,
    KeyAdvertisement,
    SealedShares,
    SecureAggregation,
    Survivors,
    UnmaskAnswer,
)
from fedplat.secure_aggregation.setup import Graph, Setup


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedGroup:
    """The assignments of a group, in the order of their positions, and its graph.

    It is of one moment: a later phase has other messages, and so other groups.
    """

    graph: Graph
    assignments: tuple[Assignment, ...]

    @cached_property
    def parts(self) -> tuple[records.SecureMessages, ...]:
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


Masked = npt.NDArray[np.uint32]


def stand_in(client: int, phase: states.AttemptPhase) -> bytes:
    """Return a message that takes the place of one that is not computed: the coordinator reads only the keys."""
    if phase is not states.AttemptPhase.ADVERTISING:
        return b"\0"
    encryption_key, masking_key = (hashlib.sha256(f"{client} {each}".encode()).digest() for each in range(2))
    return KeyAdvertisement(encryption_key, masking_key, bytes(SIGNATURE_BYTES)).to_bytes()


class SecureProtocol(Protocol):
    """The steps of all clients of a job, in the order of the protocol, and the server's last one."""

    def advertise(self, assignment: AssignmentId, setup: Setup, random: Callable[[int], bytes]) -> bytes:
        """Return a client's keys; all its secrets come from `random`."""
        ...

    def share(self, assignment: AssignmentId, group: MaskedGroup, position: int) -> bytes:
        """Return the shares of a client's secrets."""
        ...

    def mask(self, assignment: AssignmentId, group: MaskedGroup, position: int, vector: Masked) -> None:
        """Mask an encoded update in place."""
        ...

    def confirm(self, assignment: AssignmentId, group: MaskedGroup) -> bytes:
        """Return a client's confirmation of the survivors."""
        ...

    def answer(self, assignment: AssignmentId, group: MaskedGroup) -> bytes:
        """Return the shares with which masks are removed."""
        ...

    def remove_masks(self, setup: Setup, group: MaskedGroup, total: Masked) -> None:
        """Remove the masks from the sum of a group, in place."""
        ...

    def forget(self, assignment: AssignmentId) -> None:
        """Forget the secrets of a client."""
        ...


class ModelledProtocol(SecureProtocol):
    """No keys, shares and masks."""

    @override
    def advertise(self, assignment: AssignmentId, setup: Setup, random: Callable[[int], bytes]) -> bytes:
        return stand_in(int(assignment.client_id), states.AttemptPhase.ADVERTISING)

    @override
    def share(self, assignment: AssignmentId, group: MaskedGroup, position: int) -> bytes:
        return stand_in(int(assignment.client_id), states.AttemptPhase.SHARING)

    @override
    def mask(self, assignment: AssignmentId, group: MaskedGroup, position: int, vector: Masked) -> None:
        pass

    @override
    def confirm(self, assignment: AssignmentId, group: MaskedGroup) -> bytes:
        return stand_in(int(assignment.client_id), states.AttemptPhase.CONFIRMING)

    @override
    def answer(self, assignment: AssignmentId, group: MaskedGroup) -> bytes:
        return stand_in(int(assignment.client_id), states.AttemptPhase.UNMASKING)

    @override
    def remove_masks(self, setup: Setup, group: MaskedGroup, total: Masked) -> None:
        pass

    @override
    def forget(self, assignment: AssignmentId) -> None:
        pass
