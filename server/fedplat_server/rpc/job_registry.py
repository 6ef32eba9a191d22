"""The jobs as handlers and the leader find them: by id or by name, with who waits for their changes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from fedplat.rounds import AssignmentId, Change, JobState, Participation
from fedplat.rounds.protocols.base import protocol_of
from fedplat.rounds.states import ENDED_JOBS
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.records import JobRecord
from fedplat_server.errors import Code, RefusedError
from fedplat_server.rpc.operator_access import current_operator


class JobRegistry:
    """The jobs as shown to operators: the coordinator's state, with job file and creation time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._records: dict[str, JobRecord] = {}
        self._creators: dict[str, str] = {}
        self._initial_digests: dict[str, str] = {}
        self._positions: dict[str, int] = {}
        self._changed: dict[str, asyncio.Event] = {}

    def add(
        self, record: JobRecord, participations: Sequence[Participation], initial_digest: str, *, creator: str = ""
    ) -> None:
        """Add a stored job, with the participations of its clients if the job remembers them. Idempotent.

        `initial_digest` is that of its initial model, `creator` the operator that has made it ("": unknown).
        """
        self._initial_digests.setdefault(record.state.job_id, initial_digest)
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

    def creator(self, job_id: str) -> str:
        """Return the operator that has made a job; empty if it is unknown."""
        return self._creators[job_id]

    def initial_digest(self, job_id: str) -> str:
        """Return the SHA-256 of a job's initial model."""
        return self._initial_digests[job_id]

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

    def on_stored(self, changes: Iterable[Change]) -> None:
        """Wake the watchers of the jobs that have changed."""
        for change in changes:
            self.notify_watchers(change.job.job_id)

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
