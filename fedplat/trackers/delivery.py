"""Delivery to a tracker from a thread, with retries: a tracker that is slow or away never delays a round."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from typing_extensions import override

from fedplat.errors import TrackerError
from fedplat.trackers.tracker import RoundMetrics, RunStatus, Tracker

RETRY_S = 15.0
MAX_WAITING = 10_000
MAX_BATCH = 50


class BackgroundTracker(Tracker):
    """Delivers rounds to another tracker from its own thread, in order.

    If the tracker fails, `warn` is called once, and the delivery is repeated every `retry_s` seconds and by `close`.
    Of more than `max_waiting` rounds that wait meanwhile, the oldest are dropped. Neither `log` nor `close` fails:
    `missing` has the rounds that were not delivered, and `failure` the last reason, when the tracker is closed.
    """

    def __init__(
        self,
        tracker: Tracker,
        warn: Callable[[str], object],
        *,
        retry_s: float = RETRY_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._tracker, self._warn = tracker, warn
        self._retry_s, self._max_waiting = retry_s, max_waiting
        self._waiting: deque[RoundMetrics] = deque()
        self._dropped: set[int] = set()
        self._changed = threading.Condition()
        self._status: RunStatus | None = None
        self._failed = False
        self.failure = ""
        # A daemon thread: a second Ctrl-C ends the process while the tracker does not answer.
        self._thread = threading.Thread(target=self._deliver, name="tracker", daemon=True)
        self._thread.start()

    @property
    def missing(self) -> Sequence[int]:
        """The rounds that were not delivered, in ascending order."""
        return sorted(self._dropped.union(each.round for each in self._waiting))

    @override
    def log(self, rounds: Sequence[RoundMetrics]) -> None:
        """Deliver rounds later; returns at once."""
        with self._changed:
            self._waiting.extend(rounds)
            while len(self._waiting) > self._max_waiting:
                self._dropped.add(self._waiting.popleft().round)
            self._changed.notify()

    @override
    def close(self, status: RunStatus) -> None:
        """Deliver what waits, if the tracker answers, and close it."""
        with self._changed:
            self._status = status
            self._changed.notify()
        self._thread.join()

    def _deliver(self) -> None:
        while self._status is None or self._waiting:
            with self._changed:
                self._changed.wait_for(lambda: self._status is not None or self._waiting)
                batch = [self._waiting[index] for index in range(min(MAX_BATCH, len(self._waiting)))]
                is_last = self._status is not None
            if batch and not self._try(lambda: self._tracker.log(batch)):  # noqa: B023 - called at once
                if is_last:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._status is not None, self._retry_s)
                continue
            with self._changed:
                # Meanwhile the oldest may have been dropped, although they are delivered now.
                for each in batch:
                    if self._waiting and self._waiting[0] is each:
                        self._waiting.popleft()
                    else:
                        self._dropped.discard(each.round)
        self._try(lambda: self._tracker.close(self._status or "RUNNING"))

    def _try(self, call: Callable[[], None]) -> bool:
        """Return whether a call of the tracker succeeds; warn of the first failure."""
        try:
            call()
        except TrackerError as exc:
            self.failure = str(exc)
            if not self._failed:
                self._failed = True
                self._warn(f"{exc}; the rounds are kept, and sent again while the run lasts")
            return False
        return True


def describe_rounds(rounds: Iterable[int]) -> str:
    """Describe ascending rounds as ranges.

    >>> describe_rounds([1, 2, 3, 7])
    'rounds 1-3, 7'
    """
    ranges: list[list[int]] = []
    for number in rounds:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ("round " if len(ranges) == 1 and "-" not in words[0] else "rounds ") + ", ".join(words)
