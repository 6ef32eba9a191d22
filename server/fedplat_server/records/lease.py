"""Leadership: one lease for all jobs of a database, as pure rules. Clocks and randomness are arguments.

The term is a fencing token (M. Kleppmann, "How to do distributed locking", 2016): every write of a leader checks, in
the same transaction, that its term is still that of the lease. So a leader that was suspended or disconnected cannot
write when it resumes, even if it still considers itself the leader. The times make this rare: the lease ends on the
database's clock, and its holder stops after a shorter time on its own monotonic clock.
"""

from __future__ import annotations

import dataclasses

from fedplat_server.config import LeaseTimes


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A daemon that may lead: its id, new for each process, and its address for other daemons."""

    holder: str
    address: str


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """The lease: its holder and term. Times are on the database's clock; `holder` is empty if it was released.

    `secret` is known only to the daemons of the database: it authenticates the calls that a gateway forwards.
    """

    holder: str
    address: str
    term: int
    secret: str = dataclasses.field(repr=False)
    renewed_unix_s: float
    expires_unix_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseReading:
    """The lease as read at a time on the database's clock; None if no daemon has ever led."""

    lease: Lease | None
    now_unix_s: float


def is_free(reading: LeaseReading, candidate: Candidate, valid_s: float) -> bool:
    """Return whether the candidate may take the lease.

    A candidate may take its own lease, if it has lost track of it: the new term fences the writes of the old one.
    """
    lease, now = reading.lease, reading.now_unix_s
    if lease is None or lease.holder in ("", candidate.holder) or now >= lease.expires_unix_s:
        return True
    # The clock was set back after the last renewal: without this, the lease would stay taken for that time as well.
    return now < lease.renewed_unix_s - valid_s


def take_lease(reading: LeaseReading, candidate: Candidate, secret: str, valid_s: float) -> Lease:
    """Return the lease that the candidate takes now, with the next term."""
    now = reading.now_unix_s
    term = reading.lease.term + 1 if reading.lease is not None else 1
    return Lease(candidate.holder, candidate.address, term, secret, now, now + valid_s)


@dataclasses.dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease as its holder sees it: valid until `ends_at` on the holder's monotonic clock, unless renewed."""

    lease: Lease
    renewed_at: float
    ends_at: float

    @classmethod
    def since(cls, lease: Lease, requested_at: float, times: LeaseTimes) -> HeldLease:
        """Return a granted lease, which counts from the time of the request: the delay of the reply is unknown."""
        return cls(lease, requested_at, requested_at + times.valid_s - times.margin_s)

    def renew(self, requested_at: float, times: LeaseTimes) -> HeldLease:
        """Return the lease after the database has renewed it, on a request at this time."""
        return HeldLease.since(self.lease, requested_at, times)

    def is_over(self, now: float) -> bool:
        """Return whether another daemon may lead, as far as the holder can know."""
        return now >= self.ends_at

    def next_renewal(self, times: LeaseTimes) -> float:
        """Return when to renew the lease in the database."""
        return self.renewed_at + times.renew_s
