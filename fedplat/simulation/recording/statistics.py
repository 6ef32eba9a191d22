"""The statistics of a simulation, counted from the changes that a server would store."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.rounds import Attempt, AttemptKey, Change, JobState
from fedplat.rounds.protocols.base import protocol_of
from fedplat.rounds.states import BUSY_STATES, AssignmentState
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.availability import Clients
from fedplat.simulation.clients.device import DeviceAssignment
from fedplat.simulation.recording import result
from fedplat.simulation.secure import groups, sums

Observer = Callable[[result.AttemptResult], None]
_COUNTED = (AssignmentState.MERGED, AssignmentState.LATE, AssignmentState.FAILED)
_DECILES = 10


class SecureStatistics:
    """The steps of an attempt with secure aggregation."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.num_groups, self.server_s = 0, 0.0
        self._steps: Counter[str] = Counter()
        self._paid: dict[str, groups.StepCost] = {}

    def on_step(self, step: sums.SecureStep) -> None:
        """Count a step."""
        self._steps[step.phase.value] += 1
        client_id = step.task.client_id
        self._paid[client_id] = self._paid.get(client_id, groups.StepCost()).plus(step.cost)

    def costs_of(self, attempt: Attempt) -> result.SecureCosts:
        """Return the costs of an attempt that has ended."""
        merged = [each.client_id for each in attempt.assignments.values() if each.state is AssignmentState.MERGED]
        total = functools.reduce(groups.StepCost.plus, (self._paid[each] for each in merged), groups.StepCost())
        bytes_down, bytes_up, client_s = (value / max(len(merged), 1) for value in total)
        return result.SecureCosts(
            groups=self.num_groups,
            steps=dict(self._steps),
            dropped=dict(self.dropped),
            bytes_down=bytes_down,
            bytes_up=bytes_up,
            client_s=client_s,
            server_s=self.server_s,
        )


class RunStatistics:
    """All numbers of a run; `observe` is called with each attempt that has ended, after its version is published."""

    def __init__(self, fleet: Fleet, observe: Observer | None) -> None:
        self._fleet, self._observe = fleet, observe
        self._by_client = {state: np.zeros(fleet.num_clients, np.int64) for state in _COUNTED}
        self._assigned = np.zeros(fleet.num_clients, np.int64)
        self._counts: Counter[str] = Counter()
        self._staleness: Counter[int] = Counter()
        self._collecting_at: dict[AttemptKey, float] = {}
        self._bytes = (0.0, 0.0)
        self._secure: SecureStatistics | None = None
        self._exchange: result.GossipExchange | None = None
        self.attempts: list[result.AttemptResult] = []
        self.lost = self.check_ins = self.refused = self.events = self.batches = 0
        self.bytes_down = self.bytes_up = 0.0

    def on_assigned(self, key: AttemptKey, now: float, bytes_down: float) -> None:
        """Count the download of an assignment that was made now."""
        self._collecting_at.setdefault(key, now)
        self.bytes_down += bytes_down

    def on_step(self, step: sums.SecureStep) -> None:
        """Count a step of secure aggregation that a client has taken."""
        self.bytes_down += step.cost.bytes_down
        self.bytes_up += step.cost.bytes_up
        self._of_secure().on_step(step)

    def on_dropped(self, task: DeviceAssignment) -> None:
        """Count a client that was lost in a secure aggregation."""
        self._of_secure().dropped[task.phase.value] += 1

    def on_exchanged(self, exchange: result.GossipExchange) -> None:
        """Record the exchange of models in a round that ends."""
        self._exchange = exchange

    def on_unmasking(self, num_groups: int, server_s: float) -> None:
        """Count the server's part of a secure aggregation, whose survivors are known."""
        secure = self._of_secure()
        secure.num_groups, secure.server_s = num_groups, server_s

    def _of_secure(self) -> SecureStatistics:
        if self._secure is None:
            self._secure = SecureStatistics()
        return self._secure

    def on_changed(self, change: Change) -> None:
        """Count the assignments that have ended, and the bytes of reports."""
        for assignment in change.assignments:
            state = assignment.state
            if state in BUSY_STATES:
                continue
            if state is AssignmentState.REPORTED:
                if not protocol_of(change.job, assignment.kind).has_masks:  # else it is part of the costs of a step
                    self.bytes_up += assignment.update_bytes
                continue
            self._counts[state.value] += 1
            self._assigned[int(assignment.client_id)] += 1
            if state is AssignmentState.MERGED:
                self._staleness[assignment.contribution.staleness] += 1
            if state in _COUNTED:
                self._by_client[state][int(assignment.client_id)] += 1

    def on_attempt_ended(self, job: JobState, attempt: Attempt, evaluation: Mapping[str, float]) -> None:
        """Record an attempt that was committed or abandoned, and call `observe`."""
        committed = job.latest.round == attempt.key.round and job.latest.attempt == attempt.key.number
        record = result.AttemptResult(
            round=attempt.key.round,
            attempt=attempt.key.number,
            kind=attempt.kind.value,
            phase=attempt.phase.value,
            reason=attempt.reason,
            opened_at=attempt.opened_at,
            collecting_at=self._collecting_at.pop(attempt.key, attempt.opened_at),
            ended_at=attempt.opened_at if attempt.ended_at is None else attempt.ended_at,
            version=job.latest.version,
            counts=dict(sorted(self._counts.items())),
            metrics=dict(attempt.metrics),
            evaluation=dict(evaluation),
            staleness=dict(sorted(self._staleness.items())),
            num_updates=job.latest.num_updates if committed else 0,
            total_weight=job.latest.total_weight if committed else 0.0,
            bytes_down=self.bytes_down - self._bytes[0],
            bytes_up=self.bytes_up - self._bytes[1],
            secure=None if self._secure is None else self._secure.costs_of(attempt),
            exchange=self._exchange,
        )
        self._secure = self._exchange = None
        self._counts, self._staleness, self._bytes = Counter(), Counter(), (self.bytes_down, self.bytes_up)
        self.attempts.append(record)
        if self._observe is not None:
            self._observe(record)

    def totals(self, duration_s: float) -> result.Totals:
        """Return the sums over the whole run."""
        counts: Counter[str] = Counter(self._counts)  # of assignments that ended after the last attempt did
        for record in self.attempts:
            counts.update(record.counts)
        trains = [record for record in self.attempts if record.kind == "TRAIN"]
        return result.Totals(
            duration_s=duration_s,
            rounds=sum(record.committed for record in trains),
            attempts=len(trains),
            abandoned=sum(not record.committed for record in trains),
            assigned=int(self._assigned.sum()),
            counts=dict(sorted(counts.items())),
            lost=self.lost,
            check_ins=self.check_ins,
            refused=self.refused,
            distinct_clients=int(np.count_nonzero(self._assigned)),
            bytes_down=self.bytes_down,
            bytes_up=self.bytes_up,
            events=self.events,
            batches=self.batches,
        )

    def participation(self) -> result.ParticipationCounts:
        """Return the number of each client's assignments, in total and by outcome."""
        merged, late, failed = (self._by_client[state] for state in _COUNTED)
        return result.ParticipationCounts(assigned=self._assigned, merged=merged, late=late, failed=failed)


def count_staleness(attempts: Sequence[result.AttemptResult]) -> dict[int, int]:
    """Count all merged updates by their staleness."""
    total: Counter[int] = Counter()
    for record in attempts:
        total.update(record.staleness)
    return dict(sorted(total.items()))


def measure_groups(fleet: Fleet, participation: result.ParticipationCounts) -> tuple[result.Group, ...]:
    """Return the shares of groups of clients: tenths of the fleet by speed, and the values of each label."""
    return tuple(_group(fleet, participation, name, members) for name, members in _members(fleet))


def _members(fleet: Fleet) -> Iterator[tuple[str, Clients]]:
    if fleet.num_clients >= _DECILES and np.ptp(fleet.speed) > 0.0:
        by_speed = np.argsort(fleet.speed, kind="stable")
        for number, members in enumerate(np.array_split(by_speed, _DECILES), 1):
            yield f"speed {number}/{_DECILES}", members
    for name, label in fleet.labels.items():
        for code, value in enumerate(label.values):
            yield f"{name}={value}", np.flatnonzero(label.codes == code)


def _group(fleet: Fleet, participation: result.ParticipationCounts, name: str, members: Clients) -> result.Group:
    assigned, merged, examples = participation.assigned, participation.merged, fleet.examples
    share_of_fleet = len(members) / fleet.num_clients
    share_of_merged = _share(merged, members)
    return result.Group(
        name=name,
        num_clients=len(members),
        share_of_fleet=share_of_fleet,
        share_of_examples=_share(examples, members),
        share_of_assigned=_share(assigned, members),
        share_of_merged=share_of_merged,
        share_of_merged_examples=_share(merged * examples, members),
        over=share_of_merged / share_of_fleet if share_of_fleet else 0.0,
    )


def _share(values: npt.NDArray[Any], members: Clients) -> float:
    total = float(values.sum())
    return float(values[members].sum()) / total if total else 0.0
