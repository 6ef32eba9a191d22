"""Leader election: how a daemon becomes the leader, and notices that it no longer is."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from typing_extensions import override

from fedplat_server import errors, logs
from fedplat_server.config import LeaseTimes, ServerConfig
from fedplat_server.database.store import LeaseStore, open_leases
from fedplat_server.records import lease as rules
from fedplat_server.records.lease import Candidate, HeldLease, Lease

Follow = Callable[[Lease], Awaitable[None]]
"""A function called with the current leader's lease each time that the lease is read."""


NO_DATABASE = "this daemon cannot reach its database; start or repair the database (the daemon's log has the reason)"
_LOG_EVERY_S = 60.0


class Election(Protocol):
    """Decides which daemon leads. `problem` is why it cannot decide now, for every caller; empty if it can."""

    problem: str

    async def elect(self, follow: Follow) -> HeldLease:
        """Wait until this daemon leads and return its lease; until then, call `follow` with the leader's lease."""
        ...

    async def keep(self, held: HeldLease) -> None:
        """Renew the lease for as long as possible. Raises `LeadershipLostError` when that ends."""

    async def resign(self, held: HeldLease) -> None:
        """Release the lease, so that another daemon leads at once. Never raises: the lease also expires."""

    async def close(self) -> None:
        """Close the connections to the database."""


async def open_election(config: ServerConfig, candidate: Candidate) -> Election:
    """Return the election for a configuration: by lease if daemons share a database. Raises as `open_store` does."""
    if config.is_shared:
        return LeaseElection(await open_leases(config.database), candidate, config.lease)
    return SingleDaemon(candidate)


class SingleDaemon(Election):
    """The election for an unshared database: the lock on the data folder has already decided it."""

    problem = ""

    def __init__(self, candidate: Candidate) -> None:
        now = time.time()
        lease = Lease(candidate.holder, candidate.address, 0, secrets.token_urlsafe(32), now, now)
        self._held = HeldLease(lease, 0.0, float("inf"))

    @override
    async def elect(self, follow: Follow) -> HeldLease:
        return self._held

    @override
    async def keep(self, held: HeldLease) -> None:
        await asyncio.get_running_loop().create_future()

    @override
    async def resign(self, held: HeldLease) -> None:
        return

    @override
    async def close(self) -> None:
        return


class LeaseElection(Election):
    """The election for daemons that share a database, by a lease stored in it."""

    def __init__(self, leases: LeaseStore, candidate: Candidate, times: LeaseTimes) -> None:
        self._leases = leases
        self._candidate = candidate
        self._times = times
        self._renewals: set[asyncio.Task[bool]] = set()
        self.problem = ""

    @override
    async def elect(self, follow: Follow) -> HeldLease:
        log_at = time.monotonic()
        while True:
            try:
                held = await self._try(follow)
                self.problem, log_at = "", time.monotonic()
            except errors.StoreUnavailableError as exc:
                held, self.problem = None, NO_DATABASE
                if time.monotonic() >= log_at:
                    logs.get().error("cannot read the lease: the database is unavailable", error=str(exc))
                    log_at = time.monotonic() + _LOG_EVERY_S
            if held is not None:
                return held
            await asyncio.sleep(self._times.poll_s)

    async def _try(self, follow: Follow) -> HeldLease | None:
        reading = await self._leases.read()
        if rules.is_free(reading, self._candidate, self._times.valid_s):
            requested_at = time.monotonic()
            lease = await self._leases.acquire(self._candidate, secrets.token_urlsafe(32), self._times.valid_s)
            return HeldLease.since(lease, requested_at, self._times) if lease is not None else None
        assert reading.lease is not None  # else it would be free
        await follow(reading.lease)
        return None

    @override
    async def keep(self, held: HeldLease) -> None:
        pause_s = 0.0
        while True:
            now = time.monotonic()
            pause_s = min(max(held.next_renewal(self._times) - now, pause_s), held.ends_at - now)
            await asyncio.sleep(max(pause_s, 0.0))
            requested_at = time.monotonic()
            if held.is_over(requested_at):  # this process was stopped, or was too busy to renew in time
                raise errors.LeadershipLostError("the lease could not be renewed in time")
            renewal = asyncio.create_task(self._leases.renew(held.lease, self._times.valid_s), name="renewal")
            self._renewals.add(renewal)
            renewal.add_done_callback(self._renewals.discard)
            # Not wait_for, which waits for the cancelled call: a database that does not answer may block even that.
            await asyncio.wait([renewal], timeout=max(held.ends_at - time.monotonic(), 0.0))
            if not renewal.done():
                renewal.cancel()
                raise errors.LeadershipLostError("the lease could not be renewed in time: the database does not answer")
            try:
                is_renewed = renewal.result()
            except errors.StoreUnavailableError as exc:
                logs.get().warning("the lease was not renewed", error=str(exc))
                pause_s = self._times.poll_s
            else:
                if not is_renewed:
                    raise errors.LeadershipLostError(f"another daemon leads: term {held.lease.term} is over")
                held, pause_s = held.renew(requested_at, self._times), 0.0

    @override
    async def resign(self, held: HeldLease) -> None:
        try:
            await self._leases.release(held.lease)
        except errors.StoreError as exc:
            logs.get().warning("the lease was not released; it will expire", error=str(exc))

    @override
    async def close(self) -> None:
        await asyncio.gather(*self._renewals, return_exceptions=True)
        await self._leases.close()
