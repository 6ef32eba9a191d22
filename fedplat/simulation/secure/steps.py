"""The steps of secure aggregation in virtual time: when each client has taken one, what it cost, and who drops out.

A client receives the input of a step, computes, and sends its message: `latency_s + bytes / download`, the seconds of
`costs`, and `latency_s + bytes / upload`. A share `drops_out` of clients goes offline in each step, at a uniformly
drawn moment of it. As everywhere, a masked update of at most 256 KiB is part of the report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from fedplat.job import JobSpec
from fedplat.job.secure import require_secure
from fedplat.rounds import Attempt
from fedplat.rounds.states import AssignmentState, AttemptPhase
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.device import DeviceAssignment
from fedplat.simulation.clients.distributions import hash_uniform
from fedplat.simulation.secure import costs
from fedplat.simulation.secure.costs import GroupCosts, StepCost
from fedplat.simulation.secure.groups import MaskedGroup, read_groups
from fedplat.simulation.secure.sums import setup_of
from fedplat.wire import INLINE_BYTES

_TAKES_PART = {
    AttemptPhase.SHARING: AssignmentState.ADVERTISED,
    AttemptPhase.COLLECTING: AssignmentState.SHARED,
    AttemptPhase.CONFIRMING: AssignmentState.REPORTED,
    AttemptPhase.UNMASKING: AssignmentState.REPORTED,
}
"""The state of the clients that take part in a phase, as it begins."""
STEPS = (AttemptPhase.ADVERTISING, *_TAKES_PART)
"""The phases in which clients take a step, in order."""


@dataclasses.dataclass(frozen=True, slots=True)
class SecureStep:
    """A client's step in a phase.

    Its message arrives at `at`, unless the client goes offline at `gone_at` (infinite: it does not). `uploads_at` is
    infinite if the message is not uploaded before it is sent.
    """

    task: DeviceAssignment
    phase: AttemptPhase
    cost: StepCost
    at: float
    uploads_at: float = np.inf
    gone_at: float = np.inf


class StepPlanner:
    """Plans the steps of the secure attempts of a job whose model has `size` floating-point entries."""

    def __init__(self, spec: JobSpec, fleet: Fleet, size: int, seed: int) -> None:
        self._spec, self._fleet, self._size, self._seed = spec, fleet, size, seed

    def plan_first(self, task: DeviceAssignment) -> SecureStep:
        """Return the step after the training; it is part of the plan of the assignment."""
        setup = setup_of(self._spec, task.key, task.version, self._size)
        return SecureStep(task, AttemptPhase.ADVERTISING, costs.advertise(setup), task.report_at)

    def plan(self, attempt: Attempt, tasks: Mapping[int, DeviceAssignment], now: float) -> Iterator[SecureStep]:
        """Yield the steps of the clients that take part in the phase that an attempt has begun, if they are online."""
        setup = setup_of(self._spec, attempt.key, attempt.base_version, self._size)
        for group in read_groups(require_secure(self._spec), attempt):
            costs_of = GroupCosts(setup, group.graph, [each.client_id for each in group.assignments])
            for position, assignment in enumerate(group.assignments):
                task = tasks.get(int(assignment.client_id))
                takes_part = assignment.state is _TAKES_PART[attempt.phase]
                if takes_part and task is not None and task.key == attempt.key:
                    yield self._plan(task, attempt.phase, _cost(costs_of, attempt.phase, group, position), now)

    def phase_after(self, phase: AttemptPhase) -> AttemptPhase:
        """Return the phase of a client's next step."""
        confirms = require_secure(self._spec).confirm
        after = STEPS[STEPS.index(phase) + 1]
        return after if confirms or after is not AttemptPhase.CONFIRMING else AttemptPhase.UNMASKING

    def server_s(self, attempt: Attempt) -> float:
        """Return the seconds of the server for the sums of an attempt."""
        setup = setup_of(self._spec, attempt.key, attempt.base_version, self._size)
        return sum(
            GroupCosts(setup, group.graph, ()).server_s(group.survivors, len(group.confirmed))
            for group in read_groups(require_secure(self._spec), attempt)
        )

    def _plan(self, task: DeviceAssignment, phase: AttemptPhase, cost: StepCost, now: float) -> SecureStep:
        fleet, client = self._fleet, task.client
        latency_s = float(fleet.latency_s[client])
        computed_at = now + latency_s + cost.bytes_down / float(fleet.download[client]) + cost.cpu_s
        at = computed_at + latency_s + cost.bytes_up / float(fleet.upload[client])
        uploads = phase is AttemptPhase.COLLECTING and cost.bytes_up > INLINE_BYTES
        gone_at = np.inf
        if fleet.options.drops_out and self._draw(task, phase, 0) < fleet.options.drops_out:
            gone_at = now + (at - now) * self._draw(task, phase, 1)
        return SecureStep(task, phase, cost, at, computed_at if uploads else np.inf, gone_at)

    def _draw(self, task: DeviceAssignment, phase: AttemptPhase, draw: int) -> float:
        purpose = 2 * STEPS.index(phase) + draw
        return float(hash_uniform(self._seed, np.array([task.client]), np.array([task.number]), purpose)[0])


def _cost(group_costs: GroupCosts, phase: AttemptPhase, group: MaskedGroup, position: int) -> StepCost:
    match phase:
        case AttemptPhase.SHARING:
            return group_costs.share(position)
        case AttemptPhase.COLLECTING:
            return group_costs.mask(position, group.senders)
        case AttemptPhase.CONFIRMING:
            return group_costs.confirm(group.survivors)
        case _:
            return group_costs.answer(position, group.survivors, group.confirmed)
