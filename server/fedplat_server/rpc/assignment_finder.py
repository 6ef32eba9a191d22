"""The assignment of a token, which only its client knows."""

from __future__ import annotations

import secrets

from fedplat.rounds import Assignment, JobState
from fedplat_server import logs
from fedplat_server.auth.tokens import hash_secret
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.clients import ClientRecord
from fedplat_server.database.sql_jobs import JobStore
from fedplat_server.errors import Code, RefusedError


class AssignmentFinder:
    """Finds assignments and their jobs."""

    def __init__(self, runner: Runner, store: JobStore) -> None:
        self._coordinator = runner.coordinator
        self._store = store

    async def find(self, client: ClientRecord, token: str) -> Assignment | None:
        """Return the assignment of a token, however old; None if it is not this client's."""
        found = await self._look_up(client, token)
        if found is not None:
            logs.bind(**logs.assignment_fields(found.id))
        return found

    async def find_busy(self, client: ClientRecord, token: str) -> Assignment:
        """Return the assignment of a token on which its client works. Raises `RefusedError`."""
        assignment = await self.find(client, token)
        if assignment is None:
            raise RefusedError(Code.STALE_ASSIGNMENT)
        if not assignment.is_busy:
            raise RefusedError(Code.STALE_ASSIGNMENT, assignment.reason or assignment.state)
        return assignment

    def job_of(self, assignment: Assignment) -> JobState:
        """Return the coordinator's state of an assignment's job."""
        return self._coordinator.jobs[assignment.key.job_id]

    async def _look_up(self, client: ClientRecord, token: str) -> Assignment | None:
        token_hash = hash_secret(token)
        key = self._coordinator.assignment_of(client.client_id)
        current = self._coordinator.find(key, client.client_id) if key is not None else None
        if current is not None and secrets.compare_digest(current.token_hash, token_hash):
            return current
        stored = await self._store.find_assignment(token_hash)
        if stored is None or stored.client_id != client.client_id:
            return None
        return self._coordinator.find(*stored.id) or stored
