"""The clients' and the server's part of the protocol: carried out, or left out because masks cancel anyway.

`real.RealProtocol` runs `fedplat.secure_aggregation` with all its cryptography. `ModelledProtocol` is for cohorts for
which that would take too long: updates are encoded and added as always, only keys, shares and masks are missing.
Results are the same, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedplat.rounds import AssignmentId
from fedplat.rounds.states import AttemptPhase
from fedplat.secure_aggregation.messages import SIGNATURE_BYTES, KeyAdvertisement
from fedplat.secure_aggregation.setup import Setup
from fedplat.simulation.secure.groups import MaskedGroup

Masked = npt.NDArray[np.uint32]


def stand_in(client: int, phase: AttemptPhase) -> bytes:
    """Return a message that takes the place of one that is not computed: the coordinator reads only the keys."""
    if phase is not AttemptPhase.ADVERTISING:
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
        return stand_in(int(assignment.client_id), AttemptPhase.ADVERTISING)

    @override
    def share(self, assignment: AssignmentId, group: MaskedGroup, position: int) -> bytes:
        return stand_in(int(assignment.client_id), AttemptPhase.SHARING)

    @override
    def mask(self, assignment: AssignmentId, group: MaskedGroup, position: int, vector: Masked) -> None:
        pass

    @override
    def confirm(self, assignment: AssignmentId, group: MaskedGroup) -> bytes:
        return stand_in(int(assignment.client_id), AttemptPhase.CONFIRMING)

    @override
    def answer(self, assignment: AssignmentId, group: MaskedGroup) -> bytes:
        return stand_in(int(assignment.client_id), AttemptPhase.UNMASKING)

    @override
    def remove_masks(self, setup: Setup, group: MaskedGroup, total: Masked) -> None:
        pass

    @override
    def forget(self, assignment: AssignmentId) -> None:
        pass
