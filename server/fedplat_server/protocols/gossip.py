"""The server's half of decentralised jobs, which never get a model from a silo."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection, Sequence

from typing_extensions import override

from fedplat.gossip import steps
from fedplat.gossip.options import Gossip
from fedplat.gossip.topology import describe_edges_problem, describe_unknown
from fedplat.job import JobSpec
from fedplat.rounds import Assignment, AttemptKey, Change, JobState, Verdict
from fedplat.rounds.protocols.gossip import find_state, state_of
from fedplat.wire.v1 import admin_pb2, fleet_pb2, gossip_pb2
from fedplat_server.database.clients import ClientRecord
from fedplat_server.database.sql_clients import ClientStore
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import validation
from fedplat_server.messages.streams import UploadMessage
from fedplat_server.protocols.gossip_steps import GossipSteps
from fedplat_server.protocols.half import HalfParts, ServerHalf
from fedplat_server.protocols.relay import Relay
from fedplat_server.protocols.silence import SilenceMonitor

MAX_NAMED = 10
"""Number of silos that are unreachable, or excluded, which a description of a job names."""


class GossipHalf(ServerHalf):
    """Decentralised jobs: silos send each other their models; the server has their steps and encrypted files."""

    def __init__(
        self, parts: HalfParts, steps: GossipSteps, relay: Relay, silence: SilenceMonitor, clients: ClientStore
    ) -> None:
        super().__init__(parts)
        self._steps = steps
        self._relay = relay
        self._silence = silence
        self._clients = clients

    @override
    async def check_job(self, spec: JobSpec) -> None:
        """Check the names in the edges of the job."""
        mode = spec.gossip
        assert mode is not None
        if mode.topology != "edges":
            return
        if unknown := describe_unknown(mode, await self._find_silos(spec, mode.named_silos[: steps.MAX_SILOS + 1])):
            raise RefusedError(
                Code.INVALID_JOB_FILE,
                f"{unknown} in population {spec.population}; expected ids of its clients, as `fedplat client list "
                f"--population {spec.population}` shows them",
            )
        if problem := describe_edges_problem(mode, spec.selection.goal):
            raise RefusedError(Code.INVALID_JOB_FILE, problem)

    async def _find_silos(self, spec: JobSpec, names: Sequence[str]) -> set[str]:
        """Return those of the named silos that can take part in a job."""
        known = [name for name in names if validation.is_client_id(name)]
        found = await self._clients.find_clients(known) if known else {}
        able = (each for each in found.values() if each.population == spec.population and each.revoked_unix_s is None)
        return {each.client_id for each in able}

    @override
    async def set_up(self, job: JobState, key: AttemptKey) -> fleet_pb2.Assignment:
        mode, trains = _mode(job), state_of(job).round <= job.spec.rounds
        setup = gossip_pb2.GossipSetup(trains=trains, exchange=mode.exchange, gamma=mode.gamma)
        return fleet_pb2.Assignment(gossip_setup=setup)

    @override
    def judge(self, job: JobState, assignment: Assignment) -> Verdict:
        text = "silos of a decentralised job send no updates to the server; expected Step"
        raise RefusedError(Code.INVALID_REQUEST, text)

    @override
    async def take_step(
        self, client: ClientRecord, assignment: Assignment, request: fleet_pb2.StepRequest
    ) -> fleet_pb2.StepResponse:
        return await self._steps.take(client, assignment, request)

    @override
    async def receive_file(
        self, assignment: Assignment, header: fleet_pb2.UploadHeader, messages: AsyncIterator[UploadMessage]
    ) -> int:
        return await self._relay.receive(assignment, header, messages)

    @override
    async def count_received(self, assignment: Assignment, request: fleet_pb2.QueryUploadRequest) -> int:
        return await self._relay.count_received(assignment, request)

    @override
    def send_file(self, assignment: Assignment, request: fleet_pb2.DownloadRequest) -> AsyncIterator[bytes]:
        return self._relay.send(assignment, request)

    @override
    def begin(self) -> None:
        self._silence.begin()

    @override
    async def keep(self, jobs: Sequence[JobState], attempts: Collection[str]) -> None:
        open_attempts = [job.open_attempt.key for job in jobs if job.open_attempt is not None]
        await self._relay.keep(open_attempts, attempts)

    @override
    def on_stored(self, change: Change) -> None:
        if change.attempt is not None:
            self._relay.follow(change.attempt)

    @override
    async def close(self) -> None:
        await self._silence.close()
        await self._relay.close()

    @override
    def show(self, job: JobState) -> admin_pb2.Job:
        return admin_pb2.Job(num_rounds=job.spec.rounds, exchange=_show_exchange(job))


def _mode(job: JobState) -> Gossip:
    assert job.spec.gossip is not None
    return job.spec.gossip


def _show_exchange(job: JobState) -> admin_pb2.Exchange | None:
    """Return the exchanges of a job; None before it begins."""
    mode, found = _mode(job), find_state(job)
    if found is None:
        return None
    relative = found.consensus.relative
    return admin_pb2.Exchange(
        topology=mode.topology,
        kind=mode.exchange,
        num_silos=len(found.members),
        num_edges=len(found.edges),
        num_confirmed=found.confirmed,
        relative_distance=relative if math.isfinite(relative) else None,
        tolerance=mode.tolerance,
        num_unreachable=len(found.away),
        unreachable=sorted(found.away)[:MAX_NAMED],
        ring_attempt=found.attempt,
        excluded=sorted(found.excluded)[:MAX_NAMED],
    )
