"""The filters of the list of jobs, which the registry keeps in memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from fedplat.rounds import JobState
from fedplat.rounds.states import JobStatus
from fedplat.wire.v1 import admin_pb2
from fedplat_server.database.jobs import JobRecord
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import convert, validation
from fedplat_server.rpc.job_registry import JobRegistry

_STATUSES = {wire: status for status, wire in convert.STATUSES.items()}


@dataclasses.dataclass(frozen=True)
class JobFilter:
    """The jobs of a list: those that satisfy all conditions."""

    statuses: frozenset[JobStatus] = frozenset()
    population: str = ""
    search: str = ""
    since_unix_s: float = 0.0
    newest_first: bool = False

    @classmethod
    def of(cls, request: admin_pb2.ListJobsRequest) -> JobFilter:
        """Return the filter of a request. Raises `RefusedError` if it is not valid."""
        unknown = [status for status in request.statuses if status not in _STATUSES]
        if unknown:
            raise RefusedError(
                Code.INVALID_REQUEST, f"the status {unknown[0]} is unknown; expected {', '.join(JobStatus)}"
            )
        return cls(
            statuses=frozenset(_STATUSES[status] for status in request.statuses),
            population=validation.name(request.population, "population") if request.population else "",
            search=validation.search(request.search).lower(),
            since_unix_s=validation.since(request.since_unix_s),
            newest_first=request.newest_first,
        )

    def matches(self, state: JobState, record: JobRecord) -> bool:
        """Return whether a job satisfies all conditions but that on its status."""
        spec = state.spec
        return (
            (not self.population or spec.population == self.population)
            and record.created_unix_s >= self.since_unix_s
            and (not self.search or self.search in spec.name.lower() or self.search in state.job_id)
        )


@dataclasses.dataclass(frozen=True)
class JobList:
    """The jobs of a list: those after a page token, the number of all, and the numbers by status in any status."""

    rest: Sequence[JobState]
    total: int
    num_by_status: Counter[str]


def select(jobs: JobRegistry, which: JobFilter, after: str) -> JobList:
    """Return the jobs that satisfy a filter; those after the job `after` ("": all; none if it is unknown)."""
    found = jobs.select(which.matches, newest_first=which.newest_first)
    num_by_status = Counter(state.status.value for state in found)
    if which.statuses:
        found = [state for state in found if state.status in which.statuses]
    return JobList(_after(jobs, found, after, newest_first=which.newest_first), len(found), num_by_status)


def _after(jobs: JobRegistry, found: Sequence[JobState], after: str, *, newest_first: bool) -> Sequence[JobState]:
    if not after:
        return found
    last = jobs.position(after)
    if last is None:
        return ()
    for index, state in enumerate(found):  # its status may have changed since, so that it is no longer in the list
        position = jobs.position(state.job_id)
        assert position is not None
        if position < last if newest_first else position > last:
            return found[index:]
    return ()
