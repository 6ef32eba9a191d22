"""How a silo reaches others, and what it lets them have: by ports, or by the server's relay, which cannot read it.

A silo with a port offers its files there, and others fetch them (`peers`). The files of a silo without one pass through
the server, encrypted for each receiver (`fedplat.secure_aggregation.relay`). The same holds for the chunks of a ring.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import grpc
import numpy as np

from fedplat.errors import SecureAggregationError
from fedplat.gossip.stated import MAX_SHARE
from fedplat.gossip.steps import Contact
from fedplat.secure_aggregation import primitives, relay
from fedplat.wire import messages
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import errors
from fedplat_client._auth.authenticator import Connection
from fedplat_client._state.silo_store import is_digest
from fedplat_client._work import transfer
from fedplat_client._work.content import Content
from fedplat_client._work.peers.fetch import PeerFetcher, PeerFile, fetch_chunk, open_file, seal_file
from fedplat_client._work.peers.listener import PeerListener
from fedplat_client._work.peers.port import PeerPort
from fedplat_client.backoff import Backoff
from fedplat_client.cancellation import Stop
from fedplat_client.options import ClientOptions
from fedplat_client.task import Control

CHUNK_WAIT_S = 10.0
"""How long one call waits at the server for a chunk that another silo has not sent yet."""
_MIN_WAIT_S = 0.05


class ByteCounter:
    """Counts the bytes of models that were sent and received; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = (0, 0)

    def add(self, sent: int = 0, received: int = 0) -> None:
        """Add bytes."""
        with self._lock:
            self._numbers = self._numbers[0] + sent, self._numbers[1] + received

    def take(self) -> tuple[int, int]:
        """Return the bytes sent and received since the last call."""
        with self._lock:
            numbers, self._numbers = self._numbers, (0, 0)
        return numbers


class RemoteFile(NamedTuple):
    """A file of another silo, by its SHA-256."""

    digest: str
    size_bytes: int


class ChunkName(NamedTuple):
    """The names of a chunk of a ring: at the sender's port, and in the relay."""

    offered: str
    relayed: str


@dataclass(frozen=True, kw_only=True)
class PeerNetwork:
    """A silo's way to others in one assignment; a context manager that closes its connections.

    `own` is the silo as others see it, with the key pair `key` for the relay. The owner trusts the silos with the keys
    `trusted`, and lets one model be `max_share` of a mean. Methods raise `PeerError` for another silo that cannot be
    reached or must not be trusted, and `Cancelled`; they get the deadline and the signal of a phase (`Control`).
    """

    connection: Connection
    token: str
    exchange: relay.RelayExchange
    own: relay.RelayMember
    key: primitives.KeyPair
    trusted: Collection[bytes] | None
    port: PeerPort
    fetcher: PeerFetcher
    folder: Path
    counter: ByteCounter
    max_share: float = MAX_SHARE
    _channels: dict[str, grpc.Channel] = field(default_factory=dict[str, grpc.Channel])

    def __enter__(self) -> PeerNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def is_trusted(self, contact: Contact) -> bool:
        """Return whether the client's owner allows exchanges with another silo."""
        return self.trusted is None or contact.public_key in self.trusted

    def _check(self, contact: Contact) -> None:
        if not self.is_trusted(contact):
            raise errors.PeerError("REFUSED", f"{contact.silo} is not one of the trusted clients")
        if contact.silo == self.own.client_id:
            raise errors.PeerError("REFUSED", f"the server named {contact.silo}, this silo itself, as another one")

    def _verify(self, contact: Contact) -> relay.RelayMember:
        """Return another silo as a member of the relay's exchange, whose key it has signed."""
        self._check(contact)
        if not contact.relay_key:
            raise errors.PeerError("REFUSED", f"{contact.silo} has neither a port nor a key for the server's relay")
        member = relay.RelayMember(
            contact.silo, contact.public_key, relay.RelayKey(contact.relay_key, contact.relay_signature)
        )
        try:
            self.exchange.verify(member, self.trusted)
        except SecureAggregationError as exc:
            raise errors.PeerError("REFUSED", str(exc)) from exc
        return member

    def fetch(self, sender: Contact, remote: RemoteFile, control: Control) -> Path:
        """Return the path of a verified file from the port of another silo."""
        self._check(sender)
        _check_digest(remote)
        file = PeerFile(sender.silo, sender.address, remote.digest, remote.size_bytes)
        credentials = self.port.renew(control.signal)
        path = self.fetcher.fetch(file, credentials, control.remaining_s, control.signal, remote.size_bytes)
        self.counter.add(received=remote.size_bytes)
        return path

    def send(self, receiver: Contact, digest: str, path: Path, control: Control) -> None:
        """Send a file through the server. Raises also `TransferError`, `CallError` and `OSError`."""
        sealed = self.folder / f"sealed-{digest}-{receiver.public_key.hex()}"
        try:
            link = relay.RelayLink(self.exchange, self.own, self._verify(receiver), digest, path.stat().st_size)
            seal_file(link, self.key, path, sealed)
            content = Content((np.memmap(sealed, np.uint8, mode="r").data,))
            transfer.upload(self.connection, self.token, content, control, receiver.silo, digest)
            self.counter.add(sent=link.sealed_bytes)
        except SecureAggregationError as exc:
            raise errors.PeerError("REFUSED", str(exc)) from exc
        finally:
            sealed.unlink(missing_ok=True)

    def receive(self, sender: Contact, remote: RemoteFile, wait_s: float, control: Control) -> Path:
        """Return the path of a verified file that another silo has sent through the server.

        Raises `NotSentYetError` if it has not after `wait_s`.
        """
        _check_digest(remote)
        link = relay.RelayLink(self.exchange, self._verify(sender), self.own, remote.digest, remote.size_bytes)
        sealed, plain = self.folder / f"received-{remote.digest}", self.folder / f"opened-{remote.digest}"
        try:
            with sealed.open("wb") as target:
                self._receive(sender.silo, remote.digest, link.sealed_bytes, target.write, wait_s, control)
            open_file(link, self.key, sealed, plain)
        except SecureAggregationError as exc:
            raise errors.PeerError("WRONG_DIGEST", f"the file of {sender.silo}: {exc}") from exc
        finally:
            sealed.unlink(missing_ok=True)
        return plain

    def _receive(
        self,
        sender: str,
        name: str,
        size_bytes: int,
        write: Callable[[messages.Bytes], object],
        wait_s: float,
        control: Control,
    ) -> None:
        """Pass what another silo has sent to `write`, as it arrives; resume after breaks."""
        backoff, num_received = Backoff(control.options), 0
        while num_received < size_bytes:
            left_s = max(control.remaining_s, 0.001)
            request = fleet_pb2.DownloadRequest(
                token=self.token, sender=sender, name=name, offset=num_received, wait_s=min(wait_s, left_s)
            )
            try:
                with contextlib.closing(self.connection.download(request, left_s, control.signal)) as parts:
                    for part in parts:
                        num_received += len(part)
                        self.counter.add(received=len(part))
                        if num_received > size_bytes:
                            raise errors.PeerError("WRONG_SIZE", f"more than {size_bytes} bytes came from {sender}")
                        write(part)
                        backoff.reset()
            except errors.NotSentYetError:
                # A server that does not wait itself would make a busy loop.
                control.options.wait(control.signal, min(_MIN_WAIT_S, max(control.remaining_s, 0.0)))
                control.signal.check()
                raise
            except errors.ServerUnavailableError as exc:
                control.options.wait(control.signal, min(backoff.next_s(exc.retry), max(control.remaining_s, 0.0)))
                control.signal.check()
                if control.remaining_s <= 0:
                    raise errors.PeerError(
                        "TIMEOUT", f"no file of {sender} came through the server in time: {exc}"
                    ) from exc
            except errors.CallRefusedError as exc:
                raise errors.PeerError("REFUSED", f"the server refuses to pass on a file of {sender}: {exc}") from exc
            else:
                if num_received < size_bytes:
                    raise errors.PeerError("WRONG_SIZE", f"{num_received} of {size_bytes} bytes came from {sender}")

    def send_chunk(self, receiver: Contact, name: ChunkName, content: bytes, control: Control) -> None:
        """Send a chunk of a ring through the server."""
        message = relay.RelayMessage(self.exchange, self.own, self._verify(receiver), name.relayed)
        sealed = message.seal(self.key, content)
        try:
            parts = Content((memoryview(sealed),))
            transfer.upload(self.connection, self.token, parts, control, receiver.silo, name.relayed)
        except errors.TransferError as exc:
            raise errors.PeerError("REFUSED", f"the chunk for {receiver.silo} could not be sent: {exc}") from exc
        self.counter.add(sent=len(sealed))

    def receive_chunk(self, sender: Contact, name: ChunkName, size_bytes: int, control: Control) -> bytes:
        """Return a chunk of a ring, from the sender's port or through the server."""
        if sender.address:
            self._check(sender)
            file = PeerFile(sender.silo, sender.address, name.offered, size_bytes)
            channel = self._connect(sender, control)
            content = fetch_chunk(channel, file, control.remaining_s, control.signal, control.options)
            self.counter.add(received=size_bytes)
            return content
        message = relay.RelayMessage(self.exchange, self._verify(sender), self.own, name.relayed)
        while True:
            received = bytearray()
            try:
                sealed_bytes = size_bytes + relay.TAG_BYTES
                self._receive(sender.silo, name.relayed, sealed_bytes, received.extend, CHUNK_WAIT_S, control)
                return message.open(self.key, bytes(received))
            except errors.NotSentYetError as exc:
                if control.remaining_s <= 0:
                    raise errors.PeerError(
                        "TIMEOUT", f"{sender.silo} sent no chunk through the server in time"
                    ) from exc
            except SecureAggregationError as exc:
                raise errors.PeerError("WRONG_DIGEST", f"the chunk of {sender.silo}: {exc}") from exc

    def _connect(self, sender: Contact, control: Control) -> grpc.Channel:
        channel = self._channels.get(sender.silo)
        if channel is None:
            channel = self.port.renew(control.signal).connect(sender.address, sender.silo)
            self._channels[sender.silo] = channel
        return channel


def _check_digest(remote: RemoteFile) -> None:
    if not is_digest(remote.digest):  # it becomes the name of a file
        raise errors.PeerError("WRONG_DIGEST", f"the server names the file {remote.digest!r}, which is no SHA-256")


_SENDERS = 1
"""Models, and means, that are sent through the server at a time: with one file that is received, fewer streams than it
allows."""
_NOT_WANTED = Stop(model_pb2.REASON_UNSPECIFIED, "the file is not wanted any more")
_logger = logging.getLogger(__name__)


class Delivery(NamedTuple):
    """A file for another silo."""

    receiver: Contact
    digest: str
    path: Path

    @property
    def key(self) -> tuple[str, str]:
        """The receiver and the file, which identify it."""
        return self.receiver.silo, self.digest


class Offers(Protocol):
    """The files that other silos may have now."""

    def update(self, deliveries: Iterable[Delivery]) -> None:
        """Replace the files: begin with new ones, and end those that are not there any more."""

    def close(self) -> None:
        """End all."""


class RecordedOffers:
    """Files that other silos may have once the record of what leaves the client names them.

    `record` notes one, and raises if it cannot.
    """

    def __init__(self, inner: Offers, record: Callable[[Delivery], None]) -> None:
        self._inner = inner
        self._record = record
        self._recorded = set[tuple[str, str]]()

    def update(self, deliveries: Iterable[Delivery]) -> None:
        """Replace the files, of which new ones are noted before."""
        wanted = {each.key: each for each in deliveries}
        for key in wanted.keys() - self._recorded:
            self._record(wanted[key])
            self._recorded.add(key)
        self._inner.update(wanted.values())

    def close(self) -> None:
        """End all."""
        self._inner.close()


class PortOffers:
    """Files that the silo offers at its port."""

    def __init__(self, listener: PeerListener, counter: ByteCounter) -> None:
        self._listener = listener
        self._counter = counter
        self._open: dict[tuple[str, str], contextlib.ExitStack] = {}

    def update(self, deliveries: Iterable[Delivery]) -> None:
        """Replace the files that are offered."""
        wanted = {each.key: each for each in deliveries}
        for key in self._open.keys() - wanted.keys():
            self._open.pop(key).close()
        for key in wanted.keys() - self._open.keys():
            receiver, digest, path = wanted[key]
            stack = self._open[key] = contextlib.ExitStack()
            offer = self._listener.offer(
                digest, path, [receiver.silo], on_sent=lambda number: self._counter.add(sent=number)
            )
            stack.enter_context(offer)

    def close(self) -> None:
        """Offer nothing any more."""
        self.update(())


class RelayOffers:
    """Files that the silo sends through the server in one assignment, each once."""

    def __init__(self, network: PeerNetwork, options: ClientOptions) -> None:
        self._network = network
        self._options = options
        self._executor = ThreadPoolExecutor(_SENDERS, "fedplat-relay")
        self._begun: dict[tuple[str, str], Control] = {}

    def update(self, deliveries: Iterable[Delivery]) -> None:
        """Send files that were not sent before, and stop to send others."""
        wanted = {each.key: each for each in deliveries}
        for key in self._begun.keys() - wanted.keys():
            self._begun.pop(key).signal.set(_NOT_WANTED)
        for key in wanted.keys() - self._begun.keys():
            control = self._begun[key] = Control(options=self._options)
            self._executor.submit(self._send, wanted[key], control)

    def close(self) -> None:
        """Stop to send files, and end the threads."""
        self.update(())
        self._executor.shutdown(cancel_futures=True)

    def _send(self, delivery: Delivery, control: Control) -> None:
        """Send a file; if that fails, the receiver does without it."""
        try:
            self._network.send(delivery.receiver, delivery.digest, delivery.path, control)
        except errors.Cancelled:
            pass
        except (errors.TransferError, errors.CallError, OSError) as exc:
            if not control.signal.is_set():
                fields = {"peer": delivery.receiver.silo}
                _logger.warning("A file could not be sent to another silo: %s", exc, extra=fields)
