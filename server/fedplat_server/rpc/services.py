"""The services that RPC handlers use: the parts of the daemon, and the registry of jobs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from fedplat.rounds import AssignmentId, JobState, Participation
from fedplat.rounds.protocols.base import protocol_of
from fedplat.rounds.states import ENDED_JOBS, Reason
from fedplat_server.auth.addresses import Origins
from fedplat_server.auth.audit_limits import BoundedAudit
from fedplat_server.auth.authentication import Authenticator
from fedplat_server.auth.certificates import CertificateIssuer, PeerCertificates
from fedplat_server.auth.client_directory import ClientDirectory
from fedplat_server.auth.enrollment import Enrollments
from fedplat_server.auth.rate_limits import Quotas
from fedplat_server.auth.tls import Certificates
from fedplat_server.config import ServerConfig
from fedplat_server.coordination.alert_monitor import AlertMonitor
from fedplat_server.coordination.availability import AvailabilityTracker
from fedplat_server.coordination.budgets import Budgets
from fedplat_server.coordination.conflicts import Conflicts
from fedplat_server.coordination.downloads import Downloads
from fedplat_server.coordination.event_feed import EventFeed
from fedplat_server.coordination.fleet_counts import FleetCounter
from fedplat_server.coordination.long_polls import LongPolls
from fedplat_server.coordination.progress import ProgressTracker
from fedplat_server.coordination.revocation import Revocation
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.jobs import JobRecord
from fedplat_server.database.store import Store
from fedplat_server.errors import Code, RefusedError
from fedplat_server.instruments import Instruments
from fedplat_server.protocols.registry import ServerHalves
from fedplat_server.records.lease import Lease
from fedplat_server.rpc.caller import current_operator
from fedplat_server.rpc.memory import UploadMemory
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.read_cache import Chunks, InlineModels
from fedplat_server.storage.spool import Spool
from fedplat_server.training.evaluation import EvaluationScheduler
from fedplat_server.webhooks.delivery import DeliveryTask


class JobRegistry:
    """The jobs as shown to operators: the coordinator's state, with job file and creation time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._records: dict[str, JobRecord] = {}
        self._creators: dict[str, str] = {}
        self._positions: dict[str, int] = {}
        self._changed: dict[str, asyncio.Event] = {}

    def add(self, record: JobRecord, participations: Sequence[Participation] = (), *, creator: str = "") -> None:
        """Add a stored job, with the participations of its clients if the job remembers them. Idempotent.

        `creator` is the operator that has made it ("": unknown).
        """
        self._creators.setdefault(record.state.job_id, creator)
        self._records.setdefault(record.state.job_id, record)
        self._positions.setdefault(record.state.job_id, len(self._positions))
        if record.state.job_id not in self._runner.coordinator.jobs:
            self._runner.coordinator.add(record.state, participations)

    def change_file(self, job_id: str, job_file: str) -> None:
        """Show another file of a job, which was stored."""
        self._records[job_id] = dataclasses.replace(self._records[job_id], job_file=job_file)

    def all(self) -> list[JobRecord]:
        """Return the jobs in the order of creation."""
        return [self._current(job_id) for job_id in self._records]

    def select(self, matches: Callable[[JobState, JobRecord], bool], *, newest_first: bool = False) -> list[JobState]:
        """Return the states of the jobs that satisfy a condition on state and record, in the order of creation.

        The state in the record is that of its creation or of the start of the daemon.
        """
        jobs = self._runner.coordinator.jobs
        ordered = reversed(self._records.values()) if newest_first else self._records.values()
        return [state for record in ordered if matches(state := jobs[record.state.job_id], record)]

    def position(self, job_id: str) -> int | None:
        """Return the position of a job in the order of creation; None if it is unknown."""
        return self._positions.get(job_id)

    def record(self, job_id: str) -> JobRecord:
        """Return an existing job."""
        return self._current(job_id)

    def find(self, name: str) -> JobRecord:
        """Return the job with this id, or the only one with this name; jobs that have not ended come first.

        Raises `RefusedError` if it is unknown, or ambiguous: with the ids of the jobs that the caller has made.
        """
        if name in self._records:
            return self._current(name)
        named = [self._current(state.job_id) for state in self.select(lambda state, _: state.spec.name == name)]
        candidates = [record for record in named if record.state.status not in ENDED_JOBS] or named
        if not candidates:
            raise RefusedError(Code.NO_SUCH_JOB, repr(name))
        if len(candidates) > 1:
            ids = [record.state.job_id for record in candidates]
            own = [job_id for job_id in ids if self._creators[job_id] == current_operator()]
            others = f"{len(ids) - len(own)} of other operators (fedplat job list)"
            raise RefusedError(Code.AMBIGUOUS_JOB, ", ".join([*own, others] if len(own) < len(ids) else own))
        return candidates[0]

    def state(self, job_id: str) -> JobState:
        """Return the coordinator's state of an existing job."""
        return self._runner.coordinator.jobs[job_id]

    def is_in_memory(self, job_id: str) -> bool:
        """Return whether the updates of a job must stay in memory."""
        return self.state(job_id).spec.durability == "memory"

    def needed_updates(self) -> list[AssignmentId]:
        """Return the updates that are needed after a restart: those of open assignments."""
        states = [self.state(job_id) for job_id in self._records]
        open_assignments = [(protocol_of(job, each.kind), each) for job in states for each in job.open_assignments]
        return [each.id for protocol, each in open_assignments if protocol.folds and protocol.keeps_updates]

    def notify_watchers(self, job_id: str) -> None:
        """Wake the watchers of a job."""
        event = self._changed.pop(job_id, None)
        if event is not None:
            event.set()

    def next_change(self, job_id: str) -> asyncio.Event:
        """Return an event that is set at the job's next change."""
        return self._changed.setdefault(job_id, asyncio.Event())

    def wake_all(self) -> None:
        """Wake the watchers of all jobs, because the daemon stops."""
        for job_id in list(self._changed):
            self.notify_watchers(job_id)

    def _current(self, job_id: str) -> JobRecord:
        return dataclasses.replace(self._records[job_id], state=self.state(job_id))


@dataclasses.dataclass
class Services:
    """The parts of the daemon that handlers use."""

    config: ServerConfig
    lease: Lease
    store: Store
    runner: Runner
    jobs: JobRegistry
    clients: ClientDirectory
    authenticator: Authenticator
    enrollments: Enrollments
    revocation: Revocation
    issuer: CertificateIssuer
    peers: PeerCertificates
    long_polls: LongPolls
    progress: ProgressTracker
    downloads: Downloads
    alerts: AlertMonitor
    availability: AvailabilityTracker
    fleet_counter: FleetCounter
    blobs: BlobStore
    chunks: Chunks
    inline_models: InlineModels
    spool: Spool
    halves: ServerHalves
    evaluation: EvaluationScheduler
    quotas: Quotas
    origins: Origins
    bounded_audit: BoundedAudit
    memory: UploadMemory
    conflicts: Conflicts
    budgets: Budgets
    event_feed: EventFeed
    webhooks: DeliveryTask
    started_unix_s: float
    new_id: Callable[[str], str]
    instruments: Instruments
    certificates: Certificates | None = None
    draining: bool = False
    mtls_port: int = 0
    is_tracing: bool = False

    def refuse_if_draining(self) -> Reason | None:
        """Return `Reason.DRAINING` if the daemon is draining, so that clients get no assignments; else None."""
        return Reason.DRAINING if self.draining else None
