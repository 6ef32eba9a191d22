"""The stored state of a job, as the checks read it.

Fields hold the database columns of the same names: states are text, so that an unknown one is a violation and not an
exception.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from fedplat.job import JobSpec
from fedplat.rounds.protocols.base import RoundProtocol, find_protocol
from fedplat.rounds.states import OPEN_PHASES, AttemptKind, JobStatus


@dataclasses.dataclass(frozen=True, slots=True)
class JobRow:
    """A row of a job."""

    job_id: str
    job_file: str
    status: str
    round: int
    latest_version: int
    revision: int
    privacy: Mapping[str, object] | None
    plugins: Sequence[object] | None = None
    protocol: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptRow:
    """A row of an attempt. `history_removed_unix_s`: when its history was removed."""

    job_id: str
    round: int
    number: int
    kind: str
    phase: str
    base_version: int
    minimum: int
    ended_unix_s: float | None
    history_removed_unix_s: float | None
    num_survivors: int = 0

    @property
    def is_open(self) -> bool:
        """True if the attempt has not ended."""
        return self.phase in OPEN_PHASES


@dataclasses.dataclass(frozen=True, slots=True)
class AssignmentRow:
    """A row of an assignment. `round` and `number` are those of the attempt in which it was made."""

    round: int
    number: int
    client_id: str
    state: str
    reason: str | None
    digest: str
    num_examples: float
    weight: float
    metrics: Mapping[str, float]
    took_s: float | None
    reported_revision: int | None
    deadline_unix_s: float
    update_bytes: int
    base_version: int
    staleness: int | None
    into_round: int | None
    into_number: int | None
    norm: float | None
    secure_group: int | None = None
    secure_position: int | None = None

    @property
    def counted_in(self) -> tuple[int, int]:
        """The round and number of the attempt that the update counts in."""
        if self.into_round is None or self.into_number is None:
            return self.round, self.number
        return self.into_round, self.into_number


@dataclasses.dataclass(frozen=True, slots=True)
class VersionRow:
    """A row of a model version. `..._removed_unix_s`: when its files were removed."""

    version: int
    round: int
    attempt: int
    digest: str
    size_bytes: int
    state_digest: str
    delta_digest: str
    delta_size_bytes: int
    delta_base: str
    num_updates: int
    total_weight: float
    restored_from: int | None
    model_removed_unix_s: float | None
    state_removed_unix_s: float | None
    is_held_by_clients: bool = False

    @property
    def is_aggregate(self) -> bool:
        """True if a round of clients made it."""
        return self.round > 0

    @property
    def is_made(self) -> bool:
        """True if an attempt made it: it is not the initial model, nor from a rollback."""
        return self.version > 0 and self.restored_from is None


@dataclasses.dataclass(frozen=True, slots=True)
class ReleaseRow:
    """A row of the privacy ledger: a private release, and its mechanism as JSON."""

    version: int
    round: int
    mechanism: str


@dataclasses.dataclass(frozen=True, slots=True)
class StepRow:
    """A row of the history: one transition of a job, an attempt, an assignment or a version."""

    sequence: int
    entity: str
    from_state: str
    to_state: str
    round: int
    attempt: int
    client_id: str


@dataclasses.dataclass(frozen=True)
class StoredJob:
    """A job with its versions, ledger rows and attempts in order, and the history of the job and of its versions.

    `spec` is None if the job file cannot be read; `unreadable` is the reason, and `is_foreign` is True if another
    release may be able to read it.
    """

    row: JobRow
    spec: JobSpec | None
    unreadable: str
    versions: tuple[VersionRow, ...]
    ledger: tuple[ReleaseRow, ...]
    attempts: tuple[AttemptRow, ...]
    history: tuple[StepRow, ...]
    is_foreign: bool = False

    @property
    def protocol(self) -> RoundProtocol:
        """The protocol of its training."""
        return find_protocol(self.spec, AttemptKind.TRAIN)


@dataclasses.dataclass(frozen=True)
class StoredAttempt:
    """An attempt with its assignments, the history of all of these, and the version that it made.

    `made` are the assignments made in it. `assignments` are those whose updates count in it: without those that a later
    attempt took over, and with those that it took over itself. `seen_unix_s` is a time before the attempt was read,
    and `num_messages` the number of stored messages of its secure aggregation.
    """

    job: JobRow
    spec: JobSpec | None
    row: AttemptRow
    version: VersionRow | None
    made: tuple[AssignmentRow, ...]
    assignments: tuple[AssignmentRow, ...]
    history: tuple[StepRow, ...]
    seen_unix_s: float
    num_messages: int = 0

    @property
    def protocol(self) -> RoundProtocol:
        """The protocol of attempts of its kind."""
        return find_protocol(self.spec, self.row.kind)

    @property
    def carries_over(self) -> bool:
        """True if its clients may continue to work after its end."""
        return self.protocol.carries_over and self.job.status == JobStatus.RUNNING


@dataclasses.dataclass(frozen=True)
class StrayHistory:
    """History rows without a stored attempt."""

    job: JobRow
    history: tuple[StepRow, ...]


@dataclasses.dataclass(frozen=True)
class ParticipationRounds:
    """The rounds, in order, in which clients of a job with participation limits took part, by client."""

    job: JobRow
    spec: JobSpec
    rounds: Mapping[str, tuple[int, ...]]


JobUnit = StoredJob | StoredAttempt | StrayHistory | ParticipationRounds
"""The unit that is read and checked at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """The location of a violation; parts that do not apply are None."""

    job: str | None = None
    round: int | None = None
    attempt: int | None = None
    client: str | None = None
    version: int | None = None

    def __str__(self) -> str:
        names = (field.name for field in dataclasses.fields(self))
        return " ".join(f"{name} {value}" for name in names if (value := getattr(self, name)) is not None)


@dataclasses.dataclass(frozen=True, slots=True)
class Violation:
    """A violation: what a check found, and what it expected instead."""

    place: Location
    found: str
    expected: str


def attempt_location(row: AttemptRow, client_id: str | None = None) -> Location:
    """Return the location of an attempt, or of an assignment in it."""
    return Location(row.job_id, row.round, row.number, client_id)


def version_location(job: StoredJob, version: VersionRow) -> Location:
    """Return the location of a version."""
    return Location(job.row.job_id, version=version.version)
