"""Transfers of models and updates in pieces: resumed after a break, given up after repeated breaks without progress."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from fedplat import wire
from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import backoff, cancellation, task
from fedplat_client._auth.calls import Connection
from fedplat_client._state.model_cache import PartialDownload
from fedplat_client.errors import (
    AssignmentEndedError,
    CallRefusedError,
    ServerBusyError,
    ServerUnavailableError,
    TransferError,
)

Source: TypeAlias = model_pb2.ModelRef | fleet_pb2.ModelDelta
"""A download: it has a digest and a size."""
_FAST_PIECE_S = 0.5
"""If a piece was sent within this time, the next one is larger."""
_BUSY = model_pb2.RetryWindow(min_s=1.0, max_s=10.0)
"""Retry window for a busy server that sends none."""
# The server has another number of bytes than expected: query the number and resume from there.
_OFFSET_REFUSED = frozenset({"OUT_OF_RANGE", "FAILED_PRECONDITION", "ALREADY_EXISTS"})


def download(connection: Connection, model: Source, part: PartialDownload, control: task.Control) -> None:
    """Complete a partial download, which contains the beginning of a model or of a delta, or nothing yet.

    Raises `TransferError`, `IdentityError`, or `Cancelled` if the task is stopped.
    """
    patience = _Patience(control, "the download of the model")
    if part.size > model.size_bytes:
        part.restart()
    while (num_received := part.size) < model.size_bytes:
        retry = None
        try:
            _append(connection, model, part, control)
            error = "the stream ended early"
        except ServerUnavailableError as exc:
            error, retry = str(exc), exc.retry
        except CallRefusedError as exc:
            raise TransferError(f"the server refuses to send the model {model.digest}: {exc}") from exc
        if part.size < model.size_bytes:
            patience.wait_after_break(error, retry, progress=part.size > num_received)


def decode_model(model: model_pb2.ModelRef, content: bytes) -> Parameters:
    """Decode a model sent with its assignment. Raises `TransferError` for another digest, and `ModelError`."""
    if (digest := hashlib.sha256(content).hexdigest()) != model.digest:
        raise TransferError(f"the model sent with the assignment has the digest {digest}; expected {model.digest}")
    return Parameters.from_bytes(content)


@dataclass(frozen=True)
class Content:
    """The bytes of an upload, as pieces of memory that must not change during it."""

    pieces: tuple[memoryview, ...]

    @classmethod
    def merge_parts(cls, parts: Iterable[bytes]) -> Content:
        """Copy many small parts into one piece."""
        whole = bytearray()
        for part in parts:
            whole += part
        return cls((memoryview(whole),))

    @property
    def size_bytes(self) -> int:
        """Total size of the pieces."""
        return sum(map(len, self.pieces))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the concatenated pieces, hexadecimal."""
        sha256 = hashlib.sha256()
        for piece in self.pieces:
            sha256.update(piece)
        return sha256.hexdigest()

    def to_bytes(self) -> bytes:
        """Concatenate the pieces."""
        return b"".join(self.pieces)


def upload(
    connection: Connection, token: str, content: Content, control: task.Control, receiver: str = "", name: str = ""
) -> None:
    """Upload an update; or a file for another client, `receiver`, by its name.

    Raises `TransferError`, `IdentityError`, or `Cancelled` if the task is stopped, or its assignment has ended.
    """
    digest, size_bytes = content.digest, content.size_bytes
    patience = _Patience(control, "the upload of the update")
    offset = 0
    while True:
        header = fleet_pb2.UploadHeader(
            token=token, digest=digest, size_bytes=size_bytes, offset=offset, receiver=receiver, name=name
        )
        retry = None
        try:
            parts = split_content(content, offset, control.options.clock)
            num_received = connection.upload(header, parts, _limit_timeout(control.remaining_s), control.signal)
            error = "the server stored only a part"
        except ServerBusyError as exc:
            control.wait(backoff.draw_s(exc.retry or _BUSY, control.options.rng))
            continue
        except ServerUnavailableError as exc:
            num_received, error, retry = None, str(exc), exc.retry
        except CallRefusedError as exc:
            _stop_if_ended(exc, receiver, control)
            if exc.code not in _OFFSET_REFUSED:
                raise TransferError(f"the server refuses the update: {exc}") from exc
            num_received, error = None, str(exc)
        while num_received is None:
            query = fleet_pb2.QueryUploadRequest(token=token, digest=digest, receiver=receiver, name=name)
            num_received, error = _query(connection, query, control, error)
            if num_received is None:
                patience.wait_after_break(error, retry, progress=False)
        if num_received == size_bytes:
            return
        if num_received > size_bytes:
            raise TransferError(f"the server has {num_received} bytes of the update; expected {size_bytes} at most")
        patience.wait_after_break(error, retry, progress=num_received > offset)
        offset = num_received


class _Patience:
    """Waits after each break, longer each time; raises after too many in a row without a new byte."""

    def __init__(self, control: task.Control, name: str) -> None:
        self._control = control
        self._name = name
        self._backoff = backoff.Backoff(control.options)
        self._idle = 0

    def wait_after_break(self, why: str, retry: model_pb2.RetryWindow | None, *, progress: bool) -> None:
        if progress:
            self._idle = 0
            self._backoff.reset()
        else:
            self._idle += 1
            backoff.note_failures(self._idle, why)
        if self._idle >= self._control.options.transfer_attempts:
            raise TransferError(f"{self._name} broke {self._idle} times in a row without progress; last: {why}")
        self._control.wait(self._backoff.next_s(retry))


def _append(connection: Connection, model: Source, part: PartialDownload, control: task.Control) -> None:
    request = fleet_pb2.DownloadRequest(digest=model.digest, offset=part.size)
    received = connection.download(request, _limit_timeout(control.remaining_s), control.signal)
    with contextlib.closing(received):
        for data in received:
            if part.size + len(data) > model.size_bytes:
                raise TransferError(f"the server sends more than the {model.size_bytes} bytes that it announced")
            part.write(data)


def _query(
    connection: Connection, query: fleet_pb2.QueryUploadRequest, control: task.Control, error: str
) -> tuple[int | None, str]:
    try:
        return connection.query_upload(query, control.signal), error
    except ServerUnavailableError as exc:
        return None, str(exc)
    except CallRefusedError as exc:
        _stop_if_ended(exc, query.receiver, control)
        raise TransferError(f"the server refuses the update: {exc}") from exc


def _stop_if_ended(exc: CallRefusedError, receiver: str, control: task.Control) -> None:
    """Raise `Cancelled` if the task's assignment has ended, for example since enough others have reported."""
    if isinstance(exc, AssignmentEndedError) and not receiver:
        control.signal.set(cancellation.read_end(exc.text))
        control.signal.check()


def split_content(content: Content, start: int, clock: Callable[[], float]) -> Iterator[memoryview]:
    """Yield the content from `start` on in parts: small ones on a slow line, larger and cheaper ones on a fast one."""
    size = wire.UPLOAD_CHUNK_BYTES
    for piece in content.pieces:
        while start < len(piece):
            began = clock()
            yield piece[start : start + size]
            start = min(start + size, len(piece))
            fast = clock() - began < _FAST_PIECE_S
            size = min(2 * size, wire.CHUNK_BYTES) if fast else wire.UPLOAD_CHUNK_BYTES
        start -= len(piece)


def _limit_timeout(timeout_s: float) -> float:
    """Limit a timeout to what gRPC accepts; after the deadline, the call fails with DEADLINE_EXCEEDED."""
    return min(max(timeout_s, 0.001), 7 * 86_400.0)
