"""The protocol with all its cryptography (extra "privacy")."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from weakref import WeakKeyDictionary

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typing_extensions import override

from fedplat import system
from fedplat.rounds import AssignmentId
from fedplat.secure_aggregation import messages, unmasking
from fedplat.secure_aggregation.participant import Participant, ParticipantLimits
from fedplat.secure_aggregation.setup import Setup
from fedplat.simulation.secure.groups import Masked, MaskedGroup, SecureProtocol


class RealProtocol(SecureProtocol):
    """The protocol with its cryptography. The keys with which clients are enrolled follow from the seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._enrolled: dict[str, Ed25519PrivateKey] = {}
        self._participants: dict[AssignmentId, Participant] = {}
        self._rosters: WeakKeyDictionary[MaskedGroup, tuple[messages.Member, ...]] = WeakKeyDictionary()

    @override
    def advertise(self, assignment: AssignmentId, setup: Setup, random: Callable[[int], bytes]) -> bytes:
        key = self._enrolled_key(assignment.client_id)
        public_key = key.public_key().public_bytes_raw()
        participant = Participant(setup, public_key, key.sign, ParticipantLimits(), random)
        self._participants[assignment] = participant
        return participant.advertise()

    @override
    def share(self, assignment: AssignmentId, group: MaskedGroup, position: int) -> bytes:
        return self._participants[assignment].share(unmasking.make_roster(self._members(group), position))

    @override
    def mask(self, assignment: AssignmentId, group: MaskedGroup, position: int, vector: Masked) -> None:
        held = unmasking.route_shares(group.graph, position, group.sent)
        self._participants[assignment].mask(held, vector)

    @override
    def confirm(self, assignment: AssignmentId, group: MaskedGroup) -> bytes:
        return self._participants[assignment].confirm(group.survivors.to_bytes())

    @override
    def answer(self, assignment: AssignmentId, group: MaskedGroup) -> bytes:
        request = unmasking.make_request(group.survivors, group.confirmations)
        return self._participants[assignment].answer(request)

    @override
    def remove_masks(self, setup: Setup, group: MaskedGroup, total: Masked) -> None:
        wrong = unmasking.remove_masks(
            setup, self._members(group), group.sent, group.survivors, group.answers, total, system.num_cores()
        )
        assert not wrong, "simulated clients are honest"

    @override
    def forget(self, assignment: AssignmentId) -> None:
        self._participants.pop(assignment, None)

    def _members(self, group: MaskedGroup) -> tuple[messages.Member, ...]:
        members = self._rosters.get(group)
        if members is None:
            members = self._rosters[group] = tuple(
                messages.Member(
                    each.client_id,
                    self._enrolled_key(each.client_id).public_key().public_bytes_raw(),
                    messages.KeyAdvertisement.from_bytes(part.keys),
                )
                for each, part in zip(group.assignments, group.parts, strict=True)
            )
        return members

    def _enrolled_key(self, client_id: str) -> Ed25519PrivateKey:
        key = self._enrolled.get(client_id)
        if key is None:
            secret = hashlib.sha256(f"fedplat simulation {self._seed} {client_id}".encode()).digest()
            key = self._enrolled[client_id] = Ed25519PrivateKey.from_private_bytes(secret)
        return key
