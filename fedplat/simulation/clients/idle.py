"""Idle clients: they check in, wait, are refused and return. They are stored as arrays, because there are so many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedplat.job import JobSpec
from fedplat.rounds import pacing
from fedplat.rounds.commands import Refuse
from fedplat.rounds.events import ClientCheckedIn, ClientLeft, Event
from fedplat.rounds.protocols.base import list_registered, training_name
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.availability import Clients
from fedplat.simulation.clients.distributions import Floats
from fedplat.simulation.clients.event_queue import Alarms
from fedplat.wire import FIRST_BACKOFF_S, MAX_BACKOFF_S

_SPAN_S = 60.0


class IdleClients:
    """All clients without an assignment. Each has one alarm: when it checks in or, while it waits, when it leaves.

    Events are returned in batches, `batch_s` after the first of each: a million clients cause several hundred events a
    second, and the cost of a batch hardly grows with its size. No client is an object; its check-in event is one, which
    is created at the first check-in, and clients with the same labels share the labels in it.
    """

    def __init__(self, fleet: Fleet, spec: JobSpec, rng: np.random.Generator) -> None:
        self._fleet, self._rng = fleet, rng
        self._alarms = Alarms(fleet.num_clients, _SPAN_S)
        self._waiting = np.zeros(fleet.num_clients, np.bool_)
        self._until = np.zeros(fleet.num_clients)
        self._failures = np.zeros(fleet.num_clients, np.int8)
        # Clients that became idle, when, and whether they failed: their alarms are set at the next batch.
        self._finished: list[tuple[int, float, bool]] = []
        self._batch_s = fleet.options.batch_s
        self._check_ins: list[ClientCheckedIn | None] = [None] * fleet.num_clients
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
        bound = np.minimum(FIRST_BACKOFF_S * 2.0 ** self._failures[clients], MAX_BACKOFF_S)
        self._failures[clients] = np.where(failed, np.minimum(self._failures[clients] + 1, 64), 0)
        self.schedule_check_ins(clients, since + np.where(failed, bound * self._rng.random(len(clients)), 0.0))

    def schedule_check_ins(self, clients: Clients, at: Floats) -> None:
        """Schedule check-ins at these moments, or as soon as the clients are online."""
        begin, end = self._fleet.availability.spells(clients, at)
        self._waiting[clients] = False
        self._until[clients] = end
        self._alarms.set(clients, np.maximum(at, begin))

    def _check_in(self, client: int) -> ClientCheckedIn:
        check_in = self._check_ins[client]
        if check_in is None:
            kind = int(self._fleet.kinds[client])
            labels = self._labels.get(kind)
            if labels is None:
                labels = self._labels[kind] = self._fleet.labels_of(client)
            check_in = self._check_ins[client] = ClientCheckedIn(
                str(client),
                self._population,
                labels,
                self._trainers,
                self._evaluators,
                self._codecs,
                features=self._features,
            )
        return check_in
