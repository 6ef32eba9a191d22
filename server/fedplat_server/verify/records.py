"""What `verify` reads, and what it says.

Rows hold what the columns hold: a state that no table of states knows must become a finding, not an exception.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from fedplat.job import JobSpec
from fedplat.rounds.states import AttemptKind, JobStatus
from fedplat_server.audit import AuditHead, AuditRow


@dataclasses.dataclass(frozen=True, slots=True)
class JobRow:
    """A row of `jobs`."""

    job_id: str
    job_file: str
    status: str
    round: int
    latest_version: int
    revision: int
    privacy: Mapping[str, object] | None


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptRow:
    """A row of `attempts`."""

    job_id: str
    round: int
    number: int
    kind: str
    phase: str
    base_version: int
    minimum: int
    ended_unix_s: float | None
    history_removed_unix_s: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class AssignmentRow:
    """A row of `assignments`. `round` and `number` are those of the attempt that it was made in."""

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

    @property
    def place(self) -> tuple[int, int]:
        """Round and number of the attempt that has its update, or would have."""
        if self.into_round is None or self.into_number is None:
            return self.round, self.number
        return self.into_round, self.into_number


@dataclasses.dataclass(frozen=True, slots=True)
class VersionRow:
    """A row of `model_versions`."""

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

    @property
    def is_aggregate(self) -> bool:
        """Whether a round of clients made it."""
        return self.round > 0

    @property
    def is_made(self) -> bool:
        """Whether an attempt made it: it is neither the initial model nor a rollback's."""
        return self.version > 0 and self.restored_from is None


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerRow:
    """A row of `ledger`."""

    version: int
    round: int
    mechanism: str


@dataclasses.dataclass(frozen=True, slots=True)
class HistoryRow:
    """A row of `history`."""

    sequence: int
    entity: str
    from_state: str
    to_state: str
    round: int
    attempt: int
    client_id: str


@dataclasses.dataclass(frozen=True)
class Job:
    """A job with its versions, ledger and attempts by number, and the history of the job itself and of its versions.

    `spec` is None when this version of fedplat cannot read the job file: `unreadable` says why.
    """

    row: JobRow
    spec: JobSpec | None
    unreadable: str
    versions: tuple[VersionRow, ...]
    ledger: tuple[LedgerRow, ...]
    attempts: tuple[AttemptRow, ...]
    history: tuple[HistoryRow, ...]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """An attempt with its assignments, its history and theirs, and the version that it made.

    `made` are the assignments that were made in it; `assignments` those whose update it has, if they have one: without
    those that a later attempt took over, and with those that it took over itself. `seen_unix_s` is a moment before it
    was read.
    """

    job: JobRow
    spec: JobSpec | None
    row: AttemptRow
    version: VersionRow | None
    made: tuple[AssignmentRow, ...]
    assignments: tuple[AssignmentRow, ...]
    history: tuple[HistoryRow, ...]
    seen_unix_s: float

    @property
    def releases(self) -> bool:
        """Whether what it commits is a private release."""
        return self.spec is not None and self.spec.privacy is not None and self.row.kind == AttemptKind.TRAIN

    @property
    def has_cohort(self) -> bool:
        """Whether clients take part in it; they do not in a warm start."""
        return self.row.kind != AttemptKind.WARM_START

    @property
    def carries(self) -> bool:
        """Whether clients may go on working when it has ended."""
        return (
            self.spec is not None
            and self.spec.buffered is not None
            and self.row.kind == AttemptKind.TRAIN
            and self.job.status == JobStatus.RUNNING
        )


@dataclasses.dataclass(frozen=True)
class Strays:
    """History that belongs to no attempt."""

    job: JobRow
    history: tuple[HistoryRow, ...]


@dataclasses.dataclass(frozen=True)
class Turns:
    """In which rounds some clients took part in a job that limits that; each with all of its rounds, in order."""

    job: JobRow
    spec: JobSpec
    rounds: Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class AuditPart:
    """Some rows of the audit log, and where it stood before them."""

    before: AuditHead
    rows: tuple[AuditRow, ...]


@dataclasses.dataclass(frozen=True)
class AuditEnd:
    """Where the rows of the audit log end, and where its head says that it ends; None when that is gone."""

    end: AuditHead
    head: AuditHead | None


Unit = Job | Attempt | Strays | Turns | AuditPart | AuditEnd
"""What is read, and checked, at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where something is wrong; what does not apply is None."""

    job: str | None = None
    round: int | None = None
    attempt: int | None = None
    client: str | None = None
    version: int | None = None

    def __str__(self) -> str:
        names = (field.name for field in dataclasses.fields(self))
        return " ".join(f"{name} {value}" for name in names if (value := getattr(self, name)) is not None)


@dataclasses.dataclass(frozen=True, slots=True)
class Wrong:
    """What a check found."""

    place: Place
    found: str
    expected: str


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A broken invariant: where, what was found instead of what, and what an operator does about it.

    `check` names the function that found it.
    """

    invariant: str
    check: str
    place: Place
    found: str
    expected: str
    advice: str

    def __str__(self) -> str:
        where = f"{self.place}: " if str(self.place) else ""
        return f"{self.invariant}: {where}{self.found}; expected {self.expected}. {self.advice}"


@dataclasses.dataclass
class Report:
    """The outcome. `notes` are worth knowing and break nothing; `checked` counts what was looked at, by name."""

    findings: list[Finding] = dataclasses.field(default_factory=list[Finding])
    notes: list[str] = dataclasses.field(default_factory=list[str])
    checked: Counter[str] = dataclasses.field(default_factory=Counter[str])
