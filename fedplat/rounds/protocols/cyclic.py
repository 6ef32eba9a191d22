"""Cyclic weight transfer (`[mode] kind = "cyclic"`): the model goes from client to client, and each has one turn.

Each turn is an attempt with one client, and makes a version: so a turn is stored, retried and resumed like a round. A
cycle ends when `mode.clients` clients had their turn, or when those that are left do not come in time.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import msgspec
from msgspec import structs

from fedplat.job import JobSpec
from fedplat.modes import Cyclic
from fedplat.rounds import attempts, closing
from fedplat.rounds.commands import Context, Transition
from fedplat.rounds.demand import Demand, Gate
from fedplat.rounds.events import AttemptAggregated, CandidatesDrawn
from fedplat.rounds.protocols import averaging
from fedplat.rounds.protocols.base import AttemptSizes, RoundProtocol, register
from fedplat.rounds.records import Attempt, JobState
from fedplat.rounds.states import AssignmentState, AttemptKind

Turns = tuple[str, ...]
"""The clients that had their turn in the current cycle, in order: what such a job keeps."""


def turns_of(job: JobState) -> Turns:
    """Return the clients that had their turn in the current cycle, in order."""
    return cast(Turns, job.protocol) if isinstance(job.protocol, tuple) else ()


def _read_state(stored: object, spec: JobSpec) -> Turns:
    return msgspec.convert(stored or (), tuple[str, ...])


def _demand(job: JobState, attempt: Attempt) -> Demand | None:
    """Demand one client that had no turn in this cycle."""
    demand = averaging.demand_cohort(job, attempt)
    return dataclasses.replace(demand, gate=Gate(frozenset(turns_of(job)), None)) if demand is not None else None


def _on_drawn(job: JobState, attempt: Attempt, event: CandidatesDrawn, context: Context) -> Transition:
    """Give the client its turn. If those that are left did not come in time, the next cycle begins without them."""
    if event.client_ids or not turns_of(job):
        return attempts.assign_cohort(job, attempt, event, context)
    return Transition(closing.await_clients(structs.replace(job, protocol=None), context))


def _on_committed(job: JobState, event: AttemptAggregated) -> Transition:
    attempt, mode = job.attempt, cast(Cyclic, job.spec.mode)
    assert attempt is not None
    if attempt.kind is not AttemptKind.TRAIN:
        return Transition(job)
    merged = (each.client_id for each in attempt.assignments.values() if each.state is AssignmentState.MERGED)
    turns = (*turns_of(job), *merged)
    return Transition(structs.replace(job, protocol=turns if len(turns) < mode.clients else None))


CYCLIC = register(
    RoundProtocol(
        name="cyclic",
        write_state=lambda job: list(turns_of(job)) or None,
        read_state=_read_state,
        sizes=lambda job: AttemptSizes(1, 1, 1),
        demand=_demand,
        on_drawn=_on_drawn,
        on_committed=_on_committed,
    )
)
