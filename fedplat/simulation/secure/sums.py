"""Secure aggregations in virtual time: their steps, and the updates, encoded, masked, added up and decoded.

A client receives the input of a step, computes, and sends its message: `latency_s + bytes / download`, the seconds of
`groups.StepCost`, and `latency_s + bytes / upload`. A share `drops_out` of clients goes offline in each step, at a
uniformly drawn moment of it. As everywhere, a masked update of at most 256 KiB is part of the report.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from fedplat import aggregate, errors, model, wire
from fedplat.job import JobSpec
from fedplat.job.secure import build_setup, mean_update, require_secure
from fedplat.model.turns import Turn, spread_vector
from fedplat.model.values import VectorValues
from fedplat.rounds import AssignmentId, Attempt, AttemptKey, JobState
from fedplat.rounds.events import UpdateRejected, UpdateReported
from fedplat.rounds.states import AssignmentState, AttemptPhase, Reason
from fedplat.secure_aggregation import encoding
from fedplat.secure_aggregation.encoding import Decoded
from fedplat.secure_aggregation.setup import Setup
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.device import DeviceAssignment
from fedplat.simulation.clients.distributions import hash_uniform
from fedplat.simulation.engines.interface import LocalUpdate
from fedplat.simulation.secure import groups
from fedplat.simulation.secure.groups import GroupCosts, Masked, MaskedGroup, SecureProtocol, StepCost, read_groups

_SECRETS, _ROUNDING = 11, 12


def setup_of(spec: JobSpec, key: AttemptKey, base_version: int, size: int) -> Setup:
    """Return the setup of an attempt; in a simulation, a version's number stands for its digest."""
    return build_setup(spec, key.job_id, key.round, key.number, f"version-{base_version}", size)


class MaskedUpdates:
    """The open secure aggregations of a job with updates of the model of `schema`.

    The secrets of clients, and the draws with which they round their updates and add their noise, follow from the seed:
    a simulation protects no one's data, and is repeatable.
    """

    def __init__(self, spec: JobSpec, schema: model.Schema, seed: int, protocol: SecureProtocol) -> None:
        self._spec, self._schema, self._seed, self._protocol = spec, schema, seed, protocol
        self._groups: list[MaskedGroup] = []
        self._places: dict[str, tuple[int, int]] = {}
        self._received: dict[AssignmentId, Masked] = {}
        self._sums: dict[AttemptKey, dict[int, Masked]] = {}

    def file_bytes(self, round: int) -> int:
        """Return the size of a masked update; the same in all attempts at a round."""
        return encoding.file_bytes(self._setup_of(AttemptKey(self._spec.name, round, 1), 0))

    def begin_step(self, attempt: Attempt) -> None:
        """Give clients what they need for the phase that an attempt has begun."""
        self._groups = read_groups(require_secure(self._spec), attempt)
        self._places = {
            each.client_id: (number, position)
            for number, group in enumerate(self._groups)
            for position, each in enumerate(group.assignments)
        }

    def take_step(self, task: DeviceAssignment) -> bytes:
        """Return the message of a client in its phase."""
        if task.phase is AttemptPhase.ADVERTISING:
            random = self._random(_SECRETS, task)
            return self._protocol.advertise(task.id, self._setup_of(task.key, task.version), random)
        number, position = self._places[task.client_id]
        group = self._groups[number]
        if task.phase is AttemptPhase.SHARING:
            return self._protocol.share(task.id, group, position)
        step = self._protocol.confirm if task.phase is AttemptPhase.CONFIRMING else self._protocol.answer
        return step(task.id, group)

    def report(self, task: DeviceAssignment, trained: LocalUpdate) -> UpdateReported | UpdateRejected:
        """Return the report of an encoded and masked update, which has its weight and its metrics inside."""
        setup, random = self._setup_of(task.key, task.version), self._random(_ROUNDING, task)
        update = self._turn(task.key).leave_out(trained.update).to_vector()
        try:
            vector = encoding.encode(setup.encoding, update, trained.num_examples, trained.metrics, random)
        except errors.SecureAggregationError as exc:
            return UpdateRejected(task.key, task.client_id, Reason.REJECTED_NONFINITE, str(exc))
        np.bitwise_and(vector, np.uint32(2**setup.encoding.modulus - 1), out=vector)
        number, position = self._places[task.client_id]
        self._protocol.mask(task.id, self._groups[number], position, vector)
        self._received[task.id] = vector
        digest = f"update {task.client} {task.number}"
        return UpdateReported(task.key, task.client_id, digest, 1.0, update_bytes=encoding.file_bytes(setup))

    def fold(self, key: AttemptKey, assignment: AssignmentId) -> None:
        """Add a received update to the sum of its group."""
        vector = self._received.pop(assignment)
        number, _ = self._places[assignment.client_id]
        sums = self._sums.setdefault(key, {})
        if number in sums:
            np.add(sums[number], vector, out=sums[number])
        else:
            sums[number] = vector

    def fold_mean(self, accumulator: aggregate.Accumulator, job: JobState, base: model.Parameters) -> Decoded:
        """Give the mean of the updates to the job's rule as the only one of an attempt; returns their sum."""
        assert job.attempt is not None
        decoded = self.decode(job.attempt)
        uploaded = self._turn(job.attempt.key).select_uploaded(self._schema)
        mean = spread_vector(mean_update(self._spec, decoded), uploaded, self._schema)
        accumulator.fold(VectorValues(base, mean), aggregate.Contribution(1.0))
        return decoded

    def decode(self, attempt: Attempt) -> Decoded:
        """Remove the masks from the sums of all groups, and return their total."""
        setup, sums = self._setup_of(attempt.key, attempt.base_version), self._sums.pop(attempt.key)
        decoded: list[Decoded] = []
        for number, group in enumerate(read_groups(setup.options, attempt)):
            self._protocol.remove_masks(setup, group, sums[number])
            decoded.append(encoding.decode(setup.encoding, sums[number], len(group.survivors.survivors)))
        return functools.reduce(encoding.merge, decoded)

    def forget(self, assignment: AssignmentId) -> None:
        """Forget the secrets of a client, and its update if that is not in a sum yet."""
        self._protocol.forget(assignment)
        self._received.pop(assignment, None)

    def settle(self, key: AttemptKey, folded: Iterable[AssignmentId]) -> None:
        """Forget the sums of an attempt that has ended, and the secrets of the clients whose updates were in them."""
        self._sums.pop(key, None)
        for assignment in folded:
            self._protocol.forget(assignment)

    def _turn(self, key: AttemptKey) -> Turn:
        return self._spec.turn(key.round)

    def _setup_of(self, key: AttemptKey, base_version: int) -> Setup:
        size = self._turn(key).select_uploaded(self._schema).num_floating
        return setup_of(self._spec, key, base_version, size)

    def _random(self, purpose: int, task: DeviceAssignment) -> Callable[[int], bytes]:
        return np.random.default_rng(np.random.SeedSequence([self._seed, purpose, task.client, task.number])).bytes


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
    """Plans the steps of the secure attempts of a job whose updates have `count_entries(round)` entries."""

    def __init__(self, spec: JobSpec, fleet: Fleet, count_entries: Callable[[int], int], seed: int) -> None:
        self._spec, self._fleet, self._count_entries, self._seed = spec, fleet, count_entries, seed

    def plan_first(self, task: DeviceAssignment) -> SecureStep:
        """Return the step after the training; it is part of the plan of the assignment."""
        setup = self._setup_of(task.key, task.version)
        return SecureStep(task, AttemptPhase.ADVERTISING, groups.advertising_cost(setup), task.report_at)

    def plan(self, attempt: Attempt, tasks: Mapping[int, DeviceAssignment], now: float) -> Iterator[SecureStep]:
        """Yield the steps of the clients that take part in the phase that an attempt has begun, if they are online."""
        setup = self._setup_of(attempt.key, attempt.base_version)
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
        setup = self._setup_of(attempt.key, attempt.base_version)
        return sum(
            GroupCosts(setup, group.graph, ()).server_s(group.survivors, len(group.confirmed))
            for group in read_groups(require_secure(self._spec), attempt)
        )

    def _setup_of(self, key: AttemptKey, base_version: int) -> Setup:
        return setup_of(self._spec, key, base_version, self._count_entries(key.round))

    def _plan(self, task: DeviceAssignment, phase: AttemptPhase, cost: StepCost, now: float) -> SecureStep:
        fleet, client = self._fleet, task.client
        latency_s = float(fleet.latency_s[client])
        computed_at = now + latency_s + cost.bytes_down / float(fleet.download[client]) + cost.cpu_s
        at = computed_at + latency_s + cost.bytes_up / float(fleet.upload[client])
        uploads = phase is AttemptPhase.COLLECTING and cost.bytes_up > wire.INLINE_BYTES
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
