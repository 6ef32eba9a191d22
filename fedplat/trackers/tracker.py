"""The contract of experiment trackers, and delivery from a thread: a tracker that is away never delays a round."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, cast

from typing_extensions import override

from fedplat.errors import TrackerError

RunStatus = Literal["FINISHED", "FAILED", "KILLED", "RUNNING"]
"""The status of a tracked run when its tracker is closed. RUNNING: the run goes on without this process."""


@dataclasses.dataclass(frozen=True)
class RoundMetrics:
    """The metrics of a round by name, such as `clients/loss`. `time_s`: when the round ended.

    The time is in seconds since 1970, or in virtual seconds.
    """

    round: int
    time_s: float
    values: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """What a tracker records of a run besides its rounds.

    `key` identifies the run: a tracker that is opened again with the same key continues the same run. Runs of one
    `experiment` are compared with each other. `params` are the fields of the job file, in dotted names.
    """

    key: str
    name: str
    experiment: str
    params: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


class Tracker(Protocol):
    """Records the rounds of one run.

    >>> class Printer(Tracker):
    ...     def log(self, rounds):
    ...         for each in rounds:
    ...             print(each.round, dict(each.values))
    ...
    ...     def close(self, status):
    ...         print(status)
    >>> printer = Printer()
    >>> printer.log([RoundMetrics(1, 12.5, {"clients/loss": 0.5})])
    1 {'clients/loss': 0.5}
    >>> printer.close("FINISHED")
    FINISHED
    """

    def log(self, rounds: Sequence[RoundMetrics]) -> None:
        """Record rounds. Repeating a call records nothing twice. Raises `TrackerError` if the tracker fails."""
        ...

    def close(self, status: RunStatus) -> None:
        """Record the status of the run and release what the tracker holds. Raises `TrackerError` if that fails."""
        ...


def flatten(table: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of nested tables as text by dotted name, such as `selection.goal`.

    >>> flatten({"rounds": 3, "config": {"layers": [8, 2]}})
    {'rounds': '3', 'config.layers': '[8, 2]'}
    """
    return dict(_fields(table, ""))


def _fields(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _fields(cast(Mapping[str, Any], value), f"{prefix}{name}.")
        elif isinstance(value, str):
            yield f"{prefix}{name}", value
        else:
            yield f"{prefix}{name}", json.dumps(value, default=_describe)


def _describe(value: object) -> str:
    """Return a text for a value that JSON does not have: the name of a function, which has no address in memory."""
    return getattr(value, "__qualname__", None) or str(value)


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
