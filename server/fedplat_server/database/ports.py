"""The ports of the database: interfaces, one for each kind of record.

Those of clients and of events are in `client_ports.py` and `event_ports.py`.
Every method is one transaction. If a method has a parameter `audit`, the same transaction appends these entries to the
audit log. Changes of jobs, clients, operators, budgets and webhooks also append their events
(`records.events`). Every adapter passes the contract tests `tests/server/store/test_contract*.py`.

Errors are `StoreUnavailableError` (try again later), `StaleRevisionError`, `PopulationChangedError` and
`ParticipationError` (read again first) and `LeadershipLostError`; adapters translate those of a database library.
Stored times are seconds since 1970 on the wall clock. They are for people, and a restart restores the deadlines of
assignments from them; a running server makes no decisions based on them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from fedplat.rounds import (
    Assignment,
    AssignmentId,
    AttemptKey,
    Change,
    JobState,
    ModelVersion,
    Participation,
    rounds_to_recall,
)
from fedplat_server.database.assignments import (
    AssignmentFilter,
    AssignmentPlace,
    AssignmentRecord,
    LabelledCount,
    OutcomeCount,
)
from fedplat_server.database.client_ports import ClientStore, FleetStore
from fedplat_server.database.event_ports import EventStore, WebhookStore
from fedplat_server.database.jobs import (
    AttemptFilter,
    AttemptRecord,
    HistoryRecord,
    JobRecord,
    Removable,
    RetainedVersions,
    VersionRecord,
)
from fedplat_server.database.ledger import Budget, LedgerRow, Population
from fedplat_server.database.traces import EndedAttempt
from fedplat_server.records.audit import ALL_ROWS, AuditAction, AuditEntry, AuditFilter, AuditHead, AuditRow
from fedplat_server.records.lease import Candidate, Lease, LeaseReading
from fedplat_server.records.operators import OperatorRecord
from fedplat_server.storage.blob_backend import StoredDigests

BATCH = 1000
"""Maximum number of versions, attempts or digests in one transaction of the retention."""
MAX_TALLIED = 20_000
"""Maximum number of assignments, more or less, whose outcomes one sample of rounds counts."""
MAX_EXAMPLE_BYTES = 300
"""Maximum size of a client's text that is shown as an example."""
ROUNDS_PER_QUERY = 50
"""Number of rounds in one query for participations, which limits the memory for a job with many large rounds."""


class Store(Protocol):
    """A database: its ports, and operations that concern all of them."""

    @property
    def jobs(self) -> JobStore:
        """Jobs, their attempts, assignments, versions and history."""
        ...

    @property
    def assignments(self) -> AssignmentStore:
        """Lists and outcomes of assignments."""
        ...

    @property
    def clients(self) -> ClientStore:
        """Enrollment tokens and clients."""
        ...

    @property
    def fleet(self) -> FleetStore:
        """Traits of all clients, and availability by hour."""
        ...

    @property
    def operators(self) -> OperatorStore:
        """Operators."""
        ...

    @property
    def audit(self) -> AuditStore:
        """The audit log."""
        ...

    @property
    def ledger(self) -> LedgerStore:
        """Private releases and budgets."""
        ...

    @property
    def retention(self) -> RetentionStore:
        """The removal of old files and rows."""
        ...

    @property
    def events(self) -> EventStore:
        """Events."""
        ...

    @property
    def webhooks(self) -> WebhookStore:
        """Webhooks and the deliveries of events to them."""
        ...

    @property
    def traces(self) -> TraceStore:
        """The attempts that have ended, for their traces."""
        ...

    async def close(self) -> None:
        """Wait for running transactions and close all connections."""
        ...

    async def ping(self) -> None:
        """Wait until the database answers."""
        ...

    async def fence(self, term: int) -> None:
        """Reject every later write with `LeadershipLostError` once the lease has a term other than this.

        Raises that error at once if the term has already changed.
        """
        ...

    async def sever(self) -> None:
        """Abort all transactions; they and all later ones fail with `LeadershipLostError`."""
        ...


class JobStore(Protocol):
    """Jobs with their attempts, assignments, model versions and append-only history."""

    async def create_job(
        self,
        state: JobState,
        job_file: str,
        idempotency_key: str,
        audit: Sequence[AuditEntry] = (),
        expected: int | None = None,
    ) -> JobRecord:
        """Add a job (status DRAFT, version 0) with a history row and, if it is private, its calibrated `[privacy]`.

        If a job was created with this idempotency key, returns that job unchanged, and appends no entries. Raises
        `StoreError` if the `[privacy]` of a private job is not calibrated, and `PopulationChangedError` if its
        population is not at the `expected` revision (None: any).
        """
        ...

    async def change_job_file(self, job_id: str, job_file: str, audit: Sequence[AuditEntry] = ()) -> None:
        """Replace the file of an existing job, with its audit entries."""
        ...

    async def find_job(self, idempotency_key: str) -> JobRecord | None:
        """Return the job that was created with this key."""
        ...

    async def load_jobs(self, now: float = 0.0) -> list[JobRecord]:
        """Return every job in the order of creation, in its last state.

        It has its last attempt, the assignments of that attempt, those carried over (`rounds.rebuild_attempt`), its
        latest version, and the durations (`took_s`, oldest first, at most `reporting.MAX_DURATIONS`) of its
        assignments that were reported in attempts of kind TRAIN. The times of assignments (`…_at`) are on a clock whose
        current time is `now`, as accurate as the wall clock; all other times are zero or None.
        """
        ...

    async def save(
        self, changes: Sequence[Change], now: float, *, save_id: str = "", audit: Sequence[AuditEntry] = ()
    ) -> None:
        """Write changes in order, all or none: job, attempt, assignments, version, ledger and history.

        `now` is the current time on the clock of the changes. Raises `StoreError` if a version of a private job has no
        ledger row or if a rollback refers to removed files, `StaleRevisionError` if a job is not at the expected
        revision, and `ParticipationError` if a client of a private job would take part too often according to the
        stored assignments. After `StoreUnavailableError` the outcome is unknown until `find_last_save` answers.
        """
        ...

    async def find_last_save(self, job_id: str) -> str:
        """Return the id of the last save of a job. Waits for a save in progress, of any process."""
        ...

    async def find_assignment(self, token_hash: bytes) -> Assignment | None:
        """Return the assignment with this token, however old, with times of zero."""
        ...

    async def list_attempts(
        self, which: AttemptFilter, *, after: tuple[int, int] | None = None, limit: int | None = None
    ) -> list[AttemptRecord]:
        """Return the first `limit` attempts after a round and number, in the order of the filter."""
        ...

    async def count_attempts(self, which: AttemptFilter) -> int:
        """Return the number of attempts that satisfy a filter."""
        ...

    async def find_attempts(self, keys: Collection[AttemptKey]) -> dict[AttemptKey, AttemptRecord]:
        """Return the attempts with these keys, by key; unknown ones are left out."""
        ...

    async def sample_attempts(self, job_id: str, most: int) -> tuple[list[AttemptRecord], int]:
        """Return evenly spaced committed rounds of training, with the first and the last one, and their whole number.

        At most `most`, and fewer if their cohorts are so large that more than `MAX_TALLIED` assignments would be read.
        """
        ...

    async def list_participations(self, job_id: str, rounds: range) -> list[Participation]:
        """Return the assignments of a job's attempts to train in these rounds.

        They are ordered by round and attempt; within an attempt, by report, then those without a report.
        """
        ...

    async def find_version(self, job_id: str, version: int) -> ModelVersion | None:
        """Return the version of a job that has this number."""
        ...

    async def list_versions(self, job_id: str, *, after: int = -1, limit: int | None = None) -> list[VersionRecord]:
        """Return the first `limit` model versions after a number, oldest first."""
        ...

    async def list_versions_of_rounds(self, job_id: str, rounds: Collection[int]) -> list[VersionRecord]:
        """Return the model versions that these rounds made, oldest first."""
        ...

    async def set_version_metrics(self, job_id: str, version: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a version by the server's evaluator, with a history row.

        The row has the entity "version", the version's number as both states, its round and attempt, and the metrics.
        Repetition with the same metrics has no effect.
        """
        ...

    async def list_history(self, job_id: str, after_sequence: int = 0, limit: int = 250) -> list[HistoryRecord]:
        """Return history rows after a sequence number, oldest first. `tables.Words` and `Metrics` limit their size."""
        ...

    async def last_sequence(self, job_id: str) -> int:
        """Return the sequence number of a job's last history row; 0 without rows."""
        ...

    async def find_populations(self, digest: str) -> frozenset[str]:
        """Return the populations of the jobs that keep a version, or a delta, with this digest."""
        ...


class AssignmentStore(Protocol):
    """Lists and outcomes of assignments, which `JobStore.save` writes."""

    async def list_assignments(
        self, which: AssignmentFilter, *, after: AssignmentPlace | None = None, limit: int | None = None
    ) -> list[AssignmentRecord]:
        """Return the first `limit` assignments after a position, in the order of the filter."""
        ...

    async def count_assignments(self, which: AssignmentFilter) -> int:
        """Return the number of assignments that satisfy a filter."""
        ...

    async def list_outcomes(self, key: AttemptKey) -> list[OutcomeCount]:
        """Return how assignments of an attempt ended without contributing, the most frequent first.

        Each has a text of one of the clients, of at most `MAX_EXAMPLE_BYTES`.
        """
        ...

    async def count_labels(self, key: AttemptKey, limit: int) -> list[LabelledCount]:
        """Return the assignments of an attempt by the present labels of their clients and by state.

        At most `limit` combinations are returned.
        """
        ...

    async def record_downloads(self, downloaded_unix_s: Mapping[AssignmentId, float]) -> None:
        """Store the times at which clients had the model of their assignment; the first time is kept."""
        ...


class OperatorStore(Protocol):
    """The operators that may use the services of `admin.proto`."""

    async def add_operator(self, operator: OperatorRecord, token_hash: bytes, audit: Sequence[AuditEntry] = ()) -> None:
        """Add an operator. Raises `OperatorError` if the name is taken."""
        ...

    async def remove_operator(
        self, name: str, audit: Sequence[AuditEntry] = (), *, keep_an_admin: bool = False
    ) -> None:
        """Remove an operator. Raises `OperatorError` if the name is unknown.

        With `keep_an_admin`, raises `LastAdminError` if it is the only one with the role admin and a valid token, also
        if others are removed concurrently.
        """
        ...

    async def find_operator(self, token_hash: bytes) -> OperatorRecord | None:
        """Return the operator with this token, valid or expired."""
        ...

    async def list_operators(self, *, after: str = "", limit: int | None = None) -> list[OperatorRecord]:
        """Return the first `limit` operators after a name, by name."""
        ...


class AuditStore(Protocol):
    """The audit log. Its rows are never changed or removed."""

    async def append(self, entries: Sequence[AuditEntry]) -> None:
        """Append entries, all or none, as consecutive rows of the chain."""
        ...

    async def list_rows(
        self, after_sequence: int = 0, limit: int = 1000, which: AuditFilter = ALL_ROWS
    ) -> list[AuditRow]:
        """Return rows after a sequence number; with `newest_first`, those before it, or the last ones if it is 0."""
        ...

    async def count_rows(self, after_sequence: int = 0, which: AuditFilter = ALL_ROWS) -> int:
        """Return the number of rows after a sequence number that satisfy a filter."""
        ...

    async def read_head(self) -> AuditHead:
        """Return the stored head of the log."""
        ...


class LedgerStore(Protocol):
    """Private releases, and the budgets of populations. `JobStore.save` adds the releases."""

    async def list_releases(self, job_id: str) -> list[LedgerRow]:
        """Return the releases of a job, oldest first."""
        ...

    async def load_population(self, name: str) -> Population:
        """Return a population; an unknown one is empty."""
        ...

    async def load_populations(self) -> list[Population]:
        """Return all populations with jobs or a budget, by name."""
        ...

    async def set_budget(
        self, population: str, budget: Budget | None, expected_revision: int, audit: Sequence[AuditEntry] = ()
    ) -> None:
        """Set the budget of a population, or remove it.

        Raises `PopulationChangedError` if the population is not at the expected revision.
        """
        ...


class RetentionStore(Protocol):
    """Removal of old files and history. A row records that its files are removed before they are removed."""

    async def list_removable(self, job_id: str, keep: RetainedVersions, limit: int = BATCH) -> list[Removable]:
        """Return the oldest versions with files to remove."""
        ...

    async def mark_removed(self, job_id: str, found: Collection[Removable]) -> frozenset[str]:
        """Record that the files of these versions are removed; return their digests that are no longer referenced.

        Skips files that have become needed since `list_removable`.
        """
        ...

    async def list_referenced(self) -> frozenset[str]:
        """Return the digests of all kept models, deltas and server optimizer states."""
        ...

    async def list_digests(self) -> StoredDigests:
        """Return the digests of all models, deltas and server optimizer states, also of those that were given up."""
        ...

    async def list_recent_attempts(self, since_unix_s: float) -> list[AttemptKey]:
        """Return the attempts that are open or have ended since a time."""
        ...

    async def read_database_id(self) -> str:
        """Return the id of this database. A copy of a database has the same id."""
        ...

    async def find_unreferenced(self, digests: Collection[str]) -> frozenset[str]:
        """Return those of the digests that no version references."""
        ...

    async def list_old_attempts(self, job_id: str, before_unix_s: float, limit: int = BATCH) -> list[AttemptKey]:
        """Return the oldest attempts that still have a history, ended before a time and have no open assignment."""
        ...

    async def remove_history(self, keys: Collection[AttemptKey], *, metrics: bool) -> int:
        """Remove the history rows of attempts and their assignments, and record that; return the number of rows.

        With `metrics`, also clear the metrics and texts of their assignments.
        """
        ...


class TraceStore(Protocol):
    """The attempts that have ended, as rows of the history tell, whose numbers grow over all jobs."""

    async def find_last_sequence(self) -> int:
        """Return the number of the last history row; 0 in an empty history."""
        ...

    async def list_ended_attempts(
        self, after_sequence: int, *, since_unix_s: float = 0.0, limit: int = 10, max_assignments: int = 100
    ) -> list[EndedAttempt]:
        """Return the first `limit` attempts that ended after a history row and since a time, in the order of their end.

        Attempts whose history was removed are left out.
        """
        ...


class LeaseStore(Protocol):
    """The lease of the leading daemon.

    It has its own connections: a renewal must neither wait for the writes of rounds, nor have their time limit. Its
    methods raise `StoreUnavailableError` if the database does not answer within a short time.
    """

    async def read(self) -> LeaseReading:
        """Return the current lease."""
        ...

    async def acquire(self, candidate: Candidate, secret: str, valid_s: float) -> Lease | None:
        """Give the lease to the candidate, in a new term; None if it is not free."""
        ...

    async def renew(self, lease: Lease, valid_s: float) -> bool:
        """Extend a term to `valid_s` from now; False if it is over."""
        ...

    async def release(self, lease: Lease) -> None:
        """End a term, unless it is over."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


async def recall_participations(jobs: JobStore, job: JobState) -> list[Participation]:
    """Return the participations in a job that the coordinator needs after a restart."""
    rounds = rounds_to_recall(job)
    participations: list[Participation] = []
    for start in range(0, len(rounds), ROUNDS_PER_QUERY):
        participations += await jobs.list_participations(job.job_id, rounds[start : start + ROUNDS_PER_QUERY])
    return participations


async def list_creators(log: AuditStore) -> dict[str, str]:
    """Return the names of the operators that have made jobs, by the ids of these."""
    which, creators, last = AuditFilter(action=AuditAction.JOB_CREATED), dict[str, str](), 0
    while rows := await log.list_rows(last, which=which):
        creators |= {row.subject: row.actor for row in rows}
        last = rows[-1].sequence
    return creators
