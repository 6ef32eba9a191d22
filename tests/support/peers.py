"""Clients that exchange files: their certificates, listeners and fetches."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from fedplat.wire.v1 import peer_pb2, peer_pb2_grpc
from fedplat_client import ClientOptions
from fedplat_client._auth.mtls import PeerCredentials
from fedplat_client._work.peers.fetch import PeerFetcher, PeerFile
from fedplat_client._work.peers.listener import PeerListener
from fedplat_client.cancellation import StopSignal
from fedplat_server.auth import pki_folder as pki
from fedplat_server.auth.pki_folder import Authority, certificate_pem, key_pem
from fedplat_server.auth.tls import utc_now
from support.mtls import DAY


def client_id(number: int) -> str:
    return f"c-{number:016x}"


def credentials_of(number: int, authority: Authority, trusted: Authority | None = None) -> PeerCredentials:
    """The credentials of a client with a listener; it trusts another authority than its own if `trusted` is given."""
    key = pki.new_key()
    name = f"{client_id(number)}/1"
    certificate = authority.for_client(name, key.public_key(), utc_now(), DAY, listener=True)
    return PeerCredentials(
        key_pem(key), certificate_pem(certificate), certificate_pem((trusted or authority).certificate)
    )


class Time:
    """A clock that only waits move; `waited` is called before each wait."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waited: Callable[[], object] = lambda: None

    def clock(self) -> float:
        return self.now_s

    def wait(self, signal: StopSignal, seconds: float) -> bool:
        self.waited()
        self.now_s += seconds
        return signal.is_set()


@dataclasses.dataclass
class Silos:
    """The listener of client 1, which offers a file, and the ways of the others to fetch it."""

    authority: Authority
    listener: PeerListener
    folder: Path
    content: bytes
    time: Time = dataclasses.field(default_factory=Time)
    signal: StopSignal = dataclasses.field(default_factory=StopSignal)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def address(self) -> str:
        return f"localhost:{self.listener.port}"

    @property
    def file(self) -> PeerFile:
        return PeerFile(client_id(1), self.address, self.digest, len(self.content))

    @property
    def fetched(self) -> Path:
        return self.folder / "fetched"

    @property
    def options(self) -> ClientOptions:
        return ClientOptions(clock=self.time.clock, wait=self.time.wait, rng=random.Random(0))

    @contextlib.contextmanager
    def offer(self, *neighbours: int, digest: str = "", content: bytes | None = None) -> Generator[Path]:
        path = self.folder / "offered"
        path.write_bytes(self.content if content is None else content)
        with self.listener.offer(digest or self.digest, path, [client_id(number) for number in neighbours]):
            yield path

    def fetch(self, number: int = 2, timeout_s: float = 60.0, file: PeerFile | None = None, **more: Any) -> Path:
        options: ClientOptions = more.pop("options", self.options)
        trusted: PeerCredentials = more.pop("credentials", None) or credentials_of(number, self.authority)
        max_bytes: int = more.pop("max_bytes", 2**40)
        fetcher = PeerFetcher(self.fetched, options)
        return fetcher.fetch(file or self.file, trusted, timeout_s, self.signal, max_bytes)

    def files(self) -> Collection[str]:
        return sorted(path.name for path in self.fetched.iterdir())

    @contextlib.contextmanager
    def stream(self, number: int = 2, digest: str = "", offset: int = 0) -> Generator[Any]:
        """A raw call of Fetch, of which nothing has been read."""
        with credentials_of(number, self.authority).connect(self.address, client_id(1)) as channel:
            request = peer_pb2.FetchRequest(digest=digest or self.digest, offset=offset)
            call: Any = peer_pb2_grpc.PeerStub(channel).Fetch(request, timeout=60.0)
            yield call
            call.cancel()


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """The status and the code of a stream that is refused before its first message."""
    try:
        next(call)
    except grpc.RpcError as exc:
        codes = [entry.value for entry in exc.trailing_metadata() or () if entry.key == "fedplat-code"]
        return exc.code(), str(codes[0]) if codes else ""
    raise AssertionError("the call was served")


@contextlib.contextmanager
def silos_in(folder: Path, size_bytes: int = 3_000_000, **listener: Any) -> Generator[Silos]:
    """Client 1 with an open listener, and a file of random bytes."""
    authority = Authority.new(utc_now())
    credentials = credentials_of(1, authority)
    content = np.random.default_rng(0).bytes(size_bytes)
    with PeerListener("127.0.0.1:0", lambda: credentials, **listener) as opened:
        opened.open()
        yield Silos(authority, opened, folder, content)
