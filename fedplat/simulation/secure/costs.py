"""What a secure aggregation costs clients and server: bytes, exactly, and seconds of a core, by a formula.

The sizes of messages follow from who sends what to whom, so they are the same whether the protocol is carried out or
not. Seconds are counts of operations times `UNITS`: those of a server core of 2023 (AMD EPYC), which
`benchmarks/secure_costs.py` measures again, with AES in hardware. A phone needs several times as long.

Source of the counts: Bell et al. 2020, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead" (CCS),
Section 3.3.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec import Struct

from fedplat.secure_aggregation import encoding, messages
from fedplat.secure_aggregation.setup import Graph, Setup


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
    mask_entry_s: float = 1.2e-9
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


def advertise(setup: Setup, units: UnitCosts = UNITS) -> StepCost:
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
        peers = [each for each in self._graph.neighbours(position) if each in senders]
        held = messages.HeldShares(_fill(peers, messages.SEALED_BYTES))
        entry_s = units.encode_entry_s + (len(peers) + 1) * units.mask_entry_s
        if self._setup.encoding.noise is not None:
            entry_s += units.noise_entry_s
        cpu_s = len(peers) * (2 * units.exchange_s + units.seal_s) + self._length * entry_s
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
        pairs = sum(len(alive.intersection(self._graph.neighbours(each))) for each in survivors.dropped)
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
