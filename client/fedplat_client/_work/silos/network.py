"""How a silo reaches others: through their ports, or through the server's relay, which cannot read what it stores.

A silo with a port offers its files there, and others fetch them (`peers`). The files of a silo without one pass through
the server, encrypted for each receiver (`fedplat.secure_aggregation.relay`). The same holds for the chunks of a ring.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np

from fedplat.errors import SecureAggregationError
from fedplat.gossip.steps import Contact
from fedplat.secure_aggregation.primitives import KeyPair
from fedplat.secure_aggregation.relay import (
    TAG_BYTES,
    RelayExchange,
    RelayKey,
    RelayLink,
    RelayMember,
    RelayMessage,
)
from fedplat.wire import pieces
from fedplat.wire.v1 import fleet_pb2
from fedplat_client._auth.calls import Connection
from fedplat_client._auth.peer_access import PeerAccess, PeerCredentials
from fedplat_client._work import transfer
from fedplat_client._work.peers.fetch import PeerFetcher, PeerFile, fetch_chunk
from fedplat_client._work.peers.listener import PeerListener
from fedplat_client._work.peers.relay import open_file, seal_file
from fedplat_client._work.transfer import Content
from fedplat_client.backoff import Backoff
from fedplat_client.errors import (
    CallError,
    CallRefusedError,
    Cancelled,
    PeerError,
    ServerUnavailableError,
    TransferError,
)
from fedplat_client.task import Control

_RELAY_WAIT_S = 10.0
"""How long one call waits at the server for a file that another silo has not sent yet."""
_SENDERS = 2
"""Files that are sent to the relay at a time: a server allows few streams of one client."""
_NO_KEY = RelayKey(bytes(32), bytes(64))
_logger = logging.getLogger(__name__)


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


class ChunkName(NamedTuple):
    """The names of a chunk of a ring: at the sender's port, and in the relay."""

    offered: str
    relayed: str


class Offer(NamedTuple):
    """A file for some silos, by its digest."""

    digest: str
    path: Path
    receivers: Sequence[Contact]


@dataclass(frozen=True, kw_only=True)
class PeerNetwork:
    """A silo's way to others in one assignment; a context manager that closes its connections.

    `own` is the silo as others see it, with the key pair `key`. Methods raise `PeerError` for another silo that cannot
    be reached or must not be trusted, and `Cancelled`. Each gets the deadline and the signal of a phase (`Control`).
    """

    connection: Connection
    token: str
    exchange: RelayExchange
    own: RelayMember
    key: KeyPair
    trusted: Collection[bytes] | None
    listener: PeerListener | None
    access: PeerAccess | None
    fetcher: PeerFetcher
    folder: Path
    counter: ByteCounter = field(default_factory=ByteCounter)
    _channels: dict[str, grpc.Channel] = field(default_factory=dict[str, grpc.Channel])

    def __enter__(self) -> PeerNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    # --- sending ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def serve(self, offers: Iterable[Offer], control: Control) -> Generator[None]:
        """Let other silos get some files within the block: at the silo's own port, or through the server."""
        if self.listener is not None:
            with contextlib.ExitStack() as stack:
                for offer in offers:
                    stack.enter_context(self.offer(offer.digest, offer.path, offer.receivers))
                yield
            return
        executor = ThreadPoolExecutor(_SENDERS, "fedplat-relay")
        try:
            for offer in offers:
                for receiver in filter(self._is_trusted, offer.receivers):
                    executor.submit(self._send_file, receiver, offer.digest, offer.path, control)
            yield
        finally:
            executor.shutdown(cancel_futures=True)

    @contextlib.contextmanager
    def offer(self, name: str, content: Path | bytes, receivers: Iterable[Contact]) -> Generator[None]:
        """Offer a file or a chunk at the silo's own port within the block."""
        assert self.listener is not None
        names = {each.silo for each in receivers if self._is_trusted(each)}
        with self.listener.offer(name, content, names, lambda number: self.counter.add(sent=number)):
            yield

    def _is_trusted(self, contact: Contact) -> bool:
        return self.trusted is None or contact.public_key in self.trusted

    def _send_file(self, receiver: Contact, digest: str, path: Path, control: Control) -> None:
        """Send a file through the server. What fails is logged: the receiver then does without it."""
        sealed = self.folder / f"sealed-{hashlib.sha256(receiver.silo.encode()).hexdigest()}-{digest}"
        try:
            link = RelayLink(self.exchange, self.own, self.verify(receiver), digest, path.stat().st_size)
            seal_file(link, self.key, path, sealed)
            content = Content((np.memmap(sealed, np.uint8, mode="r").data,))
            transfer.upload(self.connection, self.token, content, control, receiver.silo, digest)
            self.counter.add(sent=link.sealed_bytes)
        except Cancelled:
            pass  # the phase is over
        except (SecureAggregationError, TransferError, CallError, OSError) as exc:
            _logger.warning("A model could not be sent to a neighbour: %s", exc, extra={"peer": receiver.silo})
        finally:
            sealed.unlink(missing_ok=True)

    def send_chunk(self, receiver: Contact, name: ChunkName, content: bytes, control: Control) -> None:
        """Send a chunk of a ring through the server."""
        message = RelayMessage(self.exchange, self.own, self.verify(receiver), name.relayed)
        sealed = message.seal(self.key, content)
        try:
            parts = Content((memoryview(sealed),))
            transfer.upload(self.connection, self.token, parts, control, receiver.silo, name.relayed)
        except (TransferError, CallError) as exc:
            raise PeerError("REFUSED", f"the chunk for {receiver.silo} could not be sent: {exc}") from exc
        self.counter.add(sent=len(sealed))

    # --- receiving -------------------------------------------------------------------------------------------

    def fetch(self, sender: Contact, digest: str, size_bytes: int, control: Control) -> Path:
        """Return the path of a verified file of another silo."""
        member = self.verify(sender)
        if sender.address:
            file = PeerFile(sender.silo, sender.address, digest, size_bytes)
            credentials, signal = self._credentials(control), control.signal
            path = self.fetcher.fetch(file, credentials, control.remaining_s, signal, size_bytes)
            self.counter.add(received=size_bytes)
            return path
        link = RelayLink(self.exchange, member, self.own, digest, size_bytes)
        name = f"{hashlib.sha256(sender.silo.encode()).hexdigest()}-{digest}"
        sealed, plain = self.folder / f"received-{name}", self.folder / f"opened-{name}"
        try:
            with sealed.open("wb") as target:
                self._receive(sender.silo, digest, link.sealed_bytes, target.write, control)
            self.counter.add(received=link.sealed_bytes)
            open_file(link, self.key, sealed, plain)
        except SecureAggregationError as exc:
            raise PeerError("WRONG_DIGEST", str(exc)) from exc
        finally:
            sealed.unlink(missing_ok=True)
        return plain

    def receive_chunk(self, sender: Contact, name: ChunkName, size_bytes: int, control: Control) -> bytes:
        """Return a chunk of a ring."""
        member = self.verify(sender)
        if sender.address:
            file = PeerFile(sender.silo, sender.address, name.offered, size_bytes)
            channel, options = self._connect(sender, control), control.options
            content = fetch_chunk(channel, file, control.remaining_s, control.signal, options)
            self.counter.add(received=size_bytes)
            return content
        received = bytearray()
        self._receive(sender.silo, name.relayed, size_bytes + TAG_BYTES, received.extend, control)
        self.counter.add(received=len(received))
        try:
            return RelayMessage(self.exchange, member, self.own, name.relayed).open(self.key, bytes(received))
        except SecureAggregationError as exc:
            raise PeerError("WRONG_DIGEST", str(exc)) from exc

    # --- trust and the server --------------------------------------------------------------------------------

    def verify(self, contact: Contact) -> RelayMember:
        """Return another silo as a member of the relay's exchange.

        Raises `PeerError` for one that the owner does not trust, or that needs the relay and has no signed key for it.
        """
        if not self._is_trusted(contact):
            raise PeerError("REFUSED", f"{contact.silo} is not one of the trusted clients")
        if not contact.relay_key:
            if contact.address:
                return RelayMember(contact.silo, contact.public_key, _NO_KEY)
            raise PeerError("REFUSED", f"{contact.silo} has neither a port nor a key for the server's relay")
        member = RelayMember(contact.silo, contact.public_key, RelayKey(contact.relay_key, contact.relay_signature))
        try:
            self.exchange.verify(member, self.trusted)
        except SecureAggregationError as exc:
            raise PeerError("REFUSED", str(exc)) from exc
        return member

    def _connect(self, sender: Contact, control: Control) -> grpc.Channel:
        channel = self._channels.get(sender.silo)
        if channel is None:
            channel = self._credentials(control).connect(sender.address, sender.silo)
            self._channels[sender.silo] = channel
        return channel

    def _credentials(self, control: Control) -> PeerCredentials:
        if self.access is None:
            raise PeerError("REFUSED", "this client has no certificate for peers, because its server has no TLS")
        try:
            return self.access.renew(control.signal)
        except CallError as exc:
            raise PeerError("REFUSED", f"this client gets no certificate for peers: {exc}") from exc

    def _receive(
        self, sender: str, name: str, size_bytes: int, write: Callable[[pieces.Bytes], object], control: Control
    ) -> None:
        """Pass what another silo has sent through the server to `write`, as it arrives; resume after breaks."""
        backoff, options, num_received = Backoff(control.options), control.options, 0
        while num_received < size_bytes:
            left_s = max(control.remaining_s, 0.001)
            request = fleet_pb2.DownloadRequest(
                token=self.token, sender=sender, name=name, offset=num_received, wait_s=min(_RELAY_WAIT_S, left_s)
            )
            try:
                with contextlib.closing(self.connection.download(request, left_s, control.signal)) as parts:
                    for part in parts:
                        num_received += len(part)
                        if num_received > size_bytes:
                            raise PeerError("WRONG_SIZE", f"more than {size_bytes} bytes came from {sender}")
                        write(part)
                        backoff.reset()
            except ServerUnavailableError as exc:
                options.wait(control.signal, min(backoff.next_s(exc.retry), max(control.remaining_s, 0.0)))
                control.signal.check()
                if control.remaining_s <= 0:
                    raise PeerError("TIMEOUT", f"{sender} sent nothing through the server in time: {exc}") from exc
            except CallRefusedError as exc:
                raise PeerError("REFUSED", f"the server refuses to pass on a file of {sender}: {exc}") from exc
            else:
                if num_received < size_bytes:
                    raise PeerError("WRONG_SIZE", f"{num_received} of {size_bytes} bytes came from {sender}")
