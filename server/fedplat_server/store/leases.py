"""What daemons that share a database ask of it to find out which of them leads.

A port of its own, with its own connections: a renewal must not wait behind the writes of rounds, nor as long as
those may take. Raises `StoreUnavailableError` when the database does not answer within a short time.
"""

from __future__ import annotations

from typing import Protocol

from fedplat_server.cluster.lease import Candidate, Lease, Sighting


class Leases(Protocol):
    """The port. Every method is atomic."""

    async def read(self) -> Sighting:
        """The lease as it is now."""
        ...

    async def take(self, candidate: Candidate, secret: str, valid_s: float) -> Lease | None:
        """Gives the lease to the candidate, in a new term; None when it is not free."""
        ...

    async def renew(self, lease: Lease, valid_s: float) -> bool:
        """Lets a term go on, for `valid_s` from now; False when it is over."""
        ...

    async def release(self, lease: Lease) -> None:
        """Ends a term, if it is not over."""
        ...

    async def close(self) -> None:
        """Lets go of every connection."""
        ...
