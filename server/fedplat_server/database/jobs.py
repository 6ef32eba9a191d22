"""Records of what is stored of a job: the job, its attempts, its model versions and its history."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fedplat.rounds import AttemptKey, HistoryRow, JobState, ModelVersion
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase


@dataclasses.dataclass(frozen=True, slots=True)
class JobRecord:
    """A job: the coordinator's state of it, with its job file and the time of its creation."""

    state: JobState
    job_file: str
    created_unix_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Staleness:
    """How many versions behind the updates of an attempt were: mean and maximum."""

    mean: float = 0.0
    most: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptRecord:
    """An attempt with the counts of its assignments; `ended_unix_s` is None while it is open.

    An assignment counts for the attempt that has taken its update in; until then, for the one in which it was made.
    `update_bytes` is the size of all reported updates, `largest_norm` the largest of their norms.
    """

    key: AttemptKey
    kind: AttemptKind
    phase: AttemptPhase
    reason: str
    base_version: int
    goal: int
    minimum: int
    target: int
    opened_unix_s: float
    ended_unix_s: float | None
    metrics: Mapping[str, float]
    counts: Mapping[AssignmentState, int]
    update_bytes: int
    staleness: Staleness = Staleness()
    largest_norm: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class VersionRecord:
    """A model version with its metrics by the server's evaluator.

    `model_removed_unix_s` is when the files of the model and of its delta were removed, `state_removed_unix_s` when
    that of the rule's state was. None: they are kept, if there ever were any.
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
    """Which versions of a job keep their files; version 0, the latest, and those that clients work with always do.

    Models from version `models_from` on, and each whose number is a multiple of `every` (0: none); states from version
    `states_from` on.
    """

    models_from: int = 0
    every: int = 0
    states_from: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Removable:
    """A version with files that may be removed: the model's with its delta, or that of the rule's state, or both."""

    version: ModelVersion
    model: bool
    state: bool
