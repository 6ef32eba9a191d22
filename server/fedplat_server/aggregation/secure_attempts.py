"""Setups and rosters of secure aggregations, built from what is stored, once for each attempt and not for each call."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from fedplat.job.secure import build_setup
from fedplat.model import ModelFile
from fedplat.rounds import Assignment, Attempt, AttemptKey, JobState
from fedplat.rounds.protocols.secure_phases import find_survivors, list_groups, messages_of
from fedplat.rounds.records import SecureMessages
from fedplat.rounds.states import AttemptPhase
from fedplat.secure_aggregation import unmasking
from fedplat.secure_aggregation.messages import (
    Confirmation,
    KeyAdvertisement,
    Member,
    SealedShares,
    Survivors,
    UnmaskAnswer,
)
from fedplat.secure_aggregation.setup import AnySetup, Graph
from fedplat_server import logs, retries
from fedplat_server.database import sql_audit, sql_clients
from fedplat_server.errors import StoreUnavailableError
from fedplat_server.records.audit import SERVER, AuditAction, AuditEntry, AuditFilter
from fedplat_server.storage.blobs import BlobStore

BuildSetup = Callable[[JobState, AttemptKey, Path], AnySetup]
"""A function that returns the setup of an attempt that begins with the version in a file. Blocks."""
MAX_REMEMBERED = 256
"""Attempts, at most one of each job, whose setups and rosters are kept in memory."""
_PHASES = (
    AttemptPhase.SELECTING,
    AttemptPhase.ADVERTISING,
    AttemptPhase.SHARING,
    AttemptPhase.COLLECTING,
    AttemptPhase.CONFIRMING,
    AttemptPhase.UNMASKING,
    AttemptPhase.COMMITTING,
    AttemptPhase.COMMITTED,
)


def build_of_updates(job: JobState, key: AttemptKey, base: Path) -> AnySetup:
    """Return the setup of an attempt whose clients send updates of a model."""
    size = job.spec.turn(key.round).select_uploaded(ModelFile.open(base).schema).num_floating
    return build_setup(job.spec, key.job_id, key.round, key.number, job.latest.digest, size)


def has_begun(attempt: Attempt, phase: AttemptPhase) -> bool:
    """Return whether a secure attempt is in a phase or in a later one; an abandoned attempt is in none."""
    return attempt.phase in _PHASES and _PHASES.index(attempt.phase) >= _PHASES.index(phase)


class RosterGroup:
    """A group of an attempt: its members, and what follows from the messages that they have sent.

    What is computed from an attempt is fixed by the phase that the caller waits for, and so computed once.
    """

    def __init__(self, setup: AnySetup, members: Sequence[Member]) -> None:
        self.setup = setup
        self.members = tuple(members)
        self.graph = Graph.of(setup.options, len(members))
        self._sent: Mapping[int, SealedShares] | None = None
        self._survivors: Survivors | None = None
        self._request: bytes | None = None

    def roster(self, position: int) -> bytes:
        """Return the roster for a member."""
        return unmasking.make_roster(self.members, position)

    def sent_shares(self, attempt: Attempt) -> Mapping[int, SealedShares]:
        """Return the shares that members have sent, by position; for an attempt after SHARING."""
        assert has_begun(attempt, AttemptPhase.COLLECTING)
        if self._sent is None:
            self._sent = {
                position: SealedShares.from_bytes(messages.shares)
                for position, messages in self._messages(attempt)
                if messages.shares
            }
        return self._sent

    def held_shares(self, attempt: Attempt, position: int) -> bytes:
        """Return the shares that a member holds; for an attempt after SHARING."""
        return unmasking.route_shares(self.graph, position, self.sent_shares(attempt))

    def survivors(self, attempt: Attempt) -> Survivors:
        """Return the members whose updates are in the sum, and those that dropped out; for an attempt after COLLECTING.

        The sets follow from the states that were stored before any client was asked, so they are the same after a
        restart.
        """
        assert has_begun(attempt, AttemptPhase.CONFIRMING)
        if self._survivors is None:
            self._survivors = find_survivors([attempt.assignments[member.client_id] for member in self.members])
        return self._survivors

    def unmask_request(self, attempt: Attempt) -> bytes:
        """Return what members are asked in UNMASKING."""
        assert has_begun(attempt, AttemptPhase.UNMASKING)
        if self._request is None:
            confirmations = {
                position: Confirmation.from_bytes(messages.confirmation)
                for position, messages in self._messages(attempt)
                if messages.confirmation
            }
            self._request = unmasking.make_request(self.survivors(attempt), confirmations)
        return self._request

    def answers(self, attempt: Attempt) -> dict[int, UnmaskAnswer]:
        """Return the answers of members, by position."""
        return {
            position: UnmaskAnswer.from_bytes(messages.answer)
            for position, messages in self._messages(attempt)
            if messages.answer
        }

    def _messages(self, attempt: Attempt) -> Iterator[tuple[int, SecureMessages]]:
        for position, member in enumerate(self.members):
            yield position, messages_of(attempt.assignments[member.client_id])


@dataclasses.dataclass
class _SecureAttempt:
    """What is known of one attempt; its groups since the roster is closed."""

    key: AttemptKey
    setup: AnySetup
    groups: Sequence[RosterGroup] | None = None


class SecureAttempts:
    """The secure aggregations of jobs, each with the attempt that it is in; `build` makes their setups."""

    def __init__(
        self,
        blobs: BlobStore,
        clients: sql_clients.ClientStore,
        audit: sql_audit.AuditStore,
        build: BuildSetup = build_of_updates,
    ) -> None:
        self._build = build
        self._blobs = blobs
        self._clients = clients
        self._audit = audit
        self._attempts: OrderedDict[str, _SecureAttempt] = OrderedDict()
        self._lock = asyncio.Lock()

    def with_setups(self, build: BuildSetup) -> SecureAttempts:
        """Return those of jobs with other setups."""
        return SecureAttempts(self._blobs, self._clients, self._audit, build)

    async def setup(self, job: JobState, key: AttemptKey) -> AnySetup:
        """Return the setup of an open attempt, which starts from the job's latest version."""
        return (await self._find(job, key)).setup

    async def groups(self, job: JobState) -> Sequence[RosterGroup]:
        """Return the groups of the open attempt of a job, whose roster is closed."""
        attempt = job.open_attempt
        assert attempt is not None
        found = await self._find(job, attempt.key)
        if found.groups is None:
            async with self._lock:
                if found.groups is None:
                    found.groups = [await self._make_group(found.setup, each) for each in list_groups(attempt)]
        return found.groups

    async def note_wrong_shares(self, key: AttemptKey, client_ids: Collection[str]) -> None:
        """Record that clients gave shares that do not belong to the secrets: they are at fault, or attackers."""
        shown = " ".join(sorted(client_ids)[:10])
        logs.get().warning(
            "clients gave wrong shares in a secure aggregation", **logs.attempt_fields(key), clients=sorted(client_ids)
        )
        subject = f"{key.job_id} round {key.round} attempt {key.number}"
        entry = AuditEntry(SERVER, AuditAction.WRONG_SHARES, subject, {"clients": len(client_ids), "first": shown})

        async def append() -> None:  # once, also if only the answer was lost, or the server aggregates after a restart
            if not await self._audit.count_rows(which=AuditFilter(action=entry.action, subject=subject)):
                await self._audit.append([entry])

        await retries.retry(append, StoreUnavailableError, itertools.repeat(retries.STORE_RETRY_S))

    async def _find(self, job: JobState, key: AttemptKey) -> _SecureAttempt:
        found = self._attempts.get(key.job_id)
        if found is not None and found.key == key:
            return found
        async with self._blobs.local(job.latest.digest) as (path,):
            setup = await asyncio.to_thread(self._build, job, key, path)
        latest = self._attempts.get(key.job_id)
        if latest is not None and latest.key == key:  # another call was faster
            return latest
        made = _SecureAttempt(key, setup)
        if latest is None or latest.key < key:
            self._attempts[key.job_id] = made
            self._attempts.move_to_end(key.job_id)
            if len(self._attempts) > MAX_REMEMBERED:
                self._attempts.popitem(last=False)
        return made

    async def _make_group(self, setup: AnySetup, assignments: Sequence[Assignment]) -> RosterGroup:
        # Revoked clients are members, too: the roster stays as it was sent.
        records = await self._clients.find_clients([each.client_id for each in assignments])
        members: list[Member] = []
        for each in assignments:
            keys = KeyAdvertisement.from_bytes(messages_of(each).keys)
            members.append(Member(each.client_id, records[each.client_id].public_key, keys))
        return RosterGroup(setup, members)
