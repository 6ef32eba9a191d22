"""Future events: an alarm for each idle client, and a queue of the actions of clients at work."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np

from fedplat.simulation.clients.availability import Clients
from fedplat.simulation.clients.distributions import Floats

_Item = TypeVar("_Item")


class Alarms:
    """At most one alarm for each of many clients, in the order of time, then of the clients' numbers.

    A heap of a million entries would cost a Python object each, and cache misses for every change. Here the moments are
    one array; once per `span_s`, one pass over it finds and sorts the next ones.
    """

    def __init__(self, num_clients: int, span_s: float) -> None:
        self._at = np.full(num_clients, np.inf)
        self._span_s = span_s
        self._end = -np.inf
        # The alarms of the current span, as they were when it began; those that have changed since are skipped.
        self._times: Floats = np.empty(0)
        self._clients: Clients = np.empty(0, np.int64)
        self._next = 0
        self._soon: list[tuple[float, int]] = []

    def set(self, clients: Clients, at: Floats) -> None:
        """Set or replace the alarms of clients; an infinite moment clears the alarm."""
        self._at[clients] = at
        for row in np.flatnonzero(at < self._end).tolist():
            heapq.heappush(self._soon, (float(at[row]), int(clients[row])))

    def clear(self, clients: Clients) -> None:
        """Remove the alarms of clients."""
        self._at[clients] = np.inf

    def first(self) -> float:
        """Return the earliest moment; infinite without alarms."""
        while True:
            while self._soon and self._at[self._soon[0][1]] != self._soon[0][0]:
                heapq.heappop(self._soon)
            while self._next < len(self._times) and self._at[self._clients[self._next]] != self._times[self._next]:
                self._next += 1
            planned = float(self._times[self._next]) if self._next < len(self._times) else np.inf
            earliest = min(planned, self._soon[0][0] if self._soon else np.inf)
            if earliest < np.inf or not self._begin_span():
                return earliest

    def due(self, now: float) -> tuple[Clients, Floats]:
        """Remove and return all alarms up to `now`: the clients and their moments."""
        clients: list[Clients] = []
        times: list[Floats] = []
        while self.first() <= now:
            taken = slice(self._next, int(np.searchsorted(self._times, now, side="right")))
            self._next = max(taken.start, taken.stop)
            # An alarm is cleared when it is returned, so that a second entry of the same moment is skipped.
            is_current = self._at[self._clients[taken]] == self._times[taken]
            clients.append(self._clients[taken][is_current])
            times.append(self._times[taken][is_current])
            self._at[clients[-1]] = np.inf
            soon: list[tuple[float, int]] = []
            while self._soon and self._soon[0][0] <= now:
                at, client = heapq.heappop(self._soon)
                if self._at[client] == at:
                    soon.append((at, client))
                    self._at[client] = np.inf
            clients.append(np.array([client for _, client in soon], np.int64))
            times.append(np.array([at for at, _ in soon]))
        if not clients:
            return np.empty(0, np.int64), np.empty(0)
        due, moments = np.concatenate(clients), np.concatenate(times)
        order = np.lexsort((due, moments))
        return due[order], moments[order]

    def _begin_span(self) -> bool:
        begin = float(self._at.min(initial=np.inf))
        if begin == np.inf:
            return False
        self._end = max(begin + self._span_s, np.nextafter(begin, np.inf))
        clients = np.flatnonzero(self._at < self._end)
        times = self._at[clients]
        order = np.argsort(times, kind="stable")
        self._times, self._clients, self._next = times[order], clients[order], 0
        return True


class EventQueue(Generic[_Item]):
    """Items with moments, in the order of time, then of insertion."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Item]] = []
        self._numbers: Iterator[int] = itertools.count()

    def put(self, at: float, item: _Item) -> None:
        """Add an item with its moment."""
        heapq.heappush(self._heap, (at, next(self._numbers), item))

    def first(self) -> float:
        """Return the earliest moment; infinite if the queue is empty."""
        return self._heap[0][0] if self._heap else np.inf

    def due(self, now: float) -> Iterator[_Item]:
        """Remove and yield the items up to `now`, one by one."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[2]
