"""What training keeps: the models that clients still train from, updates that may be folded again, and snapshots."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from fedplat import aggregate, rounds
from fedplat.model import ModelFile, Parameters, Values, Vector
from fedplat.simulation.engines.interface import Engine


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
