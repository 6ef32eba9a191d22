"""What the scripted server of `fake_admin` knows, and how tests add to it."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import Any

import grpc

from fedplat.wire.v1 import admin_pb2, model_pb2

S = admin_pb2.JobStatus
Status = admin_pb2.JobStatus.ValueType
ENDED = (admin_pb2.JOB_STATUS_COMPLETED, admin_pb2.JOB_STATUS_FAILED, admin_pb2.JOB_STATUS_CANCELLED)
T0 = 1_700_000_000.0


def _alerts() -> list[admin_pb2.Alert]:
    return [
        admin_pb2.Alert(
            name="too_few_clients",
            severity=admin_pb2.ALERT_SEVERITY_CRITICAL,
            text="Job digits waits.",
            remedy="Start clients.",
        ),
        admin_pb2.Alert(
            name="disk_low",
            severity=admin_pb2.ALERT_SEVERITY_WARNING,
            text="The disk is small.",
            remedy="Enlarge it.",
        ),
    ]


@dataclass
class State:
    """What the fake server knows; tests write here."""

    jobs: dict[str, admin_pb2.Job] = field(default_factory=dict[str, admin_pb2.Job])
    events: list[admin_pb2.JobEvent] = field(default_factory=list[admin_pb2.JobEvent])
    rounds: list[admin_pb2.Round] = field(default_factory=list[admin_pb2.Round])
    details: dict[tuple[int, int], admin_pb2.RoundDetails] = field(
        default_factory=dict[tuple[int, int], admin_pb2.RoundDetails]
    )
    """Of rounds, by round and attempt."""
    assignments: list[admin_pb2.AssignmentDetails] = field(default_factory=list[admin_pb2.AssignmentDetails])
    """The latest first."""
    clients: list[admin_pb2.Client] = field(default_factory=list[admin_pb2.Client])
    counts: bool = True
    """Whether lists have totals, as those of older servers do not."""
    enrollments: list[admin_pb2.Enrollment] = field(default_factory=list[admin_pb2.Enrollment])
    num_releases: int = 0
    """The private releases that a deleted job leaves."""
    changes: list[str] = field(default_factory=list[str])
    """The changes of a job that were asked for."""
    asked: admin_pb2.CreateEnrollmentRequest | None = None
    """The last enrollment that was asked for."""
    pages: list[str] = field(default_factory=list[str])
    """Pages of a ticket's clients that were asked to be revoked."""
    versions: list[admin_pb2.ModelVersion] = field(default_factory=list[admin_pb2.ModelVersion])
    models: dict[str, bytes] = field(default_factory=dict[str, bytes])
    by_key: dict[str, str] = field(default_factory=dict[str, str])
    alerts: list[admin_pb2.Alert] = field(default_factory=_alerts)
    leader: dict[str, Any] = field(default_factory=dict[str, Any])
    watched_after: list[int] = field(default_factory=list[int])
    progress_every_s: list[float] = field(default_factory=list[float])
    """The interval that each watch asked for."""
    operators: list[admin_pb2.Operator] = field(default_factory=list[admin_pb2.Operator])
    privacy: admin_pb2.ShowPrivacyResponse = field(default_factory=admin_pb2.ShowPrivacyResponse)
    budgets: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    audit: list[admin_pb2.AuditEvent] = field(default_factory=list[admin_pb2.AuditEvent])
    tokens: list[str] = field(default_factory=list[str])
    """The authorization of each call."""
    refusal: tuple[grpc.StatusCode, str] | None = None
    refusal_code: str = ""
    retry: str = ""
    """Sent along with a refusal, as the real server does."""
    damage: str = ""
    """Of an export: "bytes", "short", "long", "empty"; of an upload: "digest"."""
    lost_answers: set[str] = field(default_factory=set[str])
    """Methods whose next call does its work, but loses its answer because the connection breaks."""
    refuses_start: bool = False
    insecure: bool = False
    ends_started_jobs: bool = False
    """A started job is COMPLETED as soon as it is watched."""
    stop_watch_after: int = 0
    """Ends each watch after so many events, if it is not 0."""
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a watch is over, for whatever reason."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for_watches(self, count: int) -> None:
        """Return when so many watches have arrived."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.watched_after) >= count, timeout=60.0)

    def add_job(self, name: str = "digits", status: Status = S.JOB_STATUS_RUNNING) -> admin_pb2.Job:
        job = admin_pb2.Job(
            job_id=f"{len(self.jobs):032x}",
            name=name,
            population="demo",
            status=status,
            round=1,
            num_rounds=3,
            created_unix_s=T0,
        )
        self.jobs[job.job_id] = job
        return job

    def add_version(self, data: bytes, version: int = 0) -> admin_pb2.ModelVersion:
        digest = hashlib.sha256(data).hexdigest()
        self.models[digest] = data
        ref = model_pb2.ModelRef(version=version, digest=digest, size_bytes=len(data))
        self.versions.append(
            admin_pb2.ModelVersion(
                model=ref, round=version, created_unix_s=T0, num_updates=8, total_weight=1234.5, metrics={"loss": 0.25}
            )
        )
        return self.versions[-1]

    def add_events(self, *events: admin_pb2.JobEvent) -> None:
        """Appends events with the next sequence numbers, a second apart, and wakes the watchers."""
        with self.changed:
            for event in events:
                event.sequence = 10 * (len(self.events) + 1)
                event.unix_s = T0 + len(self.events)
                self.events.append(event)
                if event.entity == "job":
                    for job in self.jobs.values():
                        job.status = S.Value(f"JOB_STATUS_{event.to_state}")
                        job.reason = event.reason
            self.changed.notify_all()
