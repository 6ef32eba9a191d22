"""What the owners of clients have decided of the jobs that ask them (`[approval]`), as their clients announce it.

Nothing is stored: clients announce it with each check-in, also to the next leader. Until a job has begun, the board
counts the approvals for its quorum, at most once in `COUNT_EVERY_S` unless an announcement has changed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

from fedplat import texts
from fedplat.rounds import JobState, approvals
from fedplat.rounds.events import ApprovalsCounted
from fedplat.rounds.states import ENDED_JOBS
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.records import ClientFilter, ClientRecord
from fedplat_server.database.sql_clients import ClientStore

COUNT_EVERY_S = 5.0
MAX_LISTED = 1000
"""Largest number of clients of a job whose decisions are listed, and rejections that are kept for it."""


@dataclasses.dataclass
class _Board:
    """The decisions on the job with a digest: the clients that approve it, and the texts of those that reject it."""

    digest: str
    approved: dict[str, None] = dataclasses.field(default_factory=dict[str, None])
    rejected: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    counted_at: float = -COUNT_EVERY_S
    """When the approvals were counted last; it is long ago if an announcement has changed since."""

    def note(self, client_id: str, found: fleet_pb2.OwnerApprovals, rejected: Mapping[str, str]) -> None:
        """Take over what a client announces."""
        before = client_id in self.approved, self.rejected.get(client_id)
        self.approved.pop(client_id, None)
        self.rejected.pop(client_id, None)
        if self.digest in found.approved:
            self.approved[client_id] = None
        elif self.digest in rejected and len(self.rejected) < MAX_LISTED:
            self.rejected[client_id] = rejected[self.digest]
        if before != (client_id in self.approved, self.rejected.get(client_id)):
            self.counted_at = -COUNT_EVERY_S


@dataclasses.dataclass(frozen=True)
class JobDecisions:
    """What is known of a job: the clients by id, of the rejections the reason; `silent` have announced neither."""

    approved: tuple[str, ...]
    rejected: Mapping[str, str]
    silent: tuple[str, ...]


class ApprovalBoards:
    """The boards of all jobs that ask owners and have not ended."""

    def __init__(
        self, runner: Runner, clients: ClientStore, max_text: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._runner = runner
        self._clients = clients
        self._max_text = max_text
        self._clock = clock
        self._boards: dict[str, _Board] = {}

    async def note(self, client: ClientRecord, announced: fleet_pb2.OwnerApprovals) -> None:
        """Take over what a client announces with a check-in, and count the approvals of jobs that wait for them."""
        jobs = [job for job in self._runner.coordinator.jobs.values() if self._asks(job, client.population)]
        if not jobs:
            return
        reasons = {each.digest: each.text for each in announced.rejected}
        for job in jobs:
            board = self._find(job)
            text = {job.digest: texts.shorten(reasons[job.digest], self._max_text)} if job.digest in reasons else {}
            board.note(client.client_id, announced, text)
            if approvals.is_awaiting(job) and self._clock() - board.counted_at >= COUNT_EVERY_S:
                await self._count(job, board)

    async def list(self, job: JobState) -> JobDecisions:
        """Return what the enrolled clients of a job's population have decided, of at most `MAX_LISTED` clients."""
        board = self._find(job)
        enrolled = await self._clients.list_clients(_select_enrolled(job), limit=MAX_LISTED)
        names = [each.client_id for each in enrolled]
        decided = board.approved.keys() | board.rejected.keys()
        return JobDecisions(
            approved=tuple(name for name in names if name in board.approved),
            rejected={name: board.rejected[name] for name in names if name in board.rejected},
            silent=tuple(name for name in names if name not in decided),
        )

    async def _count(self, job: JobState, board: _Board) -> None:
        num_clients = await self._clients.count_clients(_select_enrolled(job))
        known = await self._clients.find_clients([*board.approved])
        for name in list(board.approved):
            if name not in known or known[name].revoked_unix_s is not None:
                del board.approved[name]
        if job.approvals != (len(board.approved), num_clients):
            await self._runner.submit(ApprovalsCounted(job.job_id, len(board.approved), num_clients))
        board.counted_at = self._clock()

    def _asks(self, job: JobState, population: str) -> bool:
        return job.spec.needs_approval and job.spec.population == population and job.status not in ENDED_JOBS

    def _find(self, job: JobState) -> _Board:
        """Return the board of a job; another digest needs other approvals. Those of ended jobs are dropped."""
        board = self._boards.get(job.job_id)
        if board is None or board.digest != job.digest:
            jobs = self._runner.coordinator.jobs
            ended = [name for name in self._boards if jobs[name].status in ENDED_JOBS]
            for name in ended:
                del self._boards[name]
            board = self._boards[job.job_id] = _Board(job.digest)
        return board


def _select_enrolled(job: JobState) -> ClientFilter:
    return ClientFilter(population=job.spec.population, is_revoked=False)
