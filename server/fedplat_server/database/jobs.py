"""Stored records of a job: the job itself, its attempts, its model versions and its history."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fedplat.rounds import Attempt, AttemptKey, HistoryRow, JobState, ModelVersion
from fedplat.rounds.states import AssignmentState


@dataclasses.dataclass(frozen=True, slots=True)
class JobRecord:
    """A job: its state in the coordinator, its job file and the time of its creation.

    `problem` is the first mistake in the job file with the plugins that the process has; then the options of plugins in
    the state are `AbsentPlugin`.
    """

    state: JobState
    job_file: str
    created_unix_s: float
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptFilter:
    """The attempts of a list: those of a job, only those at one round if it is not 0, and in which order.

    Abandoned attempts are included only with `all_attempts`.
    """

    job_id: str
    all_attempts: bool = False
    round: int = 0
    newest_first: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Staleness:
    """The staleness of an attempt's updates in versions: mean and maximum."""

    mean: float = 0.0
    most: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """The numbers of the assignments that count for an attempt.

    An assignment counts for the attempt that its update was folded into; until then, for the attempt that created it.
    `update_bytes` is the total size of the reported updates, `largest_norm` the largest of their norms. Of the assigned
    clients `num_downloaded` received the model, and `num_trained` completed the training.
    """

    counts: Mapping[AssignmentState, int]
    update_bytes: int = 0
    staleness: Staleness = Staleness()
    largest_norm: float | None = None
    num_downloaded: int = 0
    num_trained: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptRecord:
    """An attempt, without its assignments, and what they add up to; `ended_unix_s` is None while it is open."""

    attempt: Attempt
    opened_unix_s: float
    ended_unix_s: float | None
    tally: Tally

    @property
    def key(self) -> AttemptKey:
        """The identity of the attempt."""
        return self.attempt.key


@dataclasses.dataclass(frozen=True, slots=True)
class VersionRecord:
    """A model version with its metrics by the server's evaluator.

    `model_removed_unix_s` is the time at which the files of the model and its delta were removed,
    `state_removed_unix_s` that at which the file of the rule's state was removed. None: the files are kept, if any.
    """

    version: ModelVersion
    created_unix_s: float
    metrics: Mapping[str, float]
    model_removed_unix_s: float | None = None
    state_removed_unix_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class HistoryRecord:
    """A row of the append-only history. Sequence numbers grow over all jobs, with gaps."""

    sequence: int
    unix_s: float
    row: HistoryRow


@dataclasses.dataclass(frozen=True, slots=True)
class RetainedVersions:
    """The versions of a job that keep their files.

    Models are kept from version `models_from` on, and of each version that is a multiple of `every` (0: of none);
    states are kept from version `states_from` on. The models of version 0, of the latest version, and of versions that
    open attempts and assignments are based on are always kept.
    """

    models_from: int = 0
    every: int = 0
    states_from: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Removable:
    """A version with removable files: those of its model and delta (`model`), that of the rule's state (`state`)."""

    version: ModelVersion
    model: bool
    state: bool


def spaced_positions(total: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced numbers from 1 to `total`, with both ends.

    >>> spaced_positions(10, 4)
    [1, 4, 7, 10]
    """
    if total <= most:
        return list(range(1, total + 1))
    last = max(most, 2) - 1
    return [1 + (index * (total - 1) + last // 2) // last for index in range(last + 1)]
