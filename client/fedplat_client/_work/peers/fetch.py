"""Fetch a file from the listener of a peer, resumed after breaks, or encrypted from the server's relay."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import grpc

from fedplat import system
from fedplat.secure_aggregation import primitives, relay
from fedplat.wire import messages
from fedplat.wire.v1 import model_pb2, peer_pb2
from fedplat_client import transport
from fedplat_client._auth.mtls import PeerCredentials
from fedplat_client._state.model_cache import ModelCache, PartialDownload
from fedplat_client.backoff import Backoff
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import CallError, CallRefusedError, PeerError, ServerUnavailableError, TransferError
from fedplat_client.options import ClientOptions
from fedplat_client.transport import Method

_FETCH = Method("Fetch", model_pb2.Chunk, transport.PEER_SERVICE)
_NOT_YET = frozenset({grpc.StatusCode.PERMISSION_DENIED.name, grpc.StatusCode.NOT_FOUND.name})
"""A peer refuses so before the coordinator has named its neighbours to it."""
_MAX_CALL_S = 3600.0


@dataclass(frozen=True)
class PeerFile:
    """A file that a peer offers at its address (`host:port`); `digest` is its SHA-256, hexadecimal."""

    client_id: str
    address: str
    digest: str
    size_bytes: int


@dataclass(eq=False)
class _Turn:
    """The lock of a digest that is being fetched, and the number of fetches that have it or wait for it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    num_fetches: int = 0


class PeerFetcher:
    """Fetches files of peers into a folder of its own; thread-safe. Two fetches of the same digest take turns.

    Files stay until `SiloFolder.tidy`: also those of an exchange that a restart interrupted.
    """

    def __init__(self, folder: Path, options: ClientOptions) -> None:
        self._cache = ModelCache(folder, options.cache_limit_bytes, evicts=False)
        self._options = options
        self._lock = threading.Lock()
        self._turns: dict[str, _Turn] = {}

    def fetch(
        self, file: PeerFile, credentials: PeerCredentials, timeout_s: float, signal: StopSignal, max_bytes: int
    ) -> Path:
        """Return the path of the verified file.

        A file of more than `max_bytes`, or with other bytes than announced, is deleted. After a timeout its beginning
        is kept, for the next fetch. Raises `PeerError`, or `Cancelled` if the signal is set.
        """
        limit = min(max_bytes, self._options.max_model_bytes)
        if file.size_bytes > limit:
            raise PeerError(
                "TOO_LARGE", f"the peer {file.client_id} announces {file.size_bytes} bytes; expected at most {limit}"
            )
        ends_at = self._options.clock() + timeout_s
        with self._turn(file, timeout_s):
            if (path := self._cache.find(file.digest)) is not None:
                return path
            with self._cache.part(file.digest) as part, _deleted_on_mismatch(part):
                if part.size > file.size_bytes:
                    part.restart()
                with credentials.connect(file.address, file.client_id) as channel:
                    _complete(channel, file, part, ends_at, signal, self._options)
                if part.digest != file.digest:
                    raise PeerError(
                        "WRONG_DIGEST",
                        f"the file of the peer {file.client_id} has the digest {part.digest}; expected {file.digest}",
                    )
                return self._cache.admit(part, file.digest)

    @contextlib.contextmanager
    def _turn(self, file: PeerFile, timeout_s: float) -> Generator[None]:
        with self._lock:
            turn = self._turns.setdefault(file.digest, _Turn())
            turn.num_fetches += 1
        try:
            if not turn.lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
                raise PeerError("TIMEOUT", f"the file {file.digest} was still being fetched from another peer")
            try:
                yield
            finally:
                turn.lock.release()
        finally:
            with self._lock:
                turn.num_fetches -= 1
                if not turn.num_fetches:
                    del self._turns[file.digest]


class _Part(Protocol):
    """What has been received so far."""

    @property
    def size(self) -> int:
        """The number of bytes."""
        ...

    def write(self, data: messages.Bytes) -> object:
        """Append bytes."""
        ...


class _Chunk:
    """A part in memory."""

    def __init__(self) -> None:
        self.content = bytearray()

    @property
    def size(self) -> int:
        return len(self.content)

    def write(self, data: messages.Bytes) -> object:
        self.content += data
        return None


def fetch_chunk(
    channel: grpc.Channel, file: PeerFile, timeout_s: float, signal: StopSignal, options: ClientOptions
) -> bytes:
    """Return a chunk that a peer offers by the name `file.digest`, of exactly this size. Raises `PeerError`."""
    chunk = _Chunk()
    _complete(channel, file, chunk, options.clock() + timeout_s, signal, options)
    return bytes(chunk.content)


def _complete(
    channel: grpc.Channel, file: PeerFile, part: _Part, ends_at: float, signal: StopSignal, options: ClientOptions
) -> None:
    backoff, clock = Backoff(options), options.clock
    error: CallError | None = None
    while (num_received := part.size) < file.size_bytes:
        try:
            _append(channel, file, part, ends_at - clock(), signal)
            if part.size < file.size_bytes:
                raise PeerError(
                    "WRONG_SIZE",
                    f"the file of the peer {file.client_id} has {part.size} bytes; it announced {file.size_bytes}",
                )
        except ServerUnavailableError as exc:
            if error is None or exc.code != grpc.StatusCode.DEADLINE_EXCEEDED.name:
                error = exc  # the call that the deadline ends says nothing about the cause
            if part.size > num_received:
                backoff.reset()
            options.wait(signal, min(backoff.next_s(exc.retry), max(ends_at - clock(), 0.0)))
            signal.check()
            if clock() >= ends_at:
                raise PeerError(
                    "TIMEOUT",
                    f"the peer {file.client_id} at {file.address} sent {part.size} of {file.size_bytes} bytes "
                    f"within the deadline; last error: {error}",
                ) from exc


def _append(channel: grpc.Channel, file: PeerFile, part: _Part, timeout_s: float, signal: StopSignal) -> None:
    """Append what one call returns. Raises `ServerUnavailableError` if another call may work later, or `PeerError`."""
    request = peer_pb2.FetchRequest(digest=file.digest, offset=part.size).SerializeToString()
    call = _FETCH.start_receiving(channel, request, min(max(timeout_s, 0.001), _MAX_CALL_S), ())
    try:
        with signal.attach(call.cancel):
            for data in call:
                _write(part, data, file)
    except grpc.RpcError as exc:
        signal.check()
        raise _translate(transport.translate_error(exc), file) from exc
    finally:
        call.cancel()


def _write(part: _Part, data: messages.Bytes, file: PeerFile) -> None:
    if part.size + len(data) > file.size_bytes:
        raise PeerError(
            "WRONG_SIZE", f"the peer {file.client_id} sends more than the {file.size_bytes} announced bytes"
        )
    part.write(data)


def _translate(exc: CallError, file: PeerFile) -> CallError | PeerError:
    if isinstance(exc, ServerUnavailableError):
        return exc
    if isinstance(exc, CallRefusedError) and exc.code in _NOT_YET:
        return ServerUnavailableError(exc.code, str(exc))
    return PeerError("REFUSED", f"the peer {file.client_id} refuses to send the file {file.digest}: {exc}")


@contextlib.contextmanager
def _deleted_on_mismatch(part: PartialDownload) -> Generator[None]:
    """Delete the file if the block fails, unless it only ran out of time."""
    try:
        yield
    except TransferError as exc:
        if getattr(exc, "reason", "") != "TIMEOUT":
            part.path.unlink(missing_ok=True)
        raise


def seal_file(link: relay.RelayLink, own: primitives.KeyPair, source: Path, target: Path) -> None:
    """Encrypt a file for its receiver. Raises `SecureAggregationError` or `OSError`, and then leaves no target."""
    _convert(lambda plain, sealed: link.seal(own, plain, sealed), source, target)


def open_file(link: relay.RelayLink, own: primitives.KeyPair, source: Path, target: Path) -> None:
    """Decrypt a file of its sender. Raises `SecureAggregationError` or `OSError`, and then leaves no target."""
    _convert(lambda sealed, plain: link.open(own, sealed, plain), source, target)


def _convert(convert: Callable[[BinaryIO, BinaryIO], None], source: Path, target: Path) -> None:
    part = target.with_name(f"{target.name}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | system.O_BINARY, 0o600)
        with os.fdopen(descriptor, "wb") as writing, source.open("rb") as reading:
            convert(reading, writing)
        part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
