"""A silo's part in a ring all-reduce: its chunks go to the next silo, and come from the one before."""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Collection, Generator, Sequence

from fedplat.errors import SecureAggregationError
from fedplat.gossip.ring import Ring, RingMember, key_payload
from fedplat.gossip.steps import Contact, chunk_name
from fedplat.model import Vector
from fedplat.secure_aggregation.primitives import KeyPair, is_signature
from fedplat_client._work.silos.network import ChunkName, PeerNetwork
from fedplat_client.errors import PeerError
from fedplat_client.task import Control


class BrokenRingError(PeerError):
    """A chunk did not come: of this step, from this sender."""

    def __init__(self, sender: str, step: int, text: str) -> None:
        super().__init__("REFUSED", text)
        self.sender = sender
        self.step = step


class RingRun:
    """One attempt at a ring, with the silo's fresh key pair for it; `contacts` are the members in order."""

    def __init__(
        self, ring: Ring, contacts: Sequence[Contact], key: KeyPair, model: Vector, network: PeerNetwork
    ) -> None:
        """Raise `SecureAggregationError` for a ring in which the silo must not take part."""
        own = network.own.client_id
        _check_keys(ring, contacts, network.trusted, own)
        try:
            self.member = RingMember(ring, own, key, model)
        except ValueError as exc:
            raise SecureAggregationError(f"the ring is none for this silo: {exc}") from exc
        self._ring, self._network = ring, network
        self._position = [contact.silo for contact in contacts].index(own)
        self._next = contacts[(self._position + 1) % len(contacts)]
        self._before = contacts[self._position - 1]

    @contextlib.contextmanager
    def run(self, control: Control) -> Generator[None]:
        """Take all steps; within the block, the next silo can get the last chunks.

        Raises `BrokenRingError` or `Cancelled`. A chunk is kept until the next silo must have had it: when this silo
        gets a chunk, the next one has got all but its last n - 1.
        """
        kept: deque[contextlib.ExitStack] = deque()
        listener = self._network.listener
        expecting = listener.expect({self._next.silo}) if listener is not None else contextlib.nullcontext()
        try:
            with expecting:
                for step in range(self._ring.num_steps):
                    self._take_step(step, kept, control)
                yield
        finally:
            for each in kept:
                each.close()

    def _take_step(self, step: int, kept: deque[contextlib.ExitStack], control: Control) -> None:
        try:
            self._send(step, kept, control)
        except PeerError as exc:
            raise BrokenRingError(self._network.own.client_id, step, str(exc)) from exc
        count = len(self._ring.members)
        chunk = self._ring.chunk(self._position - step - 1)
        try:
            name = self._name(self._position - 1, step)
            content = self._network.receive_chunk(self._before, name, 4 * (chunk.stop - chunk.start), control)
            self.member.receive(step, content)
        except (PeerError, ValueError) as exc:
            raise BrokenRingError(self._before.silo, step, str(exc)) from exc
        while len(kept) > count:
            kept.popleft().close()

    def _send(self, step: int, kept: deque[contextlib.ExitStack], control: Control) -> None:
        name, content = self._name(self._position, step), self.member.outgoing(step)
        if self._network.listener is None:
            self._network.send_chunk(self._next, name, content, control)
            return
        stack = contextlib.ExitStack()
        stack.enter_context(self._network.offer(name.offered, content, [self._next]))
        kept.append(stack)

    def _name(self, position: int, step: int) -> ChunkName:
        number = (position % len(self._ring.members)).to_bytes(4, "big") + step.to_bytes(4, "big")
        offered = hashlib.sha256(b"fedplat ring chunk 1" + self._ring.context + number).hexdigest()
        return ChunkName(offered, chunk_name(self._ring.attempt, step))


def _check_keys(ring: Ring, contacts: Sequence[Contact], trusted: Collection[bytes] | None, own: str) -> None:
    """Raise `SecureAggregationError` unless each key is signed by its silo, which the owner trusts."""
    if [contact.silo for contact in contacts] != [member.silo for member in ring.members]:
        raise SecureAggregationError("the members of the ring are not those of the contacts")
    for contact, member in zip(contacts, ring.members, strict=True):
        payload = key_payload(ring.job_id, ring.round, ring.attempt, member.silo, member.key)
        if not is_signature(contact.public_key, member.signature, payload):
            raise SecureAggregationError(f"the key of {member.silo} is not signed by it")
        if trusted is not None and contact.silo != own and contact.public_key not in trusted:
            raise SecureAggregationError(f"{contact.silo} is not one of the trusted clients")
