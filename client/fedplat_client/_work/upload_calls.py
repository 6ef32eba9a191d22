"""The calls that bring an upload: one, and several over a line with latency.

A server gives a stream a window of 16 KiB until it reads a message, and then one as large as that message: strangers
could fill larger ones. So each part of a stream costs a round trip, in which the line is idle. Several streams of one
connection fill it: each part is sent, with its position, over the next stream that is free, and the server writes the
parts in their order. If one of the calls breaks, all end, and the upload resumes with one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from fedplat import wire
from fedplat.wire import messages
from fedplat.wire.v1 import fleet_pb2
from fedplat_client import errors
from fedplat_client._auth.authenticator import Connection, UploadCall
from fedplat_client._work.content import FAST_PART_S, LATENT_PART_S, Outgoing
from fedplat_client.task import Control

MAX_CALLS = 4
"""The most calls of an upload. A server allows three by default."""
WORTH_BYTES = 8 * wire.CHUNK_BYTES
"""More calls are not worth their cost if fewer bytes are missing."""
MEASURED_PARTS = 3
"""The number of full parts of which the fastest one is measured."""


class UploadCalls:
    """The calls of one upload. After several of them have failed, there is only one at a time."""

    def __init__(self, connection: Connection, control: Control) -> None:
        self._connection = connection
        self._control = control
        self._may_add = connection.can_share_upload

    def send(self, header: fleet_pb2.UploadHeader, content: Outgoing) -> int:
        """Send the content from the header's offset on; return the number of bytes that the server then had.

        Raises `CallError`, or `Cancelled` if the task is stopped.
        """
        control = self._control
        if header.receiver or not self._may_add or header.size_bytes - header.offset < WORTH_BYTES:
            parts = content.split(header.offset, control.options.clock)
            return self._connection.upload(header, parts, control.call_timeout_s, control.signal)
        sharing = _SharedUpload(self._connection, control, header, content)
        try:
            return sharing.run()
        except errors.CallError as exc:
            self._may_add = not sharing.has_several
            if sharing.has_several and isinstance(exc, errors.ServerBusyError):  # the first call had its place
                raise errors.ServerUnavailableError(exc.code, str(exc)) from exc
            raise


class _SharedUpload:
    """An upload whose parts several calls draw, each when it has sent its last one.

    gRPC draws the parts of each call in a thread of its own.
    """

    def __init__(
        self, connection: Connection, control: Control, header: fleet_pb2.UploadHeader, content: Outgoing
    ) -> None:
        self._connection = connection
        self._control = control
        self._header = header
        self._parts = content.split(header.offset, control.options.clock)
        self._position = header.offset
        self._lock = threading.Lock()
        self._calls: list[UploadCall] = []
        self._failed: UploadCall | None = None
        self._is_over = False
        self.has_several = False

    def run(self) -> int:
        """Send all parts; return the number of bytes that the server then had."""
        try:
            self._start(self._header, self._measure(self._draw_all()))
            return max(call.result(self._control.signal) for call in self._calls)  # the first one adds to the list
        except errors.CallError:
            if self._failed is not None:
                self._failed.result(self._control.signal)  # raises why all have ended
            raise
        finally:
            self._end()

    def _start(self, header: fleet_pb2.UploadHeader, parts: Iterator[bytes]) -> None:
        call = self._connection.start_upload(header, parts, self._control.call_timeout_s, self._control.signal)
        with self._lock:
            self._calls.append(call)
            is_over = self._is_over
        if is_over:
            call.cancel()
        call.on_failure(self._end)

    def _end(self, failed: UploadCall | None = None) -> None:
        """End all calls, because they are over or one of them failed."""
        with self._lock:
            self._failed = self._failed or failed
            self._is_over, calls = True, tuple(self._calls)
        for call in calls:
            call.cancel()

    def _draw_all(self) -> Iterator[bytes]:
        """Yield the parts that no other call has drawn, as messages."""
        while (message := self._draw()) is not None:
            yield message

    def _draw(self) -> bytes | None:
        with self._lock:
            part = next(self._parts, None)
            if part is None or self._is_over:
                return None
            position, self._position = self._position, self._position + len(part)
            if self.has_several:
                return messages.frame_part(position, part)
            return messages.frame_field(messages.UPLOAD, part)  # all that a server before 0.2 knows

    def _measure(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the parts of the first call; add others once it shows that each part waits for a round trip."""
        clock, times = self._control.options.clock, list[float]()
        for part in parts:
            began = clock()
            yield part
            elapsed_s = clock() - began
            if len(part) > wire.CHUNK_BYTES // 2 and elapsed_s < FAST_PART_S and len(times) < MEASURED_PARTS:
                times.append(elapsed_s)
                if len(times) == MEASURED_PARTS and min(times) >= LATENT_PART_S:
                    self._add_calls()

    def _add_calls(self) -> None:
        """Add as many calls as the server allows."""
        header = self._header
        if header.size_bytes - self._position < WORTH_BYTES:
            return
        query = fleet_pb2.QueryUploadRequest(token=header.token, digest=header.digest, upload_id=header.upload_id)
        try:
            max_calls = self._connection.query_upload(query, self._control.signal).max_calls
            self.has_several = max_calls > 1
            more = fleet_pb2.UploadHeader()
            more.CopyFrom(header)
            more.additional, more.offset = True, 0
            for _ in range(min(max_calls, MAX_CALLS) - 1):
                self._start(more, self._draw_all())
        except (errors.CallError, errors.Cancelled):
            return  # what has ended the call ends the first one, too, or one call is enough
