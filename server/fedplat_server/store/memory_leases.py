"""The lease in memory, for tests and simulations: the semantics of `store.sql_leases`, without a database."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from fedplat_server.cluster import lease as rules
from fedplat_server.cluster.lease import Candidate, Lease, Sighting


class MemoryLeases:
    """The adapter of `leases.Leases` in memory."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lease: Lease | None = None

    async def read(self) -> Sighting:
        """The lease as it is now."""
        return Sighting(self._lease, self._clock())

    async def take(self, candidate: Candidate, secret: str, valid_s: float) -> Lease | None:
        """Gives the lease to the candidate, in a new term; None when it is not free."""
        sighting = await self.read()
        if not rules.is_free(sighting, candidate, valid_s):
            return None
        self._lease = rules.taken(sighting, candidate, secret, valid_s)
        return self._lease

    async def renew(self, lease: Lease, valid_s: float) -> bool:
        """Lets a term go on, for `valid_s` from now; False when it is over."""
        now = self._lease
        if now is None or (now.term, now.holder) != (lease.term, lease.holder):
            return False
        moment = self._clock()
        self._lease = dataclasses.replace(now, renewed_unix_s=moment, expires_unix_s=moment + valid_s)
        return True

    async def release(self, lease: Lease) -> None:
        """Ends a term, if it is not over."""
        if self._lease is not None and self._lease.term == lease.term:
            self._lease = dataclasses.replace(self._lease, holder="", secret="")

    async def close(self) -> None:
        """Lets go of nothing."""
