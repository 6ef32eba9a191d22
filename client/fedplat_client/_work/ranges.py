"""Download over several connections, for a line that one connection does not fill.

TCP takes a lost packet for congestion. With its usual congestion control, one connection over a long line with losses
reaches about 1.2 MSS / (RTT sqrt(p)) bytes a second, 0.35 MB/s for 50 ms and 1 %, however fast the line is (Mathis et
al., "The macroscopic behavior of the TCP congestion avoidance algorithm", 1997). N connections reach N times as much.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from fedplat.wire import messages
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import errors, task
from fedplat_client._auth.authenticator import Connection
from fedplat_client._state.model_cache import PartialDownload
from fedplat_client.transport import OpenChannel

MAX_STREAMS = 8
"""The most connections of a download. A server allows fewer by default."""
RANGE_BYTES = 2 * 2**20
MAX_AHEAD_BYTES = 8 * RANGE_BYTES
"""Ranges that arrive before one that precedes them wait in memory, up to this size."""
MEASURED_S = 5.0
"""For how long a number of connections is measured."""
GAIN = 1.3
"""Twice as many connections must be faster by this factor; otherwise the line is the limit, and one half is closed."""
WORTH_S = 20.0
"""More connections are not worth their cost if the download ends within this time."""
FAST_BYTES_PER_S = 12.5e6


class StreamCount:
    """The number of connections of a download: one, doubled as long as that makes a slow download faster."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self.number = 1
        self._most = min(most, MAX_STREAMS)
        self._clock = clock
        self._is_settled = self._most < 2
        self._rate = 0.0
        self._began_at, self._begun_bytes = clock(), 0

    def restart(self, num_received: int) -> None:
        """Measure from now on."""
        self._began_at, self._begun_bytes = self._clock(), num_received

    def note(self, num_received: int, num_missing: int) -> None:
        """Note the bytes so far, and those that are missing; decide once they were measured for long enough."""
        elapsed = self._clock() - self._began_at
        if self._is_settled or elapsed < MEASURED_S:
            return
        rate = (num_received - self._begun_bytes) / elapsed
        if rate < GAIN * self._rate:
            self.number //= 2
            self._is_settled = True
        elif 2 * self.number > self._most or rate > FAST_BYTES_PER_S or num_missing < WORTH_S * rate:
            self._is_settled = True
        else:
            self._rate = rate
            self.number *= 2
        self.restart(num_received)


class WaitAfterBreak(Protocol):
    """Waits after a broken call before the next one; raises after too many without progress."""

    def __call__(self, why: str, retry: model_pb2.RetryWindow | None, *, progress: bool) -> None: ...


@dataclass
class _Range:
    start: int
    size: int
    content: bytearray = field(default_factory=bytearray)


class RangedDownload:
    """Downloads ranges of a file over several connections, and appends them to its partial download in order.

    A range of which a connection breaks is completed over another one.
    """

    def __init__(
        self,
        connection: Connection,
        file: model_pb2.ModelRef | fleet_pb2.ModelDelta,
        part: PartialDownload,
        control: task.Control,
        streams: StreamCount,
    ) -> None:
        self._connection = connection
        self._file = file
        self._part = part
        self._control = control
        self._streams = streams
        self._position = part.size
        """Where the next range begins."""
        self._ranges: dict[int, _Range] = {}
        """The ranges that were begun and not appended yet, by their start."""
        self._broken: list[_Range] = []
        self._busy: dict[concurrent.futures.Future[None], tuple[_Range, OpenChannel, int]] = {}
        self._idle: list[OpenChannel] = []

    def run(self, wait_after_break: WaitAfterBreak) -> None:
        """Download until the file is complete, or one connection is enough.

        Raises as `wait_after_break`, `CallRefusedError`, `TransferError`, `IdentityError`, or `Cancelled`.
        """
        self._streams.restart(self._part.size)
        # The connections are closed first, which ends their calls, and so the threads.
        with concurrent.futures.ThreadPoolExecutor(MAX_STREAMS) as pool, contextlib.ExitStack() as channels:
            while self._begin_ranges(pool, channels):
                done, _ = concurrent.futures.wait(self._busy, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    self._end_range(future, wait_after_break)
                while (first := self._ranges.get(self._part.size)) and len(first.content) == first.size:
                    del self._ranges[first.start]
                    self._part.write(first.content)
                num_received = self._part.size + sum(len(each.content) for each in self._ranges.values())
                self._streams.note(num_received, self._file.size_bytes - num_received)

    def _begin_ranges(self, pool: concurrent.futures.Executor, channels: contextlib.ExitStack) -> bool:
        """Begin ranges for all connections; return whether any is being received."""
        while len(self._busy) < self._streams.number and (chosen := self._next_range()) is not None:
            channel = self._idle.pop() if self._idle else channels.enter_context(self._connection.dial())
            self._busy[pool.submit(self._receive, chosen, channel)] = chosen, channel, len(chosen.content)
        return bool(self._busy)

    def _next_range(self) -> _Range | None:
        if self._broken:
            return self._broken.pop(0)
        size = min(RANGE_BYTES, self._file.size_bytes - self._position)
        if self._streams.number < 2 or size == 0 or self._position - self._part.size >= MAX_AHEAD_BYTES:
            return None
        chosen = self._ranges[self._position] = _Range(self._position, size)
        self._position += size
        return chosen

    def _receive(self, chosen: _Range, channel: OpenChannel) -> None:
        """Receive what is missing of a range."""
        content, offset = chosen.content, chosen.start + len(chosen.content)
        is_last = chosen.start + chosen.size == self._file.size_bytes
        length = 0 if is_last else chosen.size - len(content)  # without a length, the server notes the download
        request = fleet_pb2.DownloadRequest(digest=self._file.digest, offset=offset, length=length)
        received = self._connection.download(request, self._control.call_timeout_s, self._control.signal, channel)
        with contextlib.closing(received):
            for data in received:
                self._add(content, data, chosen.size)
        if len(content) < chosen.size:
            raise errors.ServerUnavailableError("UNAVAILABLE", "the stream ended early")

    def _add(self, content: bytearray, data: messages.Bytes, size: int) -> None:
        if len(content) + len(data) > size:
            raise errors.TransferError(f"the server sends more than the {size} bytes of a range")
        content += data

    def _end_range(self, future: concurrent.futures.Future[None], wait_after_break: WaitAfterBreak) -> None:
        chosen, channel, num_before = self._busy.pop(future)
        try:
            future.result()
            self._idle.append(channel)
        except errors.ServerUnavailableError as exc:
            channel.close()
            self._broken.append(chosen)
            wait_after_break(str(exc), exc.retry, progress=len(chosen.content) > num_before)
