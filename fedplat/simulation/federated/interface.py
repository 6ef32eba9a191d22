"""The driver's interface to training, and an implementation without models, to study scheduling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from typing_extensions import override

from fedplat.rounds import Assignment, Attempt, AttemptKey, JobState, ModelVersion
from fedplat.rounds.commands import Commit, Fold, Restart, RunWarmStart
from fedplat.rounds.events import AggregationFailed, AssignmentFailed, AttemptAggregated, UpdateRejected, UpdateReported
from fedplat.simulation.clients.device import DeviceAssignment, Sizes
from fedplat.simulation.secure.groups import stand_in

Report = UpdateReported | UpdateRejected


class TrainingModel(Protocol):
    """The models and updates of a job, as the driver uses them."""

    one_at_a_time: bool
    """True if the coordinator must handle each report before the next one is computed, because a report is costly."""

    @property
    def sizes(self) -> Sizes:
        """The current sizes of downloads and uploads."""
        ...

    def first_version(self) -> ModelVersion:
        """Return the record of the initial model, and make the model available to clients."""
        ...

    def track(self, assignment: Assignment) -> None:
        """Record a changed assignment: its base version is kept while it is open, since its client may reclaim it."""
        ...

    def expect(self, tasks: Sequence[DeviceAssignment]) -> None:
        """Begin tasks that are expected to report in time and to matter, as far as this can be predicted."""
        ...

    def report(self, task: DeviceAssignment) -> Report | AssignmentFailed:
        """Return the report of a client, the reason why the server rejects it, or the failure that it reports."""
        ...

    def drop(self, task: DeviceAssignment) -> None:
        """Discard a task whose report is not needed any more or was not accepted."""
        ...

    def forget(self, key: AttemptKey, client_id: str) -> None:
        """Discard an accepted update that will not be in a version; `key` is the attempt that assigned it."""
        ...

    def fold(self, command: Fold) -> AggregationFailed | None:
        """Add an accepted update to its attempt; returns a failure if the rule refuses the update."""
        ...

    def restart(self, command: Restart) -> None:
        """Undo all folds of an attempt; later commands fold its updates again, except those that were forgotten."""
        ...

    def commit(self, command: Commit, job: JobState) -> AttemptAggregated | AggregationFailed:
        """Compute the version of an attempt."""
        ...

    @property
    def num_entries(self) -> int:
        """The number of floating-point entries of the model, of a job with secure aggregation."""
        raise AssertionError

    def begin_step(self, attempt: Attempt) -> None:
        """Give clients what they need for the phase of a secure aggregation that an attempt has begun."""
        raise AssertionError(attempt)

    def take_step(self, task: DeviceAssignment) -> bytes:
        """Return the message that a client sends in its phase of a secure aggregation; a report is another call."""
        raise AssertionError(task)

    def warm_start(self, command: RunWarmStart) -> AttemptAggregated:
        """Compute version 1 without clients. Only Flower apps do; `feasible.check_supported` refuses others."""
        raise AssertionError(command)

    def settle(self, key: AttemptKey, version: int | None) -> Mapping[str, float]:
        """End an attempt, with its version or None; returns the version's evaluation, empty without one."""
        ...


def make_version_zero(sizes: Sizes) -> ModelVersion:
    """Return the record of the initial model."""
    return ModelVersion(version=0, round=0, attempt=0, digest="version-0", size_bytes=int(sizes.model))


def count_entries(model_bytes: float) -> int:
    """Return the number of float32 entries of a model of this size."""
    return max(1, int(model_bytes) // 4)


class NoTraining(TrainingModel):
    """No training: clients report the fleet's numbers of examples, and versions have no model.

    With secure aggregation, a masked update has `masked_bytes`.
    """

    one_at_a_time = False

    def __init__(self, model_bytes: float, masked_bytes: int | None = None) -> None:
        self._sizes = Sizes(model_bytes, model_bytes if masked_bytes is None else masked_bytes)
        self._is_secure = masked_bytes is not None

    @property
    @override
    def sizes(self) -> Sizes:
        return self._sizes

    @override
    def first_version(self) -> ModelVersion:
        return make_version_zero(self.sizes)

    @override
    def track(self, assignment: Assignment) -> None:
        pass

    @override
    def expect(self, tasks: Sequence[DeviceAssignment]) -> None:
        pass

    @override
    def report(self, task: DeviceAssignment) -> Report:
        update_bytes = int(self.sizes.update) if task.trains else 0
        num_examples = 1.0 if self._is_secure and task.trains else task.examples
        return UpdateReported(task.key, task.client_id, "update", num_examples, update_bytes=update_bytes)

    @property
    @override
    def num_entries(self) -> int:
        return count_entries(self._sizes.model)

    @override
    def begin_step(self, attempt: Attempt) -> None:
        pass

    @override
    def take_step(self, task: DeviceAssignment) -> bytes:
        return stand_in(task.client, task.phase)

    @override
    def drop(self, task: DeviceAssignment) -> None:
        pass

    @override
    def forget(self, key: AttemptKey, client_id: str) -> None:
        pass

    @override
    def fold(self, command: Fold) -> AggregationFailed | None:
        pass

    @override
    def restart(self, command: Restart) -> None:
        pass

    @override
    def commit(self, command: Commit, job: JobState) -> AttemptAggregated | AggregationFailed:
        number = job.latest.version + 1
        version = ModelVersion(
            version=number,
            round=command.key.round,
            attempt=command.key.number,
            digest=f"version-{number}",
            size_bytes=int(self.sizes.model),
            num_updates=command.num_updates,
        )
        return AttemptAggregated(command.key, version)

    @override
    def settle(self, key: AttemptKey, version: int | None) -> Mapping[str, float]:
        return {}
