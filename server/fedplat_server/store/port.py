"""What the server asks of its database.

Every method is atomic. Every adapter passes the contract suite `tests/server/store/test_contract*.py`. Errors are
`StoreUnavailableError` (try again later), `StaleRevisionError` and `ParticipationError` (read again first) and
`LeadershipLostError`; nothing of a database library leaves an adapter. Moments are stored as seconds since 1970 on the
wall clock. People read them, and the deadlines of assignments are found again by them after a restart; nothing in a
running server decides by them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from fedplat.rounds import Assignment, AttemptKey, Change, HistoryRow, JobState, ModelVersion
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase
from fedplat_server.audit import AuditEntry
from fedplat_server.store.fleet import FleetStore
from fedplat_server.store.ledger import LedgerStore
from fedplat_server.store.participations import ParticipationStore
from fedplat_server.store.people import AuditStore, OperatorStore
from fedplat_server.store.retention import RetentionStore


@dataclasses.dataclass(frozen=True, slots=True)
class JobRecord:
    """A job with what the coordinator has no use for."""

    state: JobState
    job_file: str
    created_unix_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Staleness:
    """How many versions behind the updates were that an attempt has taken in: on average, and at most."""

    mean: float = 0.0
    most: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptRecord:
    """An attempt with its assignments counted; `ended_unix_s` is None while it is open.

    An assignment counts for the attempt that has taken its update in; until there is one, for that which it was made
    in. `update_bytes` is the size of all updates that were reported, `largest_norm` the largest of their norms.
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
    """A model version with what the server's evaluator said of it.

    `model_removed_unix_s` and `state_removed_unix_s` say when the files were given up: those of the model and of its
    delta, and that of the rule's state. None: they are there, if there ever were any.
    """

    version: ModelVersion
    created_unix_s: float
    metrics: Mapping[str, float]
    model_removed_unix_s: float | None = None
    state_removed_unix_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class HistoryRecord:
    """A row of the append-only history; sequence numbers grow over all jobs, with gaps."""

    sequence: int
    unix_s: float
    row: HistoryRow


class Store(FleetStore, OperatorStore, AuditStore, ParticipationStore, LedgerStore, RetentionStore, Protocol):
    """The port. Where a method takes `audit`, its entries are noted in the same transaction."""

    async def close(self) -> None:
        """Lets go of every connection."""
        ...

    async def ping(self) -> None:
        """Returns when the database answers."""
        ...

    async def fence(self, term: int) -> None:
        """From now on every write is rejected with `LeadershipLostError` once the lease has another term than this.

        Raises that at once if it has one already. A store in memory has one daemon only, and nothing to check.
        """
        ...

    async def sever(self) -> None:
        """Ends whatever is under way, and lets everything that comes fail, with `LeadershipLostError`."""
        ...

    async def create_job(
        self,
        state: JobState,
        job_file: str,
        idempotency_key: str,
        audit: Sequence[AuditEntry] = (),
        expected: int | None = None,
    ) -> JobRecord:
        """Adds a job (status DRAFT, version 0) with a history row, and with what was settled if it is private.

        A known idempotency key returns the job that has it, unchanged, and notes nothing. Raises `StoreError` if a
        private job was not settled, and `PopulationChangedError` if its population is at another revision than the
        `expected` one (None: any).
        """
        ...

    async def find_job(self, idempotency_key: str) -> JobRecord | None:
        """The job that was created with this key."""
        ...

    async def load_jobs(self, now: float = 0.0) -> list[JobRecord]:
        """Every job in the order of creation, as the coordinator left it.

        That is: with its last attempt, the assignments that are its own or carried (`rounds.rebuild_attempt`), its
        latest version, and the durations (`took_s`, oldest first, at most `sync.REMEMBERED_DURATIONS`) of its
        assignments that were reported in attempts of kind TRAIN. The moments of assignments (`…_at`) are on the clock
        that reads `now`, as far as the wall clock can be trusted; all others are zero or None.
        """
        ...

    async def save(
        self, changes: Sequence[Change], now: float, *, save_id: str = "", audit: Sequence[AuditEntry] = ()
    ) -> None:
        """Writes changes in order, all or none: job, attempt, assignments, version, ledger, history, audit log.

        Each version of a private job has its row of the ledger: `StoreError` if it would have none. So it is for a
        version that a rollback makes of one whose files are not kept any more.
        `now` is this moment on the clock of the changes' moments. Raises `StaleRevisionError` when a job's revision
        is not the expected one, and `ParticipationError` when a client of a private job would take part too often, by
        the assignments that are stored. After `StoreUnavailableError` nobody knows; `last_save` tells.
        """
        ...

    async def last_save(self, job_id: str) -> str:
        """The id of the save that changed a job last; waits for one that is under way, whoever began it."""
        ...

    async def find_assignment(self, token_hash: bytes) -> Assignment | None:
        """The assignment with this token, however old; its moments are zero."""
        ...

    async def list_attempts(
        self, job_id: str, *, all_attempts: bool = False, after: tuple[int, int] | None = None, limit: int | None = None
    ) -> list[AttemptRecord]:
        """The first `limit` attempts after a round and number, in this order.

        Without `all_attempts` those that were abandoned are left out.
        """
        ...

    async def last_attempt(self, job_id: str) -> AttemptRecord | None:
        """The attempt that `list_attempts` has last with `all_attempts`; costs the same however many there are."""
        ...

    async def find_version(self, job_id: str, version: int) -> ModelVersion | None:
        """The version of a job that has this number."""
        ...

    async def list_versions(self, job_id: str, *, after: int = -1, limit: int | None = None) -> list[VersionRecord]:
        """The first `limit` model versions after a number, oldest first."""
        ...

    async def versions_of_rounds(self, job_id: str, first: int, last: int) -> list[VersionRecord]:
        """The model versions that the rounds from `first` to `last` have made, oldest first."""
        ...

    async def set_version_metrics(self, job_id: str, version: int, metrics: Mapping[str, float]) -> None:
        """Notes what the server's evaluator said of a version, and adds a history row.

        The row: entity "version", both states the version's number, the version's round and attempt, the metrics.
        Said again, it changes nothing.
        """
        ...

    async def history(self, job_id: str, after_sequence: int = 0, limit: int = 250) -> list[HistoryRecord]:
        """Rows of a job after a sequence number, oldest first. Each is bounded (`tables.Words`, `tables.Metrics`)."""
        ...

    async def populations_of(self, digest: str) -> frozenset[str]:
        """The populations of the jobs that keep a version, or a delta, with this digest."""
        ...

    async def referenced_digests(self) -> frozenset[str]:
        """Digests of all versions, their deltas, and all server optimizer states, but of those that were given up."""
        ...
