"""Clients without work: they check in, wait, are sent away, and come back; as arrays, because they are so many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedplat.job import JobSpec
from fedplat.rounds import pacing
from fedplat.rounds.commands import Refuse
from fedplat.rounds.events import ClientCheckedIn, ClientLeft, Event
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.availability import Clients
from fedplat.simulation.clients.distributions import Floats
from fedplat.simulation.clients.event_queue import Alarms
from fedplat.wire import FIRST_BACKOFF_S, MAX_BACKOFF_S

_SPAN_S = 60.0


class IdleClients:
    """All clients that have no work. Each has one alarm: the moment at which it checks in or, while it waits, leaves.

    Their events are handed out in batches, `batch_s` after the first of each: a million clients come and go several
    hundred times a second, and what a batch costs hardly grows with its size. No client is an object; what a check-in
    says is one, made when a client first checks in, and clients with the same labels share them.
    """

    def __init__(self, fleet: Fleet, spec: JobSpec, rng: np.random.Generator) -> None:
        self._fleet, self._rng = fleet, rng
        self._alarms = Alarms(fleet.num_clients, _SPAN_S)
        self._waiting = np.zeros(fleet.num_clients, np.bool_)
        self._until = np.zeros(fleet.num_clients)
        self._failures = np.zeros(fleet.num_clients, np.int8)
        # Clients that are free again, since when, and whether they failed: they get their alarms at the next batch.
        self._free: list[tuple[int, float, bool]] = []
        self._batch_s = fleet.options.batch_s
        self._check_ins: list[ClientCheckedIn | None] = [None] * fleet.num_clients
        self._labels: dict[int, dict[str, str]] = {}
        evaluation = spec.evaluation.clients
        self._population = spec.population
        self._trainers = frozenset({spec.trainer})
        self._evaluators = frozenset[str]() if evaluation is None else frozenset({evaluation.evaluator})
        self._codecs = spec.compression.names
        self.num_check_ins = self.num_refused = 0
        arrive_s = fleet.options.arrive_s or pacing.idle_window(fleet.num_clients).max_s
        self.schedule_check_ins(np.arange(fleet.num_clients), rng.uniform(0.0, arrive_s, fleet.num_clients))

    def next_batch(self) -> float:
        """The moment of the next batch; infinite if nobody will ever come."""
        first = min(self._free[0][1], self._alarms.first()) if self._free else self._alarms.first()
        return first + self._batch_s

    def events(self, now: float) -> list[Event]:
        """If a batch is due: who has checked in or left up to now, in order."""
        if self.next_batch() > now:
            return []
        self._release()
        clients, times = self._alarms.due(now)
        leaving = self._waiting[clients]
        self._waiting[clients] = ~leaving
        coming = clients[~leaving]
        if len(coming):
            self._alarms.set(coming, np.minimum(times[~leaving] + self._fleet.options.wait_s, self._until[coming]))
            self.num_check_ins += len(coming)
        return [
            ClientLeft(str(client)) if leaves else self._check_in(client)
            for client, leaves in zip(clients.tolist(), leaving.tolist(), strict=True)
        ]

    def on_refused(self, commands: Sequence[Refuse], now: float) -> None:
        """Clients wait no longer, and come back within the window that they were told."""
        clients = np.array([int(command.client_id) for command in commands])
        low = np.array([command.retry.min_s for command in commands])
        high = np.array([command.retry.max_s for command in commands])
        self.num_refused += len(clients)
        # Whose time is over did not hear that: it comes when it is there again.
        heard = self._until[clients] > now
        self.schedule_check_ins(
            clients, now + np.where(heard, low + (high - low) * self._rng.random(len(clients)), 0.0)
        )

    def on_assigned(self, clients: Clients) -> Floats:
        """Clients have work now; returns how long each is there."""
        self._waiting[clients] = False
        self._alarms.clear(clients)
        return self._until[clients]

    def on_finished(self, client: int, now: float, *, failed: bool) -> None:
        """A client has no work any more: it checks in at once, or after a back-off if it failed."""
        self._free.append((client, now, failed))

    def _release(self) -> None:
        if not self._free:
            return
        clients, since, failed = (np.array(column) for column in zip(*self._free, strict=True))
        self._free = []
        bound = np.minimum(FIRST_BACKOFF_S * 2.0 ** self._failures[clients], MAX_BACKOFF_S)
        self._failures[clients] = np.where(failed, np.minimum(self._failures[clients] + 1, 64), 0)
        self.schedule_check_ins(clients, since + np.where(failed, bound * self._rng.random(len(clients)), 0.0))

    def schedule_check_ins(self, clients: Clients, at: Floats) -> None:
        """Clients check in at these moments, or as soon as they are there."""
        begin, end = self._fleet.availability.spells(clients, at)
        self._waiting[clients] = False
        self._until[clients] = end
        self._alarms.set(clients, np.maximum(at, begin))

    def _check_in(self, client: int) -> ClientCheckedIn:
        known = self._check_ins[client]
        if known is None:
            kind = int(self._fleet.kinds[client])
            labels = self._labels.get(kind)
            if labels is None:
                labels = self._labels[kind] = self._fleet.labels_of(client)
            known = self._check_ins[client] = ClientCheckedIn(
                str(client), self._population, labels, self._trainers, self._evaluators, self._codecs
            )
        return known
