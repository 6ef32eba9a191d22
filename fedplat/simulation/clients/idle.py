"""Idle clients, and the queue of future events: alarms of idle clients, and the actions of clients at work."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from fedplat import job, wire
from fedplat.rounds import pacing
from fedplat.rounds.commands import Refuse
from fedplat.rounds.events import ClientCheckedIn, ClientLeft, Event
from fedplat.rounds.protocols.base import list_registered, training_name
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.availability import Clients
from fedplat.simulation.clients.distributions import Floats

_SPAN_S = 60.0
_KEPT_CHECK_INS = 100_000
"""The check-ins that are kept for the next ones of their clients: each needs 180 bytes, and some time to make."""


class IdleClients:
    """All clients without an assignment. Each has one alarm: when it checks in or, while it waits, when it leaves.

    Events are returned in batches, `batch_s` after the first of each: a million clients cause several hundred events a
    second, and the cost of a batch hardly grows with its size. No client is an object; its check-in event is one, which
    the first clients to check in use again, and clients with the same labels share the labels in it.
    """

    def __init__(self, fleet: Fleet, spec: job.JobSpec, rng: np.random.Generator) -> None:
        self._fleet, self._rng = fleet, rng
        self._alarms = Alarms(fleet.num_clients, _SPAN_S)
        self._waiting = np.zeros(fleet.num_clients, np.bool_)
        self._until = np.zeros(fleet.num_clients)
        self._failures = np.zeros(fleet.num_clients, np.int8)
        # Clients that became idle, when, and whether they failed: their alarms are set at the next batch.
        self._finished: list[tuple[int, float, bool]] = []
        self._batch_s = fleet.options.batch_s
        self._check_ins: dict[int, ClientCheckedIn] = {}
        self._labels: dict[int, dict[str, str]] = {}
        evaluation = spec.evaluation.clients
        self._population = spec.population
        self._trainers = frozenset({spec.trainer})
        self._evaluators = frozenset[str]() if evaluation is None else frozenset({evaluation.evaluator})
        self._codecs = spec.compression.names
        self._features = list_registered()[training_name(spec)].features
        self.num_check_ins = self.num_refused = 0
        arrive_s = fleet.options.arrive_s or pacing.idle_window(fleet.num_clients).max_s
        self.schedule_check_ins(np.arange(fleet.num_clients), rng.uniform(0.0, arrive_s, fleet.num_clients))

    def next_batch(self) -> float:
        """Return the moment of the next batch; infinite if no client will ever check in again."""
        first = min(self._finished[0][1], self._alarms.first()) if self._finished else self._alarms.first()
        return first + self._batch_s

    def events(self, now: float) -> list[Event]:
        """Return the check-ins and departures up to now, in order, if a batch is due; else no events."""
        if self.next_batch() > now:
            return []
        self._schedule_finished()
        clients, times = self._alarms.due(now)
        leaving = self._waiting[clients]
        self._waiting[clients] = ~leaving
        arriving = clients[~leaving]
        if len(arriving):
            self._alarms.set(arriving, np.minimum(times[~leaving] + self._fleet.options.wait_s, self._until[arriving]))
            self.num_check_ins += len(arriving)
        return [
            ClientLeft(str(client)) if leaves else self._check_in(client)
            for client, leaves in zip(clients.tolist(), leaving.tolist(), strict=True)
        ]

    def on_refused(self, commands: Sequence[Refuse], now: float) -> None:
        """End the wait of refused clients; they return within the window of their refusal."""
        clients = np.array([int(command.client_id) for command in commands])
        low = np.array([command.retry.min_s for command in commands])
        high = np.array([command.retry.max_s for command in commands])
        self.num_refused += len(clients)
        # A client that is offline by now has not received the refusal: it checks in when it is online again.
        is_online = self._until[clients] > now
        self.schedule_check_ins(
            clients, now + np.where(is_online, low + (high - low) * self._rng.random(len(clients)), 0.0)
        )

    def on_assigned(self, clients: Clients) -> Floats:
        """Remove clients that were assigned; returns the moment at which each goes offline."""
        self._waiting[clients] = False
        self._alarms.clear(clients)
        return self._until[clients]

    def on_finished(self, client: int, now: float, *, failed: bool) -> None:
        """Add a client whose assignment is over: it checks in at once, or after a back-off if it failed."""
        self._finished.append((client, now, failed))

    def _schedule_finished(self) -> None:
        if not self._finished:
            return
        clients, since, failed = (np.array(column) for column in zip(*self._finished, strict=True))
        self._finished = []
        bound = np.minimum(wire.FIRST_BACKOFF_S * 2.0 ** self._failures[clients], wire.MAX_BACKOFF_S)
        self._failures[clients] = np.where(failed, np.minimum(self._failures[clients] + 1, 64), 0)
        self.schedule_check_ins(clients, since + np.where(failed, bound * self._rng.random(len(clients)), 0.0))

    def schedule_check_ins(self, clients: Clients, at: Floats) -> None:
        """Schedule check-ins at these moments, or as soon as the clients are online."""
        begin, end = self._fleet.availability.spells(clients, at)
        self._waiting[clients] = False
        self._until[clients] = end
        self._alarms.set(clients, np.maximum(at, begin))

    def _check_in(self, client: int) -> ClientCheckedIn:
        if (kept := self._check_ins.get(client)) is not None:
            return kept
        kind = int(self._fleet.kinds[client])
        labels = self._labels.get(kind)
        if labels is None:
            labels = self._labels[kind] = self._fleet.labels_of(client)
        check_in = ClientCheckedIn(
            str(client),
            self._population,
            labels,
            self._trainers,
            self._evaluators,
            self._codecs,
            features=self._features,
        )
        if len(self._check_ins) < _KEPT_CHECK_INS:
            self._check_ins[client] = check_in
        return check_in


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
