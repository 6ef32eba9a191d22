"""What a silo gets from others: the models of its neighbours, and its part in a ring all-reduce."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fedplat.errors import GossipError, SecureAggregationError
from fedplat.gossip import messages, ring, stated, topology
from fedplat.gossip.mixing import find_largest
from fedplat.gossip.steps import Contact, Offered, chunk_name
from fedplat.model import Vector
from fedplat.secure_aggregation.primitives import KeyPair, is_signature
from fedplat.wire.v1 import model_pb2
from fedplat_client import cancellation, errors, task
from fedplat_client._protocols.gossip.model import SiloModel
from fedplat_client._protocols.gossip.network import ChunkName, PeerNetwork, RemoteFile

_FETCHES = 4
"""Models that are fetched from ports at a time."""
_RELAY_WAIT_S = 10.0
"""How long one call waits for the only file that is missing; with several, they take turns each second."""
_RELAY_TURN_S = 1.0
_ERRORS = (errors.TransferError, errors.CallError, GossipError, OSError)
_NOT_WANTED = cancellation.Stop(model_pb2.REASON_UNSPECIFIED, "the models are not wanted any more")
_logger = logging.getLogger(__name__)


class Fetched(NamedTuple):
    """A neighbour's model: the path of its verified file, or None if the silo cannot get it."""

    offered: Offered
    path: Path | None


def fetch_models(
    models: Collection[Offered], model: SiloModel, network: PeerNetwork, phase: task.Control
) -> Generator[Fetched]:
    """Yield each model as soon as it is there or cannot be got; end when the signal of the phase is set."""
    found: queue.SimpleQueue[Fetched | None] = queue.SimpleQueue()
    run = _Fetching(model, network, phase, found.put)
    missing = [each for each in models if not run.try_stored(each)]
    jobs: list[Callable[[], None]] = [lambda each=each: run.fetch(each) for each in missing if each.contact.address]
    if relayed := [each for each in missing if not each.contact.address]:
        jobs.append(lambda: run.receive_all(relayed))

    def work(job: Callable[[], None]) -> None:
        try:
            job()
        except errors.Cancelled:
            pass
        finally:
            found.put(None)

    with ThreadPoolExecutor(_FETCHES + 1, "fedplat-models") as executor:
        futures = [executor.submit(work, job) for job in reversed(jobs)]  # the one for the relay takes longest
        num_ended = 0
        try:
            while num_ended < len(futures) or not found.empty():
                if (each := found.get()) is None:
                    num_ended += 1
                else:
                    yield each
        except GeneratorExit:
            phase.signal.set(_NOT_WANTED)  # else the threads would continue
            raise
        for future in futures:
            future.result()


class _Fetching:
    """Fetches in threads; `put` gets what comes of it."""

    def __init__(
        self, model: SiloModel, network: PeerNetwork, phase: task.Control, put: Callable[[Fetched], object]
    ) -> None:
        self._model = model
        self._network = network
        self._phase = phase
        self._put = put

    def try_stored(self, offered: Offered) -> bool:
        """Return whether the silo has a model already, or must not get it."""
        path = self._model.find(offered.digest)
        if path is None and offered.size_bytes == self._model.file_bytes:
            return False
        if path is None:
            text = f"the file has {offered.size_bytes} bytes; expected {self._model.file_bytes}"
            self._miss(offered, errors.PeerError("WRONG_SIZE", text))
        else:
            self._put(Fetched(offered, path))
        return True

    def fetch(self, offered: Offered) -> None:
        """Fetch a model from the neighbour's port: the step to it, or the whole file."""
        contact, phase = offered.contact, self._phase
        if self._model.can_follow(offered):
            try:
                path = self._network.fetch(contact, _step_of(offered), phase)
                self._put(Fetched(offered, self._model.follow(offered, path)))
                return
            except _ERRORS as exc:
                _log("The whole file of a neighbour is fetched, since the step to it is of no use", offered, exc)
        try:
            self._put(Fetched(offered, self._network.fetch(contact, _whole_of(offered), phase)))
        except _ERRORS as exc:
            self._miss(offered, exc)

    def receive_all(self, models: Collection[Offered]) -> None:
        """Receive models through the server, in turns, because a neighbour may not have sent its one yet."""
        waiting = deque((each, _list_files(each, self._model)) for each in models)
        while waiting:
            offered, files = waiting.popleft()
            is_last = not waiting and len(files) == 1
            try:
                for remote in files:
                    if (path := self._receive(offered, remote, is_last=is_last)) is not None:
                        self._put(Fetched(offered, path))
                        break
                else:
                    waiting.append((offered, files))
            except _ERRORS as exc:
                if files[1:]:  # the step was of no use
                    waiting.append((offered, files[1:]))
                else:
                    self._miss(offered, exc)

    def _receive(self, offered: Offered, remote: RemoteFile, *, is_last: bool) -> Path | None:
        """Return the path of a file; None if the neighbour has not sent it yet."""
        wait_s, phase = _RELAY_WAIT_S if is_last else _RELAY_TURN_S, self._phase
        try:
            path = self._network.receive(offered.contact, remote, wait_s, phase)
        except errors.NotSentYetError as exc:
            if phase.remaining_s <= 0:
                raise errors.PeerError("TIMEOUT", "the file did not come through the server in time") from exc
            return None
        return path if remote.digest == offered.digest else self._model.follow(offered, path)

    def _miss(self, offered: Offered, exc: Exception) -> None:
        if not self._phase.signal.is_set():
            _log("The model of a neighbour is missed", offered, exc)
        self._put(Fetched(offered, None))


def _list_files(offered: Offered, model: SiloModel) -> list[RemoteFile]:
    """Return the files of which one is enough: the step first, which is smaller."""
    return [*([_step_of(offered)] if model.can_follow(offered) else []), _whole_of(offered)]


def _step_of(offered: Offered) -> RemoteFile:
    assert offered.delta is not None
    return RemoteFile(offered.delta.digest, offered.delta.size_bytes)


def _whole_of(offered: Offered) -> RemoteFile:
    return RemoteFile(offered.digest, offered.size_bytes)


def _log(sentence: str, offered: Offered, exc: Exception) -> None:
    _logger.warning("%s: %s", sentence, exc, extra={"peer": offered.contact.silo})


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
        begun: messages.BeginRing,
        contacts: Sequence[Contact],
        key: KeyPair,
        model: Vector,
        network: PeerNetwork,
        *,
        is_secret: bool,
    ) -> None:
        own = network.own.client_id
        try:
            if is_secret and sum(member.share > 0.0 for member in begun.members) < topology.MIN_RING:
                raise ValueError(f"the mean has fewer than {topology.MIN_RING} models")
            _check_keys(job_id, begun, contacts, network)
            self._ring = ring.Ring(
                job_id=job_id,
                round=begun.round,
                attempt=begun.attempt,
                members=begun.members,
                bound=begun.bound,
                size=model.size,
            )
            self.member = ring.RingMember(self._ring, own, key, model)
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


def _check_keys(job_id: str, begun: messages.BeginRing, contacts: Sequence[Contact], network: PeerNetwork) -> None:
    """Raise `SecureAggregationError` unless each key is signed by its silo, which the owner trusts."""
    if [contact.silo for contact in contacts] != [member.silo for member in begun.members]:
        raise SecureAggregationError("the members of the ring are not those of the contacts")
    for contact, member in zip(contacts, begun.members, strict=True):
        payload = ring.key_payload(job_id, begun.round, begun.attempt, member.silo, member.key)
        if not is_signature(contact.public_key, member.signature, payload):
            raise SecureAggregationError(f"the key of {member.silo} is not signed by it")
        if contact.silo != network.own.client_id and not network.is_trusted(contact):
            raise SecureAggregationError(f"{contact.silo} is not one of the trusted clients")
