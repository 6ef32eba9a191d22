"""How a daemon comes to lead, and how it notices that it does no more."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from fedplat_server import logs
from fedplat_server.config import LeaseTimes, ServerConfig
from fedplat_server.database.ports import LeaseStore
from fedplat_server.database.sql_leases import open_leases
from fedplat_server.errors import LeadershipLostError, StoreError, StoreUnavailableError
from fedplat_server.records import lease as rules
from fedplat_server.records.lease import Candidate, HeldLease, Lease

Follow = Callable[[Lease], Awaitable[None]]
"""Hears who leads, every time that this was looked up."""


class Election(Protocol):
    """Decides which daemon leads."""

    async def elect(self, follow: Follow) -> HeldLease:
        """Returns when this daemon leads; tells who does, until then."""
        ...

    async def keep(self, tenure: HeldLease) -> None:
        """Keeps the lead for as long as that is possible. Raises `LeadershipLostError`."""
        ...

    async def resign(self, tenure: HeldLease) -> None:
        """Lets others lead at once. Never fails: the lease ends by itself."""
        ...

    async def close(self) -> None:
        """Lets go of the database."""
        ...


async def open_election(config: ServerConfig, candidate: Candidate) -> Election:
    """The election that the configuration asks for. Raises as `open_store` does."""
    if config.is_shared:
        return LeaseElection(await open_leases(config.database), candidate, config.lease)
    return SingleDaemon(candidate)


class SingleDaemon:
    """The election of a database that one daemon has for itself: the lock on its folder has decided it."""

    def __init__(self, candidate: Candidate) -> None:
        now = time.time()
        lease = Lease(candidate.holder, candidate.address, 0, secrets.token_urlsafe(32), now, now)
        self._tenure = HeldLease(lease, 0.0, float("inf"))

    async def elect(self, follow: Follow) -> HeldLease:
        """Returns at once."""
        return self._tenure

    async def keep(self, tenure: HeldLease) -> None:
        """Never ends."""
        await asyncio.get_running_loop().create_future()

    async def resign(self, tenure: HeldLease) -> None:
        """Nobody waits for it."""

    async def close(self) -> None:
        """There is nothing to let go of."""


class LeaseElection:
    """The election of daemons that share a database, by the lease that it keeps."""

    def __init__(
        self,
        leases: LeaseStore,
        candidate: Candidate,
        times: LeaseTimes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._candidate = candidate
        self._times = times
        self._clock = clock
        self._renewals: set[asyncio.Task[bool]] = set()

    async def elect(self, follow: Follow) -> HeldLease:
        """Returns when this daemon has the lease; tells who has it, until then."""
        answers = True
        while True:
            try:
                tenure = await self._try(follow)
                answers = True
            except StoreUnavailableError as exc:
                tenure = None
                if answers:
                    logs.get().error("the database does not say who leads", error=str(exc))
                answers = False
            if tenure is not None:
                return tenure
            await asyncio.sleep(self._times.poll_s)

    async def _try(self, follow: Follow) -> HeldLease | None:
        sighting = await self._leases.read()
        if rules.is_free(sighting, self._candidate, self._times.valid_s):
            asked_at = self._clock()
            lease = await self._leases.take(self._candidate, secrets.token_urlsafe(32), self._times.valid_s)
            return HeldLease.since(lease, asked_at, self._times) if lease is not None else None
        assert sighting.lease is not None  # else it would be free
        await follow(sighting.lease)
        return None

    async def keep(self, tenure: HeldLease) -> None:
        """Renews the lease. Raises `LeadershipLostError` when it is somebody else's, or could be by now."""
        pause_s = 0.0
        while True:
            asked_at = self._clock()
            pause_s = min(max(tenure.next_renewal(self._times) - asked_at, pause_s), tenure.ends_at - asked_at)
            await asyncio.sleep(max(pause_s, 0.0))
            asked_at = self._clock()
            if tenure.is_over(asked_at):  # this process was stopped, or could not ask in time
                raise LeadershipLostError("the lease could not be renewed in time")
            renewal = asyncio.create_task(self._leases.renew(tenure.lease, self._times.valid_s), name="renewal")
            self._renewals.add(renewal)
            renewal.add_done_callback(self._renewals.discard)
            # Not wait_for: a database that does not answer may not even let go of the question.
            await asyncio.wait([renewal], timeout=max(tenure.ends_at - self._clock(), 0.0))
            if not renewal.done():
                renewal.cancel()
                raise LeadershipLostError("the lease could not be renewed in time: the database does not answer")
            try:
                is_ours = renewal.result()
            except StoreUnavailableError as exc:
                logs.get().warning("the lease was not renewed", error=str(exc))
                pause_s = self._times.poll_s
            else:
                if not is_ours:
                    raise LeadershipLostError(f"another daemon leads: term {tenure.lease.term} is over")
                tenure, pause_s = tenure.renew(asked_at, self._times), 0.0

    async def resign(self, tenure: HeldLease) -> None:
        """Releases the lease, if it is still ours and the database answers."""
        try:
            await self._leases.release(tenure.lease)
        except StoreError as exc:
            logs.get().warning("the lease was not released; it ends by itself", error=str(exc))

    async def close(self) -> None:
        """Lets go of the database."""
        await asyncio.gather(*self._renewals, return_exceptions=True)
        await self._leases.close()
