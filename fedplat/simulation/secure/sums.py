"""The updates of secure aggregations: encoded and masked by clients, added up by groups, and decoded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import numpy as np

from fedplat.aggregate import Accumulator, Contribution
from fedplat.errors import SecureAggregationError
from fedplat.job import JobSpec
from fedplat.job.secure import build_setup, mean_update, require_secure
from fedplat.model import Parameters
from fedplat.model.values import VectorValues
from fedplat.rounds import AssignmentId, Attempt, AttemptKey, JobState
from fedplat.rounds.events import UpdateRejected, UpdateReported
from fedplat.rounds.states import AttemptPhase, Reason
from fedplat.secure_aggregation import encoding
from fedplat.secure_aggregation.encoding import Decoded
from fedplat.secure_aggregation.setup import Setup
from fedplat.simulation.clients.device import DeviceAssignment
from fedplat.simulation.engines.interface import LocalUpdate
from fedplat.simulation.secure.groups import Masked, MaskedGroup, SecureProtocol, read_groups

_SECRETS, _ROUNDING = 11, 12


def setup_of(spec: JobSpec, key: AttemptKey, base_version: int, size: int) -> Setup:
    """Return the setup of an attempt; in a simulation, a version's number stands for its digest."""
    return build_setup(spec, key.job_id, key.round, key.number, f"version-{base_version}", size)


class MaskedUpdates:
    """The open secure aggregations of a job whose model has `size` floating-point entries.

    The secrets of clients, and the draws with which they round their updates and add their noise, follow from the seed:
    a simulation protects no one's data, and is repeatable.
    """

    def __init__(self, spec: JobSpec, size: int, seed: int, protocol: SecureProtocol) -> None:
        self._spec, self._size, self._seed, self._protocol = spec, size, seed, protocol
        self._groups: list[MaskedGroup] = []
        self._places: dict[str, tuple[int, int]] = {}
        self._received: dict[AssignmentId, Masked] = {}
        self._sums: dict[AttemptKey, dict[int, Masked]] = {}

    @property
    def file_bytes(self) -> int:
        """The size of a masked update; the same in all attempts."""
        return encoding.file_bytes(setup_of(self._spec, AttemptKey(self._spec.name, 1, 1), 0, self._size))

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
            return self._protocol.advertise(task.id, setup_of(self._spec, task.key, task.version, self._size), random)
        number, position = self._places[task.client_id]
        group = self._groups[number]
        if task.phase is AttemptPhase.SHARING:
            return self._protocol.share(task.id, group, position)
        step = self._protocol.confirm if task.phase is AttemptPhase.CONFIRMING else self._protocol.answer
        return step(task.id, group)

    def report(self, task: DeviceAssignment, trained: LocalUpdate) -> UpdateReported | UpdateRejected:
        """Return the report of an encoded and masked update, which has its weight and its metrics inside."""
        setup, random = setup_of(self._spec, task.key, task.version, self._size), self._random(_ROUNDING, task)
        update, num_examples, metrics = trained.update.to_vector(), trained.num_examples, trained.metrics
        try:
            vector = encoding.encode(setup.encoding, update, num_examples, metrics, random)
        except SecureAggregationError as exc:
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

    def fold_mean(self, accumulator: Accumulator, job: JobState, base: Parameters) -> Decoded:
        """Give the mean of the updates to the job's rule as the only one of an attempt; returns their sum."""
        assert job.attempt is not None
        decoded = self.decode(job.attempt)
        accumulator.fold(VectorValues(base, mean_update(self._spec, decoded)), Contribution(1.0))
        return decoded

    def decode(self, attempt: Attempt) -> Decoded:
        """Remove the masks from the sums of all groups, and return their total."""
        setup, sums = setup_of(self._spec, attempt.key, attempt.base_version, self._size), self._sums.pop(attempt.key)
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

    def _random(self, purpose: int, task: DeviceAssignment) -> Callable[[int], bytes]:
        return np.random.default_rng(np.random.SeedSequence([self._seed, purpose, task.client, task.number])).bytes
