"""A silo's part in a ring all-reduce: its chunks go to the next silo, and come from the one before."""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Generator, Sequence

from fedplat.errors import SecureAggregationError
from fedplat.gossip import stated
from fedplat.gossip.messages import BeginRing
from fedplat.gossip.mixing import find_largest
from fedplat.gossip.ring import Ring, RingMember, key_payload
from fedplat.gossip.steps import Contact, chunk_name
from fedplat.gossip.topology import MIN_RING
from fedplat.model import Vector
from fedplat.secure_aggregation.primitives import KeyPair, is_signature
from fedplat_client import errors, task
from fedplat_client._protocols.gossip.network import ChunkName, PeerNetwork


class BrokenRingError(errors.PeerError):
    """The chunk of a step did not come from this sender; or the silo itself cannot take part."""

    def __init__(self, sender: str, step: int, text: str) -> None:
        super().__init__("REFUSED", text)
        self.sender = sender
        self.step = step


class RingRun:
    """One attempt at a ring. `contacts` are its members in order, `key` is the silo's own for the attempt.

    Raises `BrokenRingError` if the silo must not take part. With `is_secret`, no silo must learn another's model: then
    a mean of two, which tells each the other's, is refused, and so are shares that would show one silo's model.
    """

    def __init__(  # noqa: PLR0913 -- what is averaged, with whom, and how they are reached
        self,
        job_id: str,
        begun: BeginRing,
        contacts: Sequence[Contact],
        key: KeyPair,
        model: Vector,
        network: PeerNetwork,
        *,
        is_secret: bool,
    ) -> None:
        own = network.own.client_id
        try:
            if is_secret and sum(member.share > 0.0 for member in begun.members) < MIN_RING:
                raise ValueError(f"the mean has fewer than {MIN_RING} models")
            _check_keys(job_id, begun, contacts, network)
            self._ring = Ring(
                job_id=job_id,
                round=begun.round,
                attempt=begun.attempt,
                members=begun.members,
                bound=begun.bound,
                size=model.size,
            )
            self.member = RingMember(self._ring, own, key, model)
            if is_secret:
                stated.check_shares([member.share for member in begun.members], network.max_share)
            stated.check_bound(begun.bound, find_largest(model))
        except (SecureAggregationError, ValueError) as exc:
            raise BrokenRingError(own, 0, f"the ring cannot be trusted: {exc}") from exc
        self._network = network
        self._position = [contact.silo for contact in contacts].index(own)
        self._next = contacts[(self._position + 1) % len(contacts)]
        self._before = contacts[self._position - 1]

    @contextlib.contextmanager
    def run(self, control: task.Control) -> Generator[None]:
        """Take all steps, and keep the last chunks for the next silo within the block.

        Raises `BrokenRingError` or `Cancelled`. A chunk is kept until the next silo must have had it: when this silo
        gets a chunk, the next one has got all but its last n - 1.
        """
        kept: deque[contextlib.ExitStack] = deque()
        listener = self._network.port.listener
        expected = listener.expect([self._next.silo]) if listener is not None else contextlib.nullcontext()
        try:
            with expected:
                for step in range(self._ring.num_steps):
                    self._send(step, kept, control)
                    self._receive(step, control)
                    while len(kept) > len(self._ring.members):
                        kept.popleft().close()
                yield
        finally:
            for each in kept:
                each.close()

    def _send(self, step: int, kept: deque[contextlib.ExitStack], control: task.Control) -> None:
        name, content = self._name(self._position, step), self.member.outgoing(step)
        network, counter = self._network, self._network.counter
        if network.port.listener is not None:
            offer = network.port.listener.offer(
                name.offered, content, [self._next.silo], on_sent=lambda number: counter.add(sent=number)
            )
            kept.append(contextlib.ExitStack())
            kept[-1].enter_context(offer)
            return
        try:
            network.send_chunk(self._next, name, content, control)
        except (errors.PeerError, errors.CallError) as exc:
            raise BrokenRingError(network.own.client_id, step, str(exc)) from exc

    def _receive(self, step: int, control: task.Control) -> None:
        chunk = self._ring.chunk(self._position - step - 1)
        name = self._name(self._position - 1, step)
        try:
            content = self._network.receive_chunk(self._before, name, 4 * (chunk.stop - chunk.start), control)
            self.member.receive(step, content)
        except (errors.PeerError, errors.CallError, ValueError) as exc:
            raise BrokenRingError(self._before.silo, step, str(exc)) from exc

    def _name(self, position: int, step: int) -> ChunkName:
        number = (position % len(self._ring.members)).to_bytes(4, "big") + step.to_bytes(4, "big")
        offered = hashlib.sha256(b"fedplat ring chunk 1" + self._ring.context + number).hexdigest()
        return ChunkName(offered, chunk_name(self._ring.attempt, step))


def _check_keys(job_id: str, begun: BeginRing, contacts: Sequence[Contact], network: PeerNetwork) -> None:
    """Raise `SecureAggregationError` unless each key is signed by its silo, which the owner trusts."""
    if [contact.silo for contact in contacts] != [member.silo for member in begun.members]:
        raise SecureAggregationError("the members of the ring are not those of the contacts")
    for contact, member in zip(contacts, begun.members, strict=True):
        payload = key_payload(job_id, begun.round, begun.attempt, member.silo, member.key)
        if not is_signature(contact.public_key, member.signature, payload):
            raise SecureAggregationError(f"the key of {member.silo} is not signed by it")
        if contact.silo != network.own.client_id and not network.is_trusted(contact):
            raise SecureAggregationError(f"{contact.silo} is not one of the trusted clients")
