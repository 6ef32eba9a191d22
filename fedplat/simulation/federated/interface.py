"""The driver's interface to training, what training keeps, and an implementation without models."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from fedplat import aggregate, rounds
from fedplat.model import ModelFile, Parameters, Values, Vector
from fedplat.rounds import Assignment, Attempt, AttemptKey, JobState, ModelVersion
from fedplat.rounds.commands import Commit, Fold, Restart, RunWarmStart
from fedplat.rounds.events import AggregationFailed, AssignmentFailed, AttemptAggregated, UpdateRejected, UpdateReported
from fedplat.simulation.clients.device import DeviceAssignment, Sizes
from fedplat.simulation.engines.interface import Engine
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

    def update_bytes(self, round: int) -> float:
        """Return the size of an update in a round."""
        return self.sizes.update

    def num_entries(self, round: int) -> int:
        """Return the number of floating-point entries of an update in a round, of a job with secure aggregation."""
        raise AssertionError(round)

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

    @override
    def num_entries(self, round: int) -> int:
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


class BaseModels:
    """Publishes versions to an engine, and retires an earlier one when neither a task nor an open assignment has it.

    A server keeps the base version of an open assignment too: a client that was offline may reclaim it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._models: dict[int, Parameters] = {}
        self._num_tasks: Counter[int] = Counter()
        self._open: dict[int, set[rounds.AssignmentId]] = {}
        self.latest = 0

    def __getitem__(self, version: int) -> Parameters:
        return self._models[version]

    def to_dict(self) -> Mapping[int, Parameters]:
        """Return the models by version."""
        return dict(self._models)

    def commit(self, version: int, model: Parameters) -> None:
        """Publish the latest version. The one before is retired if it has no use any more."""
        before, self.latest = self.latest, version
        self._publish(version, model)
        self._retire_unused(before)

    def restore(self, latest: int, models: Mapping[int, Parameters]) -> None:
        """Publish the versions of a snapshot. The caller then begins the tasks in progress."""
        self.latest = latest
        for version, model in sorted(models.items()):
            self._publish(version, model)

    def track(self, assignment: rounds.Assignment) -> None:
        """Record whether an assignment is open; while results are replayed, before any version is published, too."""
        version = assignment.base_version
        if assignment.is_open:
            self._open.setdefault(version, set()).add(assignment.id)
        elif (same_base := self._open.get(version)) is not None:
            same_base.discard(assignment.id)
            if not same_base:
                del self._open[version]
                self._retire_unused(version)

    def begin_task(self, version: int) -> None:
        """Count a task that trains from a version, or scores it."""
        self._num_tasks[version] += 1

    def end_task(self, version: int) -> None:
        """Uncount a task whose update is part of a version or not needed."""
        self._num_tasks[version] -= 1
        self._retire_unused(version)

    def _publish(self, version: int, model: Parameters) -> None:
        self._models[version] = model
        self._engine.publish(version, model)

    def _retire_unused(self, version: int) -> None:
        if version == self.latest or self._num_tasks[version] or version in self._open or version not in self._models:
            return
        del self._models[version], self._num_tasks[version]
        self._engine.retire(version)


MEMORY_BYTES = 256 * 2**20
"""Bytes of updates that stay in memory."""


class UpdateRetention:
    """Stores the updates of open attempts. Encoded updates are small and always stay in memory."""

    def __init__(self, budget: int = MEMORY_BYTES) -> None:
        self._left = budget
        self._folder: Path | None = None
        self._number = 0

    def keep(self, values: Values) -> Values:
        """Return the same values, in memory or in a file."""
        if not isinstance(values, Parameters):
            return values
        size = values.schema.file_size_bytes
        if size <= self._left:
            self._left -= size
            return values
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedplat-updates-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._number += 1
        path = self._folder / f"{self._number}.safetensors"
        path.write_bytes(values.to_bytes())
        return ModelFile(path, values.schema)

    def drop(self, kept: Values) -> None:
        """Free values that `keep` returned."""
        if isinstance(kept, Parameters):
            self._left += kept.schema.file_size_bytes
        elif isinstance(kept, ModelFile):
            Path(kept.path).unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of a job after a commit, while no update is received or folded: a stopped run resumes from it.

    `models` are the latest version and those that clients in training began with; `step` is the size of the latest
    version's encoded step, if there is one. `state`, `scalars` and `memory` belong to the rule, `residuals` to the
    clients' codecs, and `client_states` are the client states.
    """

    version: int
    models: Mapping[int, Parameters]
    state: aggregate.State
    scalars: Mapping[str, float]
    memory: bytes
    residuals: Mapping[int, Vector]
    client_states: Mapping[int, Mapping[str, Parameters]]
    step: float | None
