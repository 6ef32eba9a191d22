"""The parts of an upload, written in their order although several calls bring them.

A server gives a stream a small window until it reads a message, and then one as large as that message
(`rpc.serving.WINDOW_BYTES`). So over a line with latency each part of a stream costs a round trip, in which the line is
idle. A client fills it with several streams: it sends each part, with its position, over the next stream that is free
(`UploadRequest.position`). A part that arrives before its turn waits in the memory of its call. A call reads no further
part until its last one was written, so it never has more than two, as if it were alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator
from typing import NamedTuple

from fedplat import durable
from fedplat_server.errors import Code, RefusedError, UploadError
from fedplat_server.storage.spool_file import OpenUpload


class _Waiting(NamedTuple):
    data: durable.Bytes
    written: asyncio.Future[None]
    timer: asyncio.TimerHandle


class OrderedWriter:
    """Writes the parts of an upload, one at a time, in a thread. For the event loop.

    If one of its calls breaks, the parts of the others may wait for one that does not come: so all end.
    """

    def __init__(self, upload: OpenUpload, wait_s: float) -> None:
        """Take over an open upload. `wait_s` is the longest time that a part waits for its turn."""
        self._upload = upload
        self._wait_s = wait_s
        self._next = upload.received
        """The position of the part that is written next."""
        self._waiting: dict[int, _Waiting] = {}  # by position
        self._is_writing = False
        self._error: Exception | None = None
        self._is_finished = False
        self._num_calls = 0

    @property
    def received(self) -> int:
        """The number of bytes that were written."""
        return self._upload.received

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncGenerator[None]:
        """Count a call while it brings parts; close the upload after the last one."""
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                await asyncio.to_thread(self._upload.close)

    def write(self, data: durable.Bytes, position: int | None = None) -> asyncio.Future[None]:
        """Write a part in its turn; the future ends when it was written. Without a position, it is the next one.

        The future raises as `OpenUpload.write`, and `RefusedError` if the turn does not come. Raises `UploadError` if
        there is such a part already, and the error of the call that broke.
        """
        if self._error is not None:
            raise self._error
        position = self._next if position is None else position
        if position < self._next or position in self._waiting:
            raise UploadError(f"the part at {position} was received already; call QueryUpload to resume")
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        self._waiting[position] = _Waiting(data, written, loop.call_later(self._wait_s, self._expire))
        self._start_next()
        return written

    def end(self, error: Exception | None = None) -> None:
        """Let no further part be written, because a call broke."""
        self._error = self._error or error or UploadError("another call of this upload broke")
        for part in self._waiting.values():
            part.timer.cancel()
            _settle(part.written, self._error)
        self._waiting.clear()

    async def finish(self) -> None:
        """Finish a complete upload, once. Raises as `OpenUpload.finish`."""
        if not self._is_finished:
            self._is_finished = True
            await asyncio.to_thread(self._upload.finish)

    def _start_next(self) -> None:
        if self._is_writing or (part := self._waiting.pop(self._next, None)) is None:
            return
        part.timer.cancel()
        self._is_writing, self._next = True, self._next + len(part.data)
        writing = asyncio.get_running_loop().run_in_executor(None, self._upload.write, part.data)
        writing.add_done_callback(functools.partial(self._on_written, part.written))

    def _on_written(self, written: asyncio.Future[None], writing: asyncio.Future[None]) -> None:
        self._is_writing = False
        if (error := writing.exception()) is None:
            _settle(written)
            self._start_next()
        else:
            _settle(written, error)
            self.end()

    def _expire(self) -> None:
        self.end(RefusedError(Code.TOO_SLOW, f"a part of the upload was missing for {self._wait_s:g} s"))


def _settle(written: asyncio.Future[None], error: BaseException | None = None) -> None:
    if not written.done():  # else its call was cancelled
        if error is None:
            written.set_result(None)
        else:
            written.set_exception(error)
