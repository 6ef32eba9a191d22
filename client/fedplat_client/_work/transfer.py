"""Transfers of models and updates in pieces, resumed after a break, and the ways to the model of an assignment.

A delta is a shorter way to the same bytes, and its failure is not an error: if the result does not have the model's
digest, the full model is downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat import system
from fedplat.codecs.container import Format, options_from_text
from fedplat.config.plugins import BUILTIN, Plugins
from fedplat.errors import CodecError, ModelError, PluginError, UserCodeError
from fedplat.model import ModelFile, Parameters, Read, Segment, Values, apply_step, read_base_values
from fedplat.model.schema import MESSAGE_KEY
from fedplat.wire import digests
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import backoff, cancellation, errors, task
from fedplat_client._auth.authenticator import Connection
from fedplat_client._state.model_cache import ModelCache, PartialDownload
from fedplat_client._work import heartbeat, ranges
from fedplat_client._work.content import Outgoing, StreamedUpdate
from fedplat_client._work.upload_calls import UploadCalls
from fedplat_client.task import Control

Source: TypeAlias = model_pb2.ModelRef | fleet_pb2.ModelDelta
"""A download: it has a digest and a size."""
_BUSY = model_pb2.RetryWindow(min_s=1.0, max_s=10.0)
"""Retry window for a busy server that sends none."""
# What a server before 0.2 says of an upload without a digest, for example one to which its operator has gone back.
_INVALID = "INVALID_ARGUMENT"
# The server has another number of bytes than expected: query the number and resume from there.
_OFFSET_REFUSED = frozenset({"OUT_OF_RANGE", "FAILED_PRECONDITION", "ALREADY_EXISTS"})


def download(
    connection: Connection, model: Source, part: PartialDownload, control: task.Control, max_streams: int = 1
) -> None:
    """Complete a partial download, which contains the beginning of a model or of a delta, or nothing yet.

    A slow one continues over up to `max_streams` connections, if the client may open them. Raises `TransferError`,
    `IdentityError`, or `Cancelled` if the task is stopped.
    """
    patience = _Patience(control, "the download of the model")
    if part.size > model.size_bytes:
        part.restart()
    streams = ranges.StreamCount(max_streams if connection.can_dial else 1, control.options.clock)
    streams.restart(part.size)
    while (num_received := part.size) < model.size_bytes:
        retry = None
        try:
            if streams.number > 1:
                ranges.RangedDownload(connection, model, part, control, streams).run(patience.wait_after_break)
                continue
            _append(connection, model, part, control, streams)
            if streams.number > 1:
                continue
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


def upload(
    connection: Connection, token: str, content: Outgoing, control: task.Control, receiver: str = "", name: str = ""
) -> None:
    """Upload an update; or a file for another client, `receiver`, by its name.

    Raises `TransferError`, `IdentityError`, or `Cancelled` if the task is stopped, or its assignment has ended.
    """
    _Upload(connection, token, content, control, receiver, name).run()


@dataclass(frozen=True)
class _Upload:
    """The calls of an upload, see `upload`. `run` repeats them until the server has all bytes."""

    connection: Connection
    token: str
    content: Outgoing
    control: task.Control
    receiver: str
    name: str

    def run(self) -> None:
        control, size_bytes = self.control, self.content.size_bytes
        calls = UploadCalls(self.connection, control)
        patience = _Patience(control, "the upload of the update")
        offset = 0
        while True:
            retry = None
            try:
                num_received = calls.send(self._header(offset), self.content)
                error = "the server stored only a part"
            except errors.ServerBusyError as exc:
                control.wait(backoff.draw_s(exc.retry or _BUSY, control.options.rng))
                continue
            except errors.ServerUnavailableError as exc:
                num_received, error, retry = None, str(exc), exc.retry
            except errors.CallRefusedError as exc:
                self._raise_unless_resumable(exc, _OFFSET_REFUSED)
                num_received, error = None, str(exc)
            while num_received is None:
                num_received, error = self._query(error)
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

    def _header(self, offset: int) -> fleet_pb2.UploadHeader:
        """Return the header of a call that sends the bytes from an offset on."""
        digest, upload_id = self._names()
        return fleet_pb2.UploadHeader(
            token=self.token,
            digest=digest,
            size_bytes=self.content.size_bytes,
            offset=offset,
            receiver=self.receiver,
            name=self.name,
            upload_id=upload_id,
        )

    def _query(self, error: str) -> tuple[int | None, str]:
        """Return the number of bytes that the server has, or None if it is not known; and the last error."""
        digest, upload_id = self._names()
        query = fleet_pb2.QueryUploadRequest(
            token=self.token, digest=digest, receiver=self.receiver, name=self.name, upload_id=upload_id
        )
        try:
            return self.connection.query_upload(query, self.control.signal).received_bytes, error
        except errors.ServerUnavailableError as exc:
            return None, str(exc)
        except errors.CallRefusedError as exc:
            self._raise_unless_resumable(exc)
            return None, str(exc)

    def _names(self) -> tuple[str, str]:
        """Return the digest and the id by which the server knows the upload; one of them is empty."""
        content = self.content
        return ("", content.upload_id) if content.upload_id else (content.digest, "")

    def _raise_unless_resumable(self, exc: errors.CallRefusedError, resumable: Collection[str] = ()) -> None:
        """Raise the error of a refused upload, unless it may continue: after a query, or under its digest."""
        _stop_if_ended(exc, self.receiver, self.control)
        content = self.content
        # The size is refused under any name; and once it was, the assignment has ended, whose text is another one.
        is_old_server = exc.code == _INVALID and not isinstance(exc, errors.TooLargeError)
        if isinstance(content, StreamedUpdate) and content.upload_id and is_old_server:
            content.forget_id()
        elif exc.code not in resumable:
            raise errors.TransferError(f"the server refuses the update: {exc}") from exc


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


def _append(
    connection: Connection, model: Source, part: PartialDownload, control: task.Control, streams: ranges.StreamCount
) -> None:
    """Append what one stream sends, to its end or until several streams are tried."""
    request = fleet_pb2.DownloadRequest(digest=model.digest, offset=part.size)
    received = connection.download(request, control.call_timeout_s, control.signal)
    with contextlib.closing(received):
        for data in received:
            if part.size + len(data) > model.size_bytes:
                raise errors.TransferError(f"the server sends more than the {model.size_bytes} bytes that it announced")
            part.write(data)
            streams.note(part.size, model.size_bytes - part.size)
            if streams.number > 1:
                return


def _stop_if_ended(exc: errors.CallRefusedError, receiver: str, control: task.Control) -> None:
    """Raise `Cancelled` if the task's assignment has ended, for example since enough others have reported."""
    if isinstance(exc, errors.AssignmentEndedError) and not receiver:
        control.signal.set(cancellation.read_end(exc.text))
        control.signal.check()


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
        size_bytes = max(model.size_bytes, len(assignment.model_bytes))
        if size_bytes > self.max_model_bytes:
            raise errors.TransferError(
                f"the server's model has {size_bytes} bytes; this client accepts at most {self.max_model_bytes}. Raise "
                "max_model_bytes to train larger models"
            )
        if assignment.model_bytes:
            base = decode_model(model, assignment.model_bytes)
            return DownloadedModel(base, base.copy())
        path = self.cache.find(model.digest)
        if path is None and assignment.HasField("delta"):
            path = self._download_delta(assignment, control)
        if path is None:
            return self._download_full(assignment, control)
        return self._open(path, assignment)

    def load(self, assignment: fleet_pb2.Assignment, control: Control) -> DownloadedModel:
        """Return the model of an assignment. Raises `AssignmentFailedError` if it cannot be loaded."""
        try:
            return self.get(assignment, control)
        except (errors.TransferError, ModelError, OSError) as exc:
            control.signal.check()
            raise heartbeat.AssignmentFailedError(
                model_pb2.REASON_TRANSFER_FAILED, f"the model could not be loaded: {exc}"
            ) from exc

    def _open(self, path: Path, assignment: fleet_pb2.Assignment) -> DownloadedModel:
        downloaded = DownloadedModel.open(path)
        self.cache.note_use(assignment.job_id, assignment.model.digest, *downloaded)
        return downloaded

    def _download_full(self, assignment: fleet_pb2.Assignment, control: Control) -> DownloadedModel:
        """Download the model; one that exceeds the cache limit, or is used once, is not kept."""
        model = assignment.model
        self.cache.recycle(assignment.job_id, model.digest, model.size_bytes)
        is_kept = self.cache.make_room(model.size_bytes, model.digest)
        checked = model.blake3 if digests.is_digest(model.blake3) and digests.has_blake3() else ""
        with self.cache.part(model.digest, checked) as part:
            download(self.connection, model, part, control, assignment.max_downloads)
            path = self.cache.admit(part, model.digest, checked)
        downloaded = self._open(path, assignment)
        if not is_kept or MESSAGE_KEY in downloaded.base:  # a message of a Flower app is for one task only
            system.delete(path)  # the open file stays readable
        return downloaded

    def _download_delta(self, assignment: fleet_pb2.Assignment, control: Control) -> Path | None:
        """Return the model's file, made from a delta; log why and return None if the delta cannot be used."""
        model, delta = assignment.model, assignment.delta
        fields = {"version": model.version}
        try:
            base = self.cache.find(delta.base_digest)
            if base is None:
                _logger.info("The delta's base is not in the cache; downloading the full model.", extra=fields)
                return None
            path = self._rebuild(assignment, base, control)
        except (errors.TransferError, ModelError, CodecError, PluginError, UserCodeError, OSError) as exc:
            control.signal.check()
            _logger.warning("The delta cannot be used; downloading the full model: %s", exc, extra=fields)
            return None
        _logger.info("Built the model from a delta.", extra={**fields, "size_bytes": delta.size_bytes})
        return path

    def _rebuild(self, assignment: fleet_pb2.Assignment, base_path: Path, control: Control) -> Path:
        model, delta = assignment.model, assignment.delta
        base = ModelFile.open(base_path)
        size_bytes = base.schema.file_size_bytes
        if model.size_bytes != size_bytes or delta.size_bytes >= size_bytes:
            raise errors.TransferError(
                f"a delta of {delta.size_bytes} bytes for a base of {size_bytes} and a model of {model.size_bytes} "
                "bytes; expected a base and a model of equal size, and a smaller delta"
            )
        format = Format(options_from_text(delta.codec, self.plugins), base.schema)
        self.cache.recycle(assignment.job_id, model.digest, size_bytes, delta.base_digest)
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
            if part.size:  # of a full download
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
