"""Silos that reach each other over real sockets, with certificates of a test authority, and a relay between them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, cast

import grpc

from fedplat.gossip.steps import Contact
from fedplat.secure_aggregation.primitives import KeyPair
from fedplat.secure_aggregation.relay import RelayExchange, RelayMember
from fedplat.wire import auth
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import ClientOptions
from fedplat_client._auth.authenticator import CallCredentials, Connection
from fedplat_client._auth.mtls import PeerCredentials
from fedplat_client._protocols.gossip.network import (
    ByteCounter,
    Delivery,
    Offers,
    PeerNetwork,
    PortOffers,
    RelayOffers,
    RemoteFile,
)
from fedplat_client._state.data_dir import SigningKey, new_signing_key
from fedplat_client._work.peers.fetch import PeerFetcher
from fedplat_client._work.peers.listener import PeerListener
from fedplat_client._work.peers.port import PeerPort
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import CallError, NotSentYetError, PeerError
from fedplat_client.task import Control
from fedplat_server.auth.pki_folder import Authority
from fedplat_server.auth.tls import utc_now
from support.peers import Time, client_id, credentials_of
from support.secure_group import random_of

EXCHANGE = RelayExchange("job", 1, 1)
_SILO = "silo"


@dataclasses.dataclass(eq=False)
class RelayedFile:
    """What one silo has sent to another by a name."""

    size_bytes: int
    digest: str
    content: bytearray = dataclasses.field(default_factory=bytearray)

    @property
    def is_complete(self) -> bool:
        return len(self.content) == self.size_bytes


class RelayFleet:
    """The calls of a server with which silos relay files; `files` are by sender, receiver and name."""

    def __init__(self) -> None:
        self.port = 0
        self.changed = threading.Condition()
        self.files: dict[tuple[str, str, str], RelayedFile] = {}
        self.calls = Counter[str]()
        self.cut_uploads: list[int] = []
        """After how many bytes the next uploads are cut."""
        self.cut_downloads: list[int] = []
        self.change: Callable[[bytes], bytes] = lambda content: content
        """What the server does to each file that it sends on."""
        self.longest_wait_s = 60.0
        self.closing = False

    @contextlib.contextmanager
    def serve(self) -> Generator[RelayFleet]:
        """Serve within the block."""
        server = grpc.server(futures.ThreadPoolExecutor(32))
        handlers = {
            "Upload": grpc.stream_unary_rpc_method_handler(
                self._upload, fleet_pb2.UploadRequest.FromString, fleet_pb2.UploadResponse.SerializeToString
            ),
            "QueryUpload": grpc.unary_unary_rpc_method_handler(
                self._query, fleet_pb2.QueryUploadRequest.FromString, fleet_pb2.QueryUploadResponse.SerializeToString
            ),
            "Download": grpc.unary_stream_rpc_method_handler(
                self._download, fleet_pb2.DownloadRequest.FromString, model_pb2.Chunk.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("fedplat.wire.v1.Fleet", handlers)])
        self.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield self
        finally:
            with self.changed:
                self.closing = True
                self.changed.notify_all()
            server.stop(None).wait()

    @property
    def relayed_bytes(self) -> bytes:
        """All that the server has seen of the silos' files."""
        return b"".join(bytes(each.content) for each in self.files.values())

    def _upload(self, requests: Iterator[fleet_pb2.UploadRequest], context: Any) -> fleet_pb2.UploadResponse:
        self.calls["Upload"] += 1
        header = next(requests).header
        with self.changed:
            key = (_caller(context), header.receiver, header.name)
            file = self.files.setdefault(key, RelayedFile(header.size_bytes, header.digest))
            limit = self.cut_uploads.pop(0) if self.cut_uploads else header.size_bytes
        if header.offset != len(file.content):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"expected the offset {len(file.content)}")
        for request in requests:
            file.content += request.data[: max(0, limit - len(file.content))]
        if not file.is_complete:
            context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        assert hashlib.sha256(file.content).hexdigest() == file.digest
        with self.changed:
            self.changed.notify_all()
        return fleet_pb2.UploadResponse(received_bytes=len(file.content))

    def _query(self, request: fleet_pb2.QueryUploadRequest, context: Any) -> fleet_pb2.QueryUploadResponse:
        self.calls["QueryUpload"] += 1
        file = self.files.get((_caller(context), request.receiver, request.name))
        return fleet_pb2.QueryUploadResponse(received_bytes=len(file.content) if file is not None else 0)

    def _download(self, request: fleet_pb2.DownloadRequest, context: Any) -> Iterator[model_pb2.Chunk]:
        self.calls["Download"] += 1
        key = (request.sender, _caller(context), request.name)
        with self.changed:
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: self.closing or not context.is_active() or self._is_there(key),
                timeout=min(request.wait_s, self.longest_wait_s),
            )
        if not self._is_there(key):
            context.set_trailing_metadata(((auth.METADATA_CODE, "NOT_SENT_YET"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "the other client has not sent the file yet")
        content = self.change(bytes(self.files[key].content))
        end = self.cut_downloads.pop(0) if self.cut_downloads else len(content)
        for start in range(request.offset, end, 100_000):
            yield model_pb2.Chunk(data=content[start : min(start + 100_000, end)])
        if end < len(content):
            context.abort(grpc.StatusCode.UNAVAILABLE, "cut")

    def _is_there(self, key: tuple[str, str, str]) -> bool:
        file = self.files.get(key)
        return file is not None and file.is_complete


def _caller(context: Any) -> str:
    return str(dict(context.invocation_metadata())[_SILO])


@dataclasses.dataclass(frozen=True)
class NamedAccess:
    """Calls by the name of a silo, which the relay believes."""

    channel: grpc.Channel
    silo: str

    def authenticate(self, method: str, request: bytes, signal: StopSignal) -> CallCredentials:
        return CallCredentials(self.channel, ((_SILO, self.silo),))

    def may_try_again(self, used: CallCredentials, exc: CallError) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class FixedAccess:
    """The certificate of a silo, which is not renewed."""

    current: PeerCredentials

    def renew(self, signal: StopSignal) -> PeerCredentials:
        return self.current


@dataclasses.dataclass(frozen=True)
class NetworkedSilo:
    """A silo: how it reaches others, and how they see it."""

    network: PeerNetwork
    contact: Contact
    enrolled: SigningKey
    folder: Path

    @property
    def name(self) -> str:
        return self.contact.silo

    def offers(self, options: ClientOptions) -> Offers:
        """What the silo lets others have, as in an assignment."""
        listener = self.network.port.listener
        return PortOffers(listener, self.network.counter) if listener else RelayOffers(self.network, options)


@dataclasses.dataclass
class Networks:
    """Silos with numbers from 1, and the relay of their server."""

    relay: RelayFleet
    authority: Authority
    folder: Path
    options: ClientOptions
    stack: contextlib.ExitStack
    patience_s: float = 60.0
    """The time of a phase."""
    time: Time | None = None
    """The clock of `impatient_networks_in`."""

    def add(
        self,
        number: int,
        *,
        has_port: bool,
        trusted: Collection[bytes] | None = None,
        access: PeerCredentials | None = None,
        signs_with: SigningKey | None = None,
    ) -> NetworkedSilo:
        """A silo, with a port of its own or without; `signs_with` is a key with which it is not enrolled."""
        name, folder = client_id(number), self.folder / f"silo-{number}"
        folder.mkdir()
        enrolled, key = SigningKey(new_signing_key()), KeyPair.draw(random_of(name))
        own = RelayMember(name, enrolled.public, EXCHANGE.advertise(name, key, (signs_with or enrolled).sign))
        certified = credentials_of(number, self.authority)
        listener = None
        if has_port:
            listener = self.stack.enter_context(PeerListener("127.0.0.1:0", lambda: certified))
            listener.open()
        address = f"localhost:{listener.port}" if listener is not None else ""
        channel = self.stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{self.relay.port}"))
        network = PeerNetwork(
            connection=Connection(NamedAccess(channel, name), 30.0),
            token=f"token-{number}",
            exchange=EXCHANGE,
            own=own,
            key=key,
            trusted=trusted,
            port=PeerPort(cast(Any, FixedAccess(access or certified)), listener, address),
            fetcher=PeerFetcher(folder / "received", self.options),
            folder=folder / "received",
            counter=ByteCounter(),
        )
        self.stack.enter_context(network)
        contact = Contact(name, enrolled.public, address, own.key.encryption_key, own.key.signature)
        return NetworkedSilo(network, contact, enrolled, folder)

    def add_all(self, has_ports: Sequence[bool]) -> list[NetworkedSilo]:
        """A silo for each of the flags."""
        return [self.add(number, has_port=has_port) for number, has_port in enumerate(has_ports, 1)]

    @contextlib.contextmanager
    def serve(self, sender: NetworkedSilo, digest: str, path: Path, *receivers: NetworkedSilo) -> Generator[None]:
        """Let silos have a file of another one within the block."""
        offers = sender.offers(self.options)
        try:
            offers.update(Delivery(each.contact, digest, path) for each in receivers)
            yield
        finally:
            offers.close()

    def get(self, sender: Contact, receiver: NetworkedSilo, remote: RemoteFile, control: Control) -> Path:
        """The file of a silo at another one, which asks until it is there."""
        if sender.address:
            return receiver.network.fetch(sender, remote, control)
        while True:
            try:
                return receiver.network.receive(sender, remote, 10.0, control)
            except NotSentYetError as exc:
                if control.remaining_s <= 0:
                    raise PeerError("TIMEOUT", str(exc)) from exc

    def control(self) -> Control:
        """The deadline and the signal of a phase."""
        return Control(training_timeout_s=self.patience_s, options=self.options)


@contextlib.contextmanager
def networks_in(folder: Path, options: ClientOptions | None = None) -> Generator[Networks]:
    """No silos yet, and their relay."""
    with RelayFleet().serve() as relay, contextlib.ExitStack() as stack:
        yield Networks(relay, Authority.new(utc_now()), folder, options or ClientOptions(first_backoff_s=0.01), stack)


@contextlib.contextmanager
def impatient_networks_in(folder: Path) -> Generator[Networks]:
    """The same with a clock that only waits move, and a relay that does not wait."""
    time = Time()
    with networks_in(folder, ClientOptions(clock=time.clock, wait=time.wait)) as networks:
        networks.relay.longest_wait_s, networks.patience_s, networks.time = 0.0, 5.0, time
        yield networks
