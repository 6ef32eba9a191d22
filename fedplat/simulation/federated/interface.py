"""The driver's interface to training, and an implementation without models, to study scheduling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from typing_extensions import override

from fedplat.rounds import AttemptKey, JobState, ModelVersion
from fedplat.rounds.commands import Commit, Fold, Restart, RunWarmStart
from fedplat.rounds.events import (
    AggregationFailed,
    AssignmentFailed,
    AttemptAggregated,
    UpdateRejected,
    UpdateReported,
)
from fedplat.rounds.states import AttemptKind
from fedplat.simulation.clients.device import DeviceAssignment, Sizes

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

    def warm_start(self, command: RunWarmStart) -> AttemptAggregated:
        """Compute version 1 without clients. Only Flower apps do: `unsupported.check` refuses other such jobs."""
        raise AssertionError(command)

    def settle(self, key: AttemptKey, version: int | None) -> Mapping[str, float]:
        """End an attempt, with its version or None; returns the version's evaluation, empty without one."""
        ...


def make_version_zero(sizes: Sizes) -> ModelVersion:
    """Return the record of the initial model."""
    return ModelVersion(version=0, round=0, attempt=0, digest="version-0", size_bytes=int(sizes.model))


class NoTraining(TrainingModel):
    """No training: clients report the fleet's numbers of examples, and versions have no model."""

    one_at_a_time = False

    def __init__(self, model_bytes: float) -> None:
        self._sizes = Sizes(model_bytes, model_bytes)

    @property
    @override
    def sizes(self) -> Sizes:
        return self._sizes

    @override
    def first_version(self) -> ModelVersion:
        return make_version_zero(self.sizes)

    @override
    def expect(self, tasks: Sequence[DeviceAssignment]) -> None:
        pass

    @override
    def report(self, task: DeviceAssignment) -> Report:
        update_bytes = int(self.sizes.update) if task.kind is AttemptKind.TRAIN else 0
        return UpdateReported(task.key, task.client_id, "update", task.examples, update_bytes=update_bytes)

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
