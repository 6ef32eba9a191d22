"""Transfer of files over gRPC streams, one chunk at a time, within budgets of memory.

The clients of a round report at about the same time. The memory for that must not grow with the cohort.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from fedplat import durable, model, wire
from fedplat.errors import ModelError
from fedplat.wire import messages
from fedplat.wire.v1 import fleet_pb2
from fedplat_server import config, crash_points, errors
from fedplat_server.aggregation.backend import run_to_the_end
from fedplat_server.auth import rate_limits
from fedplat_server.errors import BlobMissingError, Code, RefusedError, UploadError
from fedplat_server.messages import validation
from fedplat_server.messages.ordered_writer import OrderedWriter
from fedplat_server.storage import files
from fedplat_server.storage.blob_folder import INCOMING, TEMPORARY
from fedplat_server.storage.blobs import Blob, BlobStore
from fedplat_server.storage.read_cache import Chunks
from fedplat_server.storage.spool_file import OpenUpload

RANGE_CHUNK_BYTES = wire.CHUNK_BYTES // 8
"""The first chunk of a range of a download."""


class Carrier(Protocol):
    """A message with a field of bytes."""

    @property
    def data(self) -> durable.Bytes:
        """The bytes of the message."""
        ...


Message = TypeVar("Message", bound=Carrier)


class UploadMessage(NamedTuple):
    """A message of an upload: its header or bytes. The bytes are a view of the received message, not a copy.

    `position`: where they begin in the file; None: behind all that were received.
    """

    data: durable.Bytes
    header: fleet_pb2.UploadHeader | None = None
    position: int | None = None

    @classmethod
    def of(cls, message: bytes) -> UploadMessage:
        """Decode a message. Raises `DecodeError` if it is invalid."""
        data = messages.unframe_field(messages.UPLOAD, message)
        if data is not None:
            return cls(data)
        if (part := messages.unframe_part(message)) is not None:
            return cls(part[1], position=part[0])
        request = fleet_pb2.UploadRequest.FromString(message)
        header = request.header if request.HasField("header") else None
        return cls(request.data, header, request.position if request.HasField("position") else None)


async def enforce_min_rate(messages: AsyncIterator[Message], limits: config.Limits) -> AsyncGenerator[Message]:
    """Yield the messages of a caller. Raises `RefusedError` if they arrive below the minimum rate."""
    clock = asyncio.get_running_loop().time
    progress = rate_limits.MinimumRate(limits.idle_s, limits.min_bytes_per_s * limits.idle_s, clock())
    while True:
        try:
            async with asyncio.timeout(progress.left_s(clock())):  # `wait_for` would create a task for each message
                message = await anext(messages, None)
        except TimeoutError as exc:
            text = f"fewer than {limits.min_bytes_per_s:g} bytes a second in {limits.idle_s:g} s"
            raise RefusedError(Code.TOO_SLOW, text) from exc
        if message is None:
            return
        progress.on_received(len(message.data), clock())
        yield message


async def send(chunks: Chunks, blobs: BlobStore, digest: str, offset: int, length: int = 0) -> AsyncGenerator[bytes]:
    """Yield a model file from an offset on, as messages `Chunk`: `length` bytes, or all if that is 0.

    A client gets several ranges at a time, so their messages are smaller: together they need as much memory as those
    of one download. Raises `RefusedError` if the offset is beyond the file.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            (path,) = await stack.enter_async_context(blobs.local(digest))
            size_bytes = (await asyncio.to_thread(path.stat)).st_size
        except (FileNotFoundError, BlobMissingError) as exc:
            raise RefusedError(Code.NO_SUCH_MODEL) from exc
        if offset > size_bytes:
            raise RefusedError(Code.WRONG_OFFSET, f"the offset is {offset}, but the file has {size_bytes} bytes")
        end, chunk_bytes = (min(size_bytes, offset + length), RANGE_CHUNK_BYTES) if length else (size_bytes, None)
        found = chunks.messages(path, offset, end, chunk_bytes)
        messages = await stack.enter_async_context(contextlib.aclosing(found))
        async for message in messages:
            yield message


async def open_writer(
    open_upload: Callable[[str, int, int], OpenUpload],
    header: fleet_pb2.UploadHeader,
    is_busy: Callable[[], bool],
    wait_s: float,
) -> OrderedWriter:
    """Open an upload; `receive` closes it. A part waits at most `wait_s` for those before it.

    `open_upload` blocks; it gets the name (`validation.upload_name`), the size and the offset. Raises `RefusedError` if
    the offset is wrong, or if the file is not wanted any more (`is_busy`).
    """
    name = validation.upload_name(header)
    with _translate_upload_errors(is_busy):
        return OrderedWriter(await asyncio.to_thread(open_upload, name, header.size_bytes, header.offset), wait_s)


async def receive(
    writer: OrderedWriter, size_bytes: int, parts: AsyncIterator[UploadMessage], is_busy: Callable[[], bool]
) -> int:
    """Write the parts of a call of an upload of this size; return the number of bytes stored so far.

    Raises `RefusedError` if a part is at a wrong position, or once the file is not wanted any more (`is_busy`).
    """
    with _translate_upload_errors(is_busy):
        async with writer.call():
            await _write(writer, parts, is_busy)
            if writer.received == size_bytes:
                await writer.finish()  # drops bytes that do not match the digest: restart at 0
            return writer.received


@contextlib.contextmanager
def _translate_upload_errors(is_busy: Callable[[], bool]) -> Generator[None]:
    try:
        yield
    except UploadError as exc:
        raise RefusedError(Code.WRONG_OFFSET if is_busy() else Code.STALE_ASSIGNMENT, str(exc)) from exc


async def _write(writer: OrderedWriter, parts: AsyncIterator[UploadMessage], is_busy: Callable[[], bool]) -> None:
    """Hash and store each part in a thread while the next one is being received; at most two are in memory."""
    writing: asyncio.Future[None] | None = None
    try:
        async for part in parts:
            if not is_busy():
                raise RefusedError(Code.STALE_ASSIGNMENT)
            if writing is not None:
                await writing
            writing = writer.write(part.data, part.position)
    except BaseException:
        writer.end()
        if writing is not None:
            with contextlib.suppress(Exception):  # the first error counts
                await writing
        raise
    if writing is not None:
        await writing


async def store_model(blobs: BlobStore, parts: AsyncIterator[durable.Bytes], limit_bytes: int) -> Blob:
    """Write a model that arrives in parts to the blob store, in canonical form.

    Raises `RefusedError` if it is too large or invalid.
    """
    with (
        files.translate_os_errors("receiving a model"),
        tempfile.NamedTemporaryFile(dir=blobs.folder, prefix=INCOMING, suffix=TEMPORARY) as file,
    ):
        size = 0
        async for data in parts:
            size += len(data)
            if size > limit_bytes:
                raise RefusedError(Code.TOO_LARGE, f"a model may have at most {limit_bytes} bytes")
            with crash_points.step("model.receive"):
                # To its end, even if the caller leaves: otherwise the file would be closed meanwhile, and the thread
                # would write to whatever file has its descriptor next, such as the database.
                await run_to_the_end(durable.write_all, file.fileno(), data)
        try:
            return await asyncio.to_thread(_put_canonical, blobs, Path(file.name))
        except ModelError as exc:
            raise RefusedError(Code.INVALID_MODEL, str(exc).replace(str(Path(file.name)), "the file")) from exc


def _put_canonical(blobs: BlobStore, path: Path) -> Blob:
    parameters = model.Parameters.open(path)
    return blobs.put_chunks([parameters.schema.header, parameters.buffer.data])


UPLOAD_BYTES = 2 * wire.CHUNK_BYTES
"""The memory of one upload: a chunk that is being written, and one that is being received."""
REPORTS_PART = 0.25
"""The fraction of the memory for updates within reports, so that a report never waits for an upload."""


class MemoryShare:
    """The part of a budget that a call holds."""

    def __init__(self, budget: MemoryBudget, size_bytes: int) -> None:
        self._budget = budget
        self.size_bytes = size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Reduce the share to this size if it is larger."""
        if size_bytes < self.size_bytes:
            freed, self.size_bytes = self.size_bytes - size_bytes, size_bytes
            self._budget.give_back(freed)


class MemoryBudget:
    """Bytes that calls share. Up to `max_waiting` calls wait for bytes, in order; further ones are refused at once."""

    def __init__(self, total_bytes: int, timeout_s: float, max_waiting: int) -> None:
        self._total = self._free = total_bytes
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def free_bytes(self) -> int:
        """The number of bytes that no call holds."""
        return self._free

    @property
    def is_half_free(self) -> bool:
        """True if calls hold at most half of the bytes."""
        return 2 * self._free >= self._total

    @property
    def num_waiting(self) -> int:
        """The number of calls that wait for a share."""
        return sum(not turn.done() for _, turn in self._waiting)

    @contextlib.asynccontextmanager
    async def share(self, size_bytes: int) -> AsyncGenerator[MemoryShare]:
        """Wait for a share of this size (at most the whole budget) and hold it.

        Raises `RefusedError` if too many calls wait, or after `timeout_s`.
        """
        share = MemoryShare(self, min(size_bytes, self._total))
        await self._take(share.size_bytes)
        try:
            yield share
        finally:
            self.give_back(share.size_bytes)

    def give_back(self, size_bytes: int) -> None:
        """Free bytes, and hand them to waiting calls."""
        self._free += size_bytes
        self._serve()

    async def _take(self, size_bytes: int) -> None:
        if not self._waiting and size_bytes <= self._free:
            self._free -= size_bytes
            return
        if len(self._waiting) >= self._max_waiting:
            raise errors.RefusedError(errors.Code.TOO_MANY_UPLOADS)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            async with asyncio.timeout(self._timeout_s):
                await turn
        except BaseException as exc:
            if turn.done() and not turn.cancelled():  # the share was granted at the same moment
                self.give_back(size_bytes)
            else:
                turn.cancel()
                self._serve()
            if isinstance(exc, TimeoutError):
                raise errors.RefusedError(errors.Code.TOO_MANY_UPLOADS) from exc
            raise

    def _serve(self) -> None:
        """Grant shares to waiting calls in order; skip cancelled ones."""
        while self._waiting:
            size_bytes, turn = self._waiting[0]
            if not turn.done():
                if size_bytes > self._free:
                    return
                self._free -= size_bytes
                turn.set_result(None)
            self._waiting.popleft()


class UploadMemory:
    """The memory budgets of this daemon: for uploads, and for updates within reports."""

    def __init__(self, limits: config.Limits) -> None:
        reports = int(REPORTS_PART * limits.upload_memory_bytes)
        self.uploads = MemoryBudget(
            limits.upload_memory_bytes - reports, limits.upload_wait_s, limits.max_waiting_uploads
        )
        self.reports = MemoryBudget(reports, limits.upload_wait_s, limits.max_waiting_uploads)
