"""What the driver asks for models, and the answer where scheduling alone is studied: there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fedplat.rounds import AttemptKey, JobState, ModelVersion
from fedplat.rounds.commands import Commit, Fold, Restart
from fedplat.rounds.events import AggregationFailed, AttemptAggregated, UpdateRejected, UpdateReported
from fedplat.rounds.states import AttemptKind
from fedplat.simulation.clients.device import DeviceAssignment, Sizes

Report = UpdateReported | UpdateRejected


class FederatedTraining(Protocol):
    """What the driver asks for models; it knows nothing else of them."""

    @property
    def one_at_a_time(self) -> bool:
        """Whether a report costs so much that it is asked for only once the earlier ones have been heard."""
        ...

    @property
    def sizes(self) -> Sizes:
        """What travels now."""
        ...

    def first_version(self) -> ModelVersion:
        """The initial model's."""
        ...

    def expect(self, tasks: Sequence[DeviceAssignment]) -> None:
        """These tasks will be reported in time, and their reports will matter, as far as can be known."""
        ...

    def report(self, task: DeviceAssignment) -> Report:
        """What a client reports, or why the server refuses it."""
        ...

    def drop(self, task: DeviceAssignment) -> None:
        """Nobody will ask for this task's report any more, or it was not accepted."""
        ...

    def forget(self, key: AttemptKey, client_id: str) -> None:
        """An update that was accepted, in the attempt that assigned it, will not be in a version."""
        ...

    def fold(self, command: Fold) -> AggregationFailed | None:
        """An accepted update is added to its attempt's, unless the rule refuses it."""
        ...

    def restart(self, command: Restart) -> None:
        """What was folded for an attempt is folded anew by what follows, but for what was forgotten."""
        ...

    def commit(self, command: Commit, job: JobState) -> AttemptAggregated | AggregationFailed:
        """The attempt's next version."""
        ...

    def settle(self, key: AttemptKey, version: int | None) -> Mapping[str, float]:
        """An attempt has ended, with this version or with none; returns the version's evaluation, if there is one."""
        ...


class Scheduling:
    """No training: clients report what the fleet says that they have, and versions are numbers."""

    one_at_a_time = False

    def __init__(self, model_bytes: float) -> None:
        self.sizes = Sizes(model_bytes, model_bytes)

    def first_version(self) -> ModelVersion:
        """See `FederatedTraining`."""
        return ModelVersion(version=0, round=0, attempt=0, digest="version-0", size_bytes=int(self.sizes.model))

    def expect(self, tasks: Sequence[DeviceAssignment]) -> None:
        """See `FederatedTraining`."""

    def report(self, task: DeviceAssignment) -> Report:
        """See `FederatedTraining`."""
        update_bytes = int(self.sizes.update) if task.kind is AttemptKind.TRAIN else 0
        return UpdateReported(task.key, task.client_id, "update", task.examples, update_bytes=update_bytes)

    def drop(self, task: DeviceAssignment) -> None:
        """See `FederatedTraining`."""

    def forget(self, key: AttemptKey, client_id: str) -> None:
        """See `FederatedTraining`."""

    def fold(self, command: Fold) -> AggregationFailed | None:
        """See `FederatedTraining`."""

    def restart(self, command: Restart) -> None:
        """See `FederatedTraining`."""

    def commit(self, command: Commit, job: JobState) -> AttemptAggregated | AggregationFailed:
        """See `FederatedTraining`."""
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

    def settle(self, key: AttemptKey, version: int | None) -> Mapping[str, float]:
        """See `FederatedTraining`."""
        return {}
