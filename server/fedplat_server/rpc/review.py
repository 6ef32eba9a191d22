"""The handler of the Fleet service with which owners of data read the jobs that they approve."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

from typing_extensions import override

from fedplat.config.plugins import Plugins
from fedplat.job import canonical_text, parse_job
from fedplat.rounds import JobState
from fedplat.rounds.states import ENDED_JOBS, JobStatus
from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import validation
from fedplat_server.rpc import pages
from fedplat_server.rpc.client_access import ClientAccess
from fedplat_server.rpc.interceptor import Context
from fedplat_server.rpc.job_registry import JobRegistry
from fedplat_server.rpc.jobs import JobFilter, select

MAX_KNOWN = 1000
"""Digests that a request may name, of 64 bytes each."""
MAX_PAGE = 20
"""Jobs of a page, whose files are rendered for it; `pages.MAX_BYTES` limits their size."""
_OPEN = frozenset(JobStatus) - ENDED_JOBS


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ReviewService(fleet_pb2_grpc.FleetServicer):
    """The method with which a client reads the jobs of its population."""

    access: ClientAccess
    jobs: JobRegistry
    plugins: Plugins

    def __post_init__(self) -> None:
        self._render = functools.lru_cache(maxsize=64)(self._canonical)  # a fleet asks for the same ones

    @override
    async def ReviewJobs(self, request: fleet_pb2.ReviewJobsRequest, context: Context) -> fleet_pb2.ReviewJobsResponse:
        client = await self.access.begin_call(context)
        if len(request.known) > MAX_KNOWN:
            text = f"{len(request.known)} known digests; at most {MAX_KNOWN} are accepted"
            raise RefusedError(Code.INVALID_REQUEST, text)
        known = frozenset(map(validation.digest, request.known))
        after = pages.token(request.page_token, pages.ID)
        found = select(self.jobs, JobFilter(_OPEN, client.population), after).rest
        rest = [state for state in found if state.digest]
        files = {state.job_id: await self._read(state) for state in rest[:MAX_PAGE] if state.digest not in known}

        def encode(state: JobState) -> fleet_pb2.ReviewedJob:
            return fleet_pb2.ReviewedJob(
                digest=state.digest,
                job_id=state.job_id,
                name=state.spec.name,
                submitter=self.jobs.creator(state.job_id),
                job_file=files.get(state.job_id, ""),
                initial_digest=self.jobs.initial_digest(state.job_id),
                plugins=[f"{each.kind}.{each.name}" for each in state.plugins],
            )

        page, token = pages.cut(rest, MAX_PAGE, encode, lambda state: state.job_id)
        return fleet_pb2.ReviewJobsResponse(jobs=page, next_page_token=token)

    def _canonical(self, job_file: str) -> str:
        return canonical_text(parse_job(job_file, self.plugins))

    async def _read(self, state: JobState) -> str:
        return await asyncio.to_thread(self._render, self.jobs.record(state.job_id).job_file)
