"""The ports of the database: what the server asks of it, one port for each kind of thing that is stored.

Every method is one transaction. Where a method takes `audit`, the same transaction appends these entries to the audit
log. Every adapter passes the contract suite `tests/server/store/test_contract*.py`.

Errors are `StoreUnavailableError` (try again later), `StaleRevisionError`, `PopulationChangedError` and
`ParticipationError` (read again first) and `LeadershipLostError`; those of a database library stay in the adapter.
Stored times are seconds since 1970 on the wall clock. People read them, and a restart restores the deadlines of
assignments from them; a running server takes no decision by them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from fedplat.rounds import Assignment, AttemptKey, Change, JobState, ModelVersion, Participation, rounds_to_recall
from fedplat_server.database.clients import ClientRecord, Enrollment, EnrollmentToken, NewEntries, no_entries
from fedplat_server.database.jobs import (
    AttemptRecord,
    HistoryRecord,
    JobRecord,
    Removable,
    RetainedVersions,
    VersionRecord,
)
from fedplat_server.database.ledger import Budget, LedgerRow, Population
from fedplat_server.records.audit import AuditEntry, AuditHead, AuditRow
from fedplat_server.records.lease import Candidate, Lease, LeaseReading
from fedplat_server.records.operators import OperatorRecord

BATCH = 1000
"""Maximum number of versions, attempts or digests that one transaction of the retention works on."""
ROUNDS_PER_QUERY = 50
"""Rounds whose participations one query reads: a job of many large rounds must not be in memory as a whole."""


class Store(Protocol):
    """A database: its ports, and what concerns all of them."""

    @property
    def jobs(self) -> JobStore:
        """Jobs, their attempts, assignments, versions and history."""
        ...

    @property
    def clients(self) -> ClientStore:
        """Enrollment tokens and clients."""
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
        """Which old files and rows may be removed."""
        ...

    async def close(self) -> None:
        """Wait for the transactions that still run and close all connections."""
        ...

    async def ping(self) -> None:
        """Return when the database answers."""
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
        """Add a job (status DRAFT, version 0) with a history row and, if it is private, its settled `[privacy]`.

        A known idempotency key returns the job that has it, unchanged, and appends no entries. Raises `StoreError` if
        the `[privacy]` of a private job is not settled, and `PopulationChangedError` if its population is not at the
        `expected` revision (None: any).
        """
        ...

    async def find_job(self, idempotency_key: str) -> JobRecord | None:
        """Return the job that was created with this key."""
        ...

    async def load_jobs(self, now: float = 0.0) -> list[JobRecord]:
        """Return every job in the order of creation, as the coordinator left it.

        That is: with its last attempt, the assignments of that attempt, those carried over (`rounds.rebuild_attempt`),
        its latest version, and the durations (`took_s`, oldest first, at most `sync.REMEMBERED_DURATIONS`) of its
        assignments that were reported in attempts of kind TRAIN. The times of assignments (`…_at`) are on the clock
        that reads `now`, as accurate as the wall clock is; all other times are zero or None.
        """
        ...

    async def save(
        self, changes: Sequence[Change], now: float, *, save_id: str = "", audit: Sequence[AuditEntry] = ()
    ) -> None:
        """Write changes in order, all or none: job, attempt, assignments, version, ledger and history.

        `now` is the current time on the clock of the changes. Raises `StoreError` if a version of a private job has no
        ledger row or if a rollback refers to removed files, `StaleRevisionError` if a job is not at the expected
        revision, and `ParticipationError` if a client of a private job would take part too often by the stored
        assignments. After `StoreUnavailableError` the outcome is unknown until `find_last_save` answers.
        """
        ...

    async def find_last_save(self, job_id: str) -> str:
        """Return the id of the last save of a job. Waits for one in progress, of any process."""
        ...

    async def find_assignment(self, token_hash: bytes) -> Assignment | None:
        """Return the assignment with this token, however old, with times of zero."""
        ...

    async def list_attempts(
        self, job_id: str, *, all_attempts: bool = False, after: tuple[int, int] | None = None, limit: int | None = None
    ) -> list[AttemptRecord]:
        """Return the first `limit` attempts after a round and number, in this order.

        Abandoned attempts are included only with `all_attempts`.
        """
        ...

    async def find_last_attempt(self, job_id: str) -> AttemptRecord | None:
        """Return the last attempt, abandoned or not, in constant time."""
        ...

    async def list_participations(self, job_id: str, rounds: range) -> list[Participation]:
        """Return the assignments of a job's attempts to train in these rounds.

        By round and attempt; within an attempt in the order of the reports, then those without one.
        """
        ...

    async def find_version(self, job_id: str, version: int) -> ModelVersion | None:
        """Return the version of a job that has this number."""
        ...

    async def list_versions(self, job_id: str, *, after: int = -1, limit: int | None = None) -> list[VersionRecord]:
        """Return the first `limit` model versions after a number, oldest first."""
        ...

    async def list_versions_of_rounds(self, job_id: str, first: int, last: int) -> list[VersionRecord]:
        """Return the model versions that the rounds from `first` to `last` made, oldest first."""
        ...

    async def set_version_metrics(self, job_id: str, version: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a version by the server's evaluator, with a history row.

        The row: entity "version", both states the version's number, the version's round and attempt, the metrics.
        The same metrics again change nothing.
        """
        ...

    async def list_history(self, job_id: str, after_sequence: int = 0, limit: int = 250) -> list[HistoryRecord]:
        """Return history rows after a sequence number, oldest first; each is bounded (`tables.Words`, `Metrics`)."""
        ...

    async def find_populations(self, digest: str) -> frozenset[str]:
        """Return the populations of the jobs that keep a version, or a delta, with this digest."""
        ...


class ClientStore(Protocol):
    """Enrollment tokens and clients. The expiry of a token is on the wall clock: it outlives the server."""

    async def add_enrollment_token(
        self, token: EnrollmentToken, token_hash: bytes, audit: Sequence[AuditEntry] = ()
    ) -> None:
        """Add a token."""
        ...

    async def revoke_enrollment_token(self, token_id: str, audit: Sequence[AuditEntry] = ()) -> EnrollmentToken | None:
        """Revoke a token for good, and return it; None if it is unknown. Keeps the time of the first revocation."""
        ...

    async def list_enrollment_tokens(self, *, after: str = "", limit: int | None = None) -> list[EnrollmentToken]:
        """Return the first `limit` tokens created after the token with the id `after`; none if that is unknown."""
        ...

    async def enroll(self, enrollment: Enrollment, audit: NewEntries = no_entries) -> ClientRecord:
        """Add a client and use its token once.

        A known idempotency key with the same public key returns the client that has them, with new labels and
        version, whatever the state of the token, and appends no entries. Raises `TokenRefusedError` if the token is
        unknown, of another population or no longer usable, and `EnrollmentError` if the public key or the idempotency
        key is another client's.
        """
        ...

    async def find_clients(self, client_ids: Sequence[str]) -> dict[str, ClientRecord]:
        """Return the clients with these ids, by id, without those that are unknown."""
        ...

    async def begin_sessions(self, client_ids: Sequence[str]) -> dict[str, ClientRecord]:
        """Count a session for each of these distinct clients; return the updated ones that exist, by id."""
        ...

    async def revoke_client(self, client_id: str, audit: Sequence[AuditEntry] = ()) -> ClientRecord | None:
        """Revoke a client for good, and return it; None if it is unknown. Keeps the time of the first revocation."""
        ...

    async def revoke_clients_of(
        self, token_id: str, after: str, limit: int, audit: NewEntries = no_entries
    ) -> list[ClientRecord]:
        """Revoke a page of the clients that enrolled by a token, ordered and cut as by `list_clients`.

        Returns the whole page, with those revoked before, so that a caller whose answer was lost gets it again. These
        keep their time of revocation, and `audit` is called for the others only.
        """
        ...

    async def update_client(self, client_id: str, labels: Mapping[str, str], software_version: str) -> None:
        """Replace what a client reports of itself."""
        ...

    async def list_clients(
        self, population: str | None = None, *, after: str = "", limit: int | None = None
    ) -> list[ClientRecord]:
        """Return the first `limit` clients that enrolled after the client `after`; none if that is unknown."""
        ...

    async def count_clients(self) -> int:
        """Return the number of clients."""
        ...

    async def record_seen(self, seen_unix_s: Mapping[str, float]) -> None:
        """Store when clients opened their last session."""
        ...

    async def list_idle_clients(self, before_unix_s: float) -> list[str]:
        """Return the clients last seen before a time and without an open assignment, oldest first."""
        ...

    async def remove_clients(self, client_ids: Collection[str], before_unix_s: float) -> int:
        """Remove those of the clients last seen before a time; return their number. Their assignments stay."""
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
        when others are removed at the same time.
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
        """Append entries, all or none, as one unbroken piece of the chain."""
        ...

    async def list_rows(self, after_sequence: int = 0, limit: int = 1000) -> list[AuditRow]:
        """Return rows after a sequence number, oldest first."""
        ...

    async def read_head(self) -> AuditHead:
        """Return the recorded end of the log."""
        ...


class LedgerStore(Protocol):
    """Private releases, and the budgets of populations. `JobStore.save` is what adds a release."""

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
    """Removal of old files and history. A row records that its files are removed before they are, never after."""

    async def list_removable(self, job_id: str, keep: RetainedVersions, limit: int = BATCH) -> list[Removable]:
        """Return the oldest versions with files to remove."""
        ...

    async def mark_removed(self, job_id: str, found: Collection[Removable]) -> frozenset[str]:
        """Record that the files of these versions are removed; return those of their digests without a reference.

        Leaves out what has become needed since `list_removable`.
        """
        ...

    async def list_referenced(self) -> frozenset[str]:
        """Return the digests of all kept models, deltas and server optimizer states."""
        ...

    async def find_unreferenced(self, digests: Collection[str]) -> frozenset[str]:
        """Return those of the digests without a reference."""
        ...

    async def list_old_attempts(self, job_id: str, before_unix_s: float, limit: int = BATCH) -> list[AttemptKey]:
        """Return the oldest attempts with a history that ended before a time and have no open assignment."""
        ...

    async def remove_history(self, keys: Collection[AttemptKey], *, metrics: bool) -> int:
        """Remove the history rows of attempts and their assignments, and record that; return the number of rows.

        With `metrics`, also clear the metrics and texts of their assignments.
        """
        ...


class LeaseStore(Protocol):
    """The lease of the daemon that leads.

    It has connections of its own: a renewal must neither wait behind the writes of rounds, nor take as long as those
    may. Raises `StoreUnavailableError` if the database does not answer within a short time.
    """

    async def read(self) -> LeaseReading:
        """Return the current lease."""
        ...

    async def take(self, candidate: Candidate, secret: str, valid_s: float) -> Lease | None:
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
    """Return the participations that the coordinator must know of a job after a restart."""
    rounds = rounds_to_recall(job)
    found: list[Participation] = []
    for start in range(0, len(rounds), ROUNDS_PER_QUERY):
        found += await jobs.list_participations(job.job_id, rounds[start : start + ROUNDS_PER_QUERY])
    return found
