"""Small simulations with secure aggregation, whose protocol is observed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedplat.job import JobSpec
from fedplat.rounds import AssignmentId
from fedplat.secure_aggregation import encoding, unmasking
from fedplat.secure_aggregation.setup import Setup
from fedplat.simulation.federated.training import RealTraining
from fedplat.simulation.recording.result import Result
from fedplat.simulation.recording.statistics import RunStatistics
from fedplat.simulation.run import Hooks, Simulation, drive
from fedplat.simulation.secure.groups import Masked, MaskedGroup
from fedplat.simulation.secure.real import RealProtocol
from fedplat.simulation.secure.sums import SecureStep
from support.simulation.cases import job

UPDATES = {"clip_norm": 10.0, "max_examples": 20.0, "outlier_factor": 0.0, "max_weight_factor": 0.0}
SECURE: dict[str, Any] = {"bits": 24, "metrics": {"loss": [0.0, 100.0]}}
Bytes = tuple[int, int]
"""Bytes received and sent."""


def secure_job(goal: int = 8, rounds: int = 3, *, secure: dict[str, Any] | None = None, **sections: Any) -> JobSpec:
    updates = UPDATES | sections.pop("updates", {})
    return job(goal, rounds, updates=updates, secure_aggregation=SECURE | (secure or {}), **sections)


class ObservedProtocol(RealProtocol):
    """Remembers the updates before and after they are masked, their sums, and the sizes of all messages."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.inputs: dict[AssignmentId, Masked] = {}
        self.masked: dict[AssignmentId, Masked] = {}
        self.sums: list[tuple[MaskedGroup, Masked]] = []
        self.sizes: dict[tuple[AssignmentId, str], Bytes] = {}
        self._setup: Setup | None = None

    @override
    def advertise(self, assignment: AssignmentId, setup: Setup, random: Callable[[int], bytes]) -> bytes:
        self._setup = setup
        return self._measure(assignment, "ADVERTISING", setup.to_bytes(), super().advertise(assignment, setup, random))

    @override
    def share(self, assignment: AssignmentId, group: MaskedGroup, position: int) -> bytes:
        roster = unmasking.make_roster(self._members(group), position)
        return self._measure(assignment, "SHARING", roster, super().share(assignment, group, position))

    @override
    def mask(self, assignment: AssignmentId, group: MaskedGroup, position: int, vector: npt.NDArray[np.uint32]) -> None:
        self.inputs[assignment] = vector.copy()
        super().mask(assignment, group, position, vector)
        self.masked[assignment] = vector.copy()
        assert self._setup is not None
        held = unmasking.route_shares(group.graph, position, group.sent)
        self._measure(assignment, "COLLECTING", held, b"".join(encoding.write_file(self._setup, vector)))

    @override
    def confirm(self, assignment: AssignmentId, group: MaskedGroup) -> bytes:
        survivors = group.survivors.to_bytes()
        return self._measure(assignment, "CONFIRMING", survivors, super().confirm(assignment, group))

    @override
    def answer(self, assignment: AssignmentId, group: MaskedGroup) -> bytes:
        request = unmasking.make_request(group.survivors, group.confirmations)
        return self._measure(assignment, "UNMASKING", request, super().answer(assignment, group))

    @override
    def remove_masks(self, setup: Setup, group: MaskedGroup, total: npt.NDArray[np.uint32]) -> None:
        super().remove_masks(setup, group, total)
        self.sums.append((group, total.copy()))

    def _measure(self, assignment: AssignmentId, phase: str, received: bytes, sent: bytes) -> bytes:
        self.sizes[assignment, phase] = len(received), len(sent)
        return sent


class ObservedStatistics(RunStatistics):
    """Remembers the steps that were counted."""

    steps: list[SecureStep]

    @override
    def on_step(self, step: SecureStep) -> None:
        self.steps.append(step)
        super().on_step(step)


def observe(simulation: Simulation, monkeypatch: Any) -> tuple[ObservedProtocol, list[SecureStep], Result]:
    """Run a simulation with its real protocol; returns that, the steps of its clients, and the result."""
    protocol, steps = ObservedProtocol(simulation.seed), list[SecureStep]()
    monkeypatch.setattr(ObservedStatistics, "steps", steps, raising=False)
    monkeypatch.setattr("fedplat.simulation.run.RunStatistics", ObservedStatistics)
    assert simulation.engine is not None
    assert simulation.initial is not None
    training = RealTraining(simulation.spec, simulation.engine, simulation.initial, simulation.seed, protocol)
    return protocol, steps, drive(simulation, simulation.fleet, training, Hooks())
