"""The groups of a secure aggregation, the parts of clients and server, carried out or left out, and their costs.

`real.RealProtocol` runs `fedplat.secure_aggregation` with all its cryptography. `ModelledProtocol` is for cohorts for
which that would take too long: updates are encoded and added as always, only keys, shares and masks are missing.
Results are the same, bit for bit.

The sizes of messages follow from who sends what to whom, so they are the same whether the protocol is carried out or
not. Seconds are counts of operations times `UNITS`: those of a server core of 2023 (AMD EPYC), which
`benchmarks/secure_costs.py` measures again, with AES in hardware. A phone needs several times as long.

Source of the counts: Bell et al. 2020, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead" (CCS),
Section 3.3.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from typing_extensions import override

from fedplat.rounds import Assignment, AssignmentId, Attempt, records, states
from fedplat.rounds.protocols.secure_phases import find_survivors, list_groups, messages_of
from fedplat.secure_aggregation import encoding, messages
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
    def survivors(self) -> messages.Survivors:
        """The positions whose updates are in the sum, and those that dropped out; fixed once COLLECTING is over."""
        return find_survivors(self.assignments)

    @cached_property
    def confirmed(self) -> frozenset[int]:
        """The positions of those that have confirmed the survivors."""
        return frozenset(position for position, each in enumerate(self.parts) if each.confirmation)

    @cached_property
    def sent(self) -> Mapping[int, messages.SealedShares]:
        """The shares that members have sent."""
        return {
            position: messages.SealedShares.from_bytes(self.parts[position].shares) for position in sorted(self.senders)
        }

    @cached_property
    def confirmations(self) -> Mapping[int, messages.Confirmation]:
        """The confirmations of members."""
        return {
            position: messages.Confirmation.from_bytes(self.parts[position].confirmation)
            for position in sorted(self.confirmed)
        }

    @cached_property
    def answers(self) -> Mapping[int, messages.UnmaskAnswer]:
        """The answers of members."""
        return {
            position: messages.UnmaskAnswer.from_bytes(each.answer)
            for position, each in enumerate(self.parts)
            if each.answer
        }


def read_groups(options: messages.SecureAggregation, attempt: Attempt) -> list[MaskedGroup]:
    """Return the groups of an attempt in order; none before its roster is closed."""
    return [MaskedGroup(Graph.of(options, len(members)), tuple(members)) for members in list_groups(attempt)]


Masked = npt.NDArray[np.uint32]


def stand_in(client: int, phase: states.AttemptPhase) -> bytes:
    """Return a message that takes the place of one that is not computed: the coordinator reads only the keys."""
    if phase is not states.AttemptPhase.ADVERTISING:
        return b"\0"
    encryption_key, masking_key = (hashlib.sha256(f"{client} {each}".encode()).digest() for each in range(2))
    return messages.KeyAdvertisement(encryption_key, masking_key, bytes(messages.SIGNATURE_BYTES)).to_bytes()


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


class UnitCosts(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one core for an operation."""

    exchange_s: float = 60e-6
    """An X25519 key pair, or a shared secret with the keys derived from it."""
    sign_s: float = 55e-6
    verify_s: float = 110e-6
    seal_s: float = 3.5e-6
    """Encrypt or decrypt the shares for one holder."""
    encode_entry_s: float = 8e-9
    """Clip, round and write an entry of an update."""
    noise_entry_s: float = 140e-9
    """Rotate an entry, and draw its noise."""
    mask_entry_s: float = 0.6e-9
    """Generate an entry of a mask and add it."""
    add_entry_s: float = 0.5e-9
    """Read an entry of a masked update and add it."""
    share_s: float = 0.2e-6
    """Evaluate a coefficient of a polynomial for one holder, or use a share with a pair of others."""


UNITS = UnitCosts()


class StepCost(NamedTuple):
    """What a client pays: bytes received and sent, and seconds of a core."""

    bytes_down: float = 0.0
    bytes_up: float = 0.0
    cpu_s: float = 0.0

    def plus(self, other: StepCost) -> StepCost:
        """Return the sum."""
        return StepCost(*(mine + its for mine, its in zip(self, other, strict=True)))


_KEYS = messages.KeyAdvertisement(bytes(messages.KEY_BYTES), bytes(messages.KEY_BYTES), bytes(messages.SIGNATURE_BYTES))
KEYS_BYTES = len(_KEYS.to_bytes())
"""Size of the message with which a client advertises its keys."""
CONFIRMATION_BYTES = len(messages.Confirmation(bytes(messages.SIGNATURE_BYTES)).to_bytes())


def advertising_cost(setup: Setup, units: UnitCosts = UNITS) -> StepCost:
    """Return the cost of the first step: the setup, two key pairs and a signature."""
    return StepCost(len(setup.to_bytes()), KEYS_BYTES, 2 * units.exchange_s + units.sign_s)


class GroupCosts:
    """The costs of the later steps in a group of the clients `client_ids`."""

    def __init__(self, setup: Setup, graph: Graph, client_ids: Iterable[str], units: UnitCosts = UNITS) -> None:
        self._setup, self._graph, self._units = setup, graph, units
        self._members = tuple(messages.Member(each, bytes(messages.KEY_BYTES), _KEYS) for each in client_ids)
        self._length = setup.encoding.length

    @functools.cached_property
    def _roster_bytes(self) -> int:
        return len(messages.Roster(self._members, 0).to_bytes()) - _position_bytes(0)

    def share(self, position: int) -> StepCost:
        """Return the cost of the roster, and of the shares of both secrets for each holder."""
        units, degree, threshold = self._units, self._graph.degree, self._graph.threshold
        sent = messages.SealedShares(
            _fill(self._graph.neighbours(position), messages.SEALED_BYTES), bytes(messages.KEY_BYTES)
        )
        cpu_s = self._graph.size * units.verify_s + degree * (units.exchange_s + units.seal_s)
        cpu_s += 2 * (degree + 1) * threshold * units.share_s
        return StepCost(self._roster_bytes + _position_bytes(position), len(sent.to_bytes()), cpu_s)

    def mask(self, position: int, senders: frozenset[int]) -> StepCost:
        """Return the cost of an update that is encoded and masked; `senders` have sent shares."""
        units = self._units
        holders = [each for each in self._graph.neighbours(position) if each in senders]
        held = messages.HeldShares(_fill(holders, messages.SEALED_BYTES))
        num_masks = len(senders.intersection(self._graph.peers(position)))
        entry_s = units.encode_entry_s + (num_masks + 1) * units.mask_entry_s
        if self._setup.encoding.noise is not None:
            entry_s += units.noise_entry_s
        cpu_s = len(holders) * (units.exchange_s + units.seal_s) + num_masks * units.exchange_s + self._length * entry_s
        return StepCost(len(held.to_bytes()), encoding.file_bytes(self._setup), cpu_s)

    def confirm(self, survivors: messages.Survivors) -> StepCost:
        """Return the cost of a signature of the survivors."""
        return StepCost(len(survivors.to_bytes()), CONFIRMATION_BYTES, self._units.sign_s)

    def answer(self, position: int, survivors: messages.Survivors, confirmed: frozenset[int]) -> StepCost:
        """Return the cost of an answer, and of the confirmations that come before it."""
        request = messages.UnmaskRequest(survivors, _fill(sorted(confirmed), messages.SIGNATURE_BYTES))
        holders = self._graph.holders(position)
        alive, dropped = frozenset(survivors.survivors), frozenset(survivors.dropped)
        answer = messages.UnmaskAnswer(
            _fill([each for each in holders if each in alive], messages.SHARE_BYTES),
            _fill([each for each in holders if each in dropped], messages.SHARE_BYTES),
        )
        cpu_s = len(confirmed.intersection(holders)) * self._units.verify_s
        return StepCost(len(request.to_bytes()), len(answer.to_bytes()), cpu_s)

    def server_s(self, survivors: messages.Survivors, num_confirmed: int = 0) -> float:
        """Return the seconds of the server for a group's sum: to add the updates, and to remove the masks.

        It recovers the mask of each survivor, and those that each drop-out shares with its surviving neighbours.
        """
        units, alive, threshold = self._units, frozenset(survivors.survivors), self._graph.threshold
        pairs = sum(len(alive.intersection(self._graph.peers(each))) for each in survivors.dropped)
        num_secrets = len(survivors.survivors) + len(survivors.dropped)
        seconds = (self._graph.size + num_confirmed) * units.verify_s
        seconds += (self._graph.size + len(survivors.dropped) + pairs) * units.exchange_s
        # In a complete graph all secrets have the same holders, and so the same coefficients.
        num_interpolations = 1 if self._graph.degree == self._graph.size - 1 else num_secrets
        seconds += (num_interpolations * threshold**2 + num_secrets * threshold) * units.share_s
        seconds += self._length * len(alive) * (units.add_entry_s + units.mask_entry_s)
        return seconds + self._length * pairs * units.mask_entry_s


def _position_bytes(position: int) -> int:
    return len(msgspec.msgpack.encode(position))


def _fill(positions: Iterable[int], size: int) -> dict[int, bytes]:
    """Return a value of zeros for each position, which is encoded in as many bytes as a real one."""
    return dict.fromkeys(positions, bytes(size))
