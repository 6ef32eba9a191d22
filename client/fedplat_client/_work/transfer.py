"""Transfers of models and updates in pieces, resumed after a break, and the ways to the model of an assignment.

A delta is a shorter way to the same bytes, and its failure is not an error: if the result does not have the model's
digest, the full model is downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat import wire
from fedplat.codecs.container import Format, options_from_text
from fedplat.config.plugins import BUILTIN, Plugins
from fedplat.errors import CodecError, ModelError, PluginError, UserCodeError
from fedplat.model import ModelFile, Parameters, Read, Segment, Values, apply_step, read_base_values
from fedplat.model.schema import MESSAGE_KEY
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import backoff, cancellation, errors, task
from fedplat_client._auth.authenticator import Connection
from fedplat_client._state.model_cache import ModelCache, PartialDownload
from fedplat_client._work import heartbeat
from fedplat_client.task import Control

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
        except errors.ServerUnavailableError as exc:
            error, retry = str(exc), exc.retry
        except errors.CallRefusedError as exc:
            raise errors.TransferError(f"the server refuses to send the model {model.digest}: {exc}") from exc
        if part.size < model.size_bytes:
            patience.wait_after_break(error, retry, progress=part.size > num_received)


def decode_model(model: model_pb2.ModelRef, content: bytes) -> Parameters:
    """Decode a model sent with its assignment. Raises `TransferError` for another digest, and `ModelError`."""
    if (digest := hashlib.sha256(content).hexdigest()) != model.digest:
        raise errors.TransferError(
            f"the model sent with the assignment has the digest {digest}; expected {model.digest}"
        )
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
        except errors.ServerBusyError as exc:
            control.wait(backoff.draw_s(exc.retry or _BUSY, control.options.rng))
            continue
        except errors.ServerUnavailableError as exc:
            num_received, error, retry = None, str(exc), exc.retry
        except errors.CallRefusedError as exc:
            _stop_if_ended(exc, receiver, control)
            if exc.code not in _OFFSET_REFUSED:
                raise errors.TransferError(f"the server refuses the update: {exc}") from exc
            num_received, error = None, str(exc)
        while num_received is None:
            query = fleet_pb2.QueryUploadRequest(token=token, digest=digest, receiver=receiver, name=name)
            num_received, error = _query(connection, query, control, error)
            if num_received is None:
                patience.wait_after_break(error, retry, progress=False)
        if num_received == size_bytes:
            return
        if num_received > size_bytes:
            raise errors.TransferError(
                f"the server has {num_received} bytes of the update; expected {size_bytes} at most"
            )
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
            raise errors.TransferError(f"{self._name} broke {self._idle} times in a row without progress; last: {why}")
        self._control.wait(self._backoff.next_s(retry))


def _append(connection: Connection, model: Source, part: PartialDownload, control: task.Control) -> None:
    request = fleet_pb2.DownloadRequest(digest=model.digest, offset=part.size)
    received = connection.download(request, _limit_timeout(control.remaining_s), control.signal)
    with contextlib.closing(received):
        for data in received:
            if part.size + len(data) > model.size_bytes:
                raise errors.TransferError(f"the server sends more than the {model.size_bytes} bytes that it announced")
            part.write(data)


def _query(
    connection: Connection, query: fleet_pb2.QueryUploadRequest, control: task.Control, error: str
) -> tuple[int | None, str]:
    try:
        return connection.query_upload(query, control.signal), error
    except errors.ServerUnavailableError as exc:
        return None, str(exc)
    except errors.CallRefusedError as exc:
        _stop_if_ended(exc, query.receiver, control)
        raise errors.TransferError(f"the server refuses the update: {exc}") from exc


def _stop_if_ended(exc: errors.CallRefusedError, receiver: str, control: task.Control) -> None:
    """Raise `Cancelled` if the task's assignment has ended, for example since enough others have reported."""
    if isinstance(exc, errors.AssignmentEndedError) and not receiver:
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


_logger = logging.getLogger(__name__)


class DownloadedModel(NamedTuple):
    """A model, and a copy of it that a trainer may change."""

    base: Parameters
    working: Parameters

    @classmethod
    def open(cls, path: Path) -> DownloadedModel:
        """Map a file twice, so that only what the trainer changes is copied. Raises `ModelError` or `OSError`."""
        return cls(Parameters.open(path), Parameters.open(path, writable=True))


@dataclass(frozen=True)
class Downloader:
    """Gets models by their digest."""

    connection: Connection
    cache: ModelCache
    max_model_bytes: int
    plugins: Plugins = BUILTIN

    def get(self, assignment: fleet_pb2.Assignment, control: Control) -> DownloadedModel:
        """Return the model of an assignment.

        Raises `TransferError`, `ModelError`, `OSError`, `IdentityError`, or `Cancelled` if the task is stopped.
        """
        model = assignment.model
        if assignment.model_bytes:
            base = decode_model(model, assignment.model_bytes)
            return DownloadedModel(base, base.copy())
        path = self.cache.find(model.digest)
        if path is None and assignment.HasField("delta"):
            path = self._download_delta(model, assignment.delta, control)
        return DownloadedModel.open(path) if path is not None else self._download_full(model, control)

    def load(self, assignment: fleet_pb2.Assignment, control: Control) -> DownloadedModel:
        """Return the model of an assignment. Raises `AssignmentFailedError` if it cannot be loaded."""
        try:
            return self.get(assignment, control)
        except (errors.TransferError, ModelError, OSError) as exc:
            control.signal.check()
            raise heartbeat.AssignmentFailedError(
                model_pb2.REASON_TRANSFER_FAILED, f"the model could not be loaded: {exc}"
            ) from exc

    def _download_full(self, model: model_pb2.ModelRef, control: Control) -> DownloadedModel:
        """Download the model; one that exceeds the cache limit, or is used once, is not kept."""
        if model.size_bytes > self.max_model_bytes:
            raise errors.TransferError(
                f"the server's model has {model.size_bytes} bytes; this client accepts at most "
                f"{self.max_model_bytes}. Raise max_model_bytes to train larger models"
            )
        is_kept = self.cache.make_room(model.size_bytes, model.digest)
        with self.cache.part(model.digest) as part:
            download(self.connection, model, part, control)
            path = self.cache.admit(part, model.digest)
        downloaded = DownloadedModel.open(path)
        if not is_kept or MESSAGE_KEY in downloaded.base:  # a message of a Flower app is for one task only
            path.unlink()  # the open file stays readable
        return downloaded

    def _download_delta(self, model: model_pb2.ModelRef, delta: fleet_pb2.ModelDelta, control: Control) -> Path | None:
        """Return the model's file, made from a delta; log why and return None if the delta cannot be used."""
        fields = {"version": model.version}
        try:
            base = self.cache.find(delta.base_digest)
            if base is None:
                _logger.info("The delta's base is not in the cache; downloading the full model.", extra=fields)
                return None
            path = self._rebuild(model, delta, base, control)
        except (errors.TransferError, ModelError, CodecError, PluginError, UserCodeError, OSError) as exc:
            control.signal.check()
            _logger.warning("The delta cannot be used; downloading the full model: %s", exc, extra=fields)
            return None
        _logger.info("Built the model from a delta.", extra={**fields, "size_bytes": delta.size_bytes})
        return path

    def _rebuild(
        self, model: model_pb2.ModelRef, delta: fleet_pb2.ModelDelta, base_path: Path, control: Control
    ) -> Path:
        base = ModelFile.open(base_path)
        size_bytes = base.schema.file_size_bytes
        if model.size_bytes != size_bytes or delta.size_bytes >= size_bytes:
            raise errors.TransferError(
                f"a delta of {delta.size_bytes} bytes for a base of {size_bytes} and a model of {model.size_bytes} "
                "bytes; expected a base and a model of equal size, and a smaller delta"
            )
        format = Format(options_from_text(delta.codec, self.plugins), base.schema)
        if not self.cache.make_room(2 * size_bytes + delta.size_bytes, model.digest, delta.digest, delta.base_digest):
            raise errors.TransferError("cache_limit_bytes is too small for the model, its base and the delta together")
        with self.cache.part(delta.digest) as part:
            download(self.connection, delta, part, control)
            self.cache.check(part, delta.digest)
            try:
                return self._apply_step(base, format.open(part.path), model, control)
            finally:
                part.path.unlink()

    def _apply_step(self, base: ModelFile, step: Values, model: model_pb2.ModelRef, control: Control) -> Path:
        """Add the step to the base; write and hash the result window by window."""

        def read(read: Read, run: Segment) -> Iterator[npt.NDArray[Any]]:
            return step.read_carried(run) if base.schema.carry == "max" else read_base_values(read, run)

        with self.cache.part(model.digest) as part:
            part.restart()
            try:
                part.write(base.schema.header)
                for placed in apply_step(base, iter(step.to_blocks()), read):
                    control.signal.check()
                    part.write(placed.values.view(np.uint8).data)
            except BaseException:
                part.restart()  # otherwise the full download would resume from these bytes
                raise
            return self.cache.admit(part, model.digest)
