"""Simulations whose events are recorded."""

from __future__ import annotations

from collections.abc import Sequence

from fedplat.rounds import Proposal
from fedplat.rounds.events import Event
from fedplat.simulation.run import Hooks, Simulation, run

Batch = tuple[Sequence[Event], float, Proposal]


def record(simulation: Simulation) -> list[Batch]:
    batches: list[Batch] = []
    run(simulation, Hooks(trace=lambda events, now, proposal: batches.append((tuple(events), now, proposal))))
    return batches
