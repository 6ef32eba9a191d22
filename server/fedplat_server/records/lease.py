"""Who leads: one lease for all jobs of a database, as pure rules. Clocks and randomness are arguments.

The term is a fencing token (M. Kleppmann, "How to do distributed locking", 2016): every write of a leader checks, in
the same transaction, that its term is still the lease's. So a leader that was stopped or cut off can do no harm
when it comes back, whatever it believes. That it believes the right thing most of the time is the business of the
moments: the lease ends on the database's clock, and its holder counts a shorter time on its own monotonic clock.
"""

from __future__ import annotations

import dataclasses

from fedplat_server.config import LeaseTimes


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A daemon that would lead: its id, new for each process, and the address that other daemons reach it at."""

    holder: str
    address: str


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """Who leads, in which term. Moments are seconds on the database's clock; no `holder`: it was released.

    `secret` is known to the daemons of the database only: it marks the calls that a gateway passes on.
    """

    holder: str
    address: str
    term: int
    secret: str = dataclasses.field(repr=False)
    renewed_unix_s: float
    expires_unix_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseReading:
    """The lease as it was read, at a moment on the database's clock; None if nobody has ever led."""

    lease: Lease | None
    now_unix_s: float


def is_free(sighting: LeaseReading, candidate: Candidate, valid_s: float) -> bool:
    """Whether the candidate may take the lease.

    A lease of its own, of which it knows nothing any more, it takes anew: what it wrote in the old term is fenced off.
    """
    lease, now = sighting.lease, sighting.now_unix_s
    if lease is None or lease.holder in ("", candidate.holder) or now >= lease.expires_unix_s:
        return True
    # The database's clock was set back, and nobody has renewed since: else that would last as long as the step was.
    return now < lease.renewed_unix_s - valid_s


def take_lease(sighting: LeaseReading, candidate: Candidate, secret: str, valid_s: float) -> Lease:
    """The lease as the candidate holds it, from now on."""
    now = sighting.now_unix_s
    term = sighting.lease.term + 1 if sighting.lease is not None else 1
    return Lease(candidate.holder, candidate.address, term, secret, now, now + valid_s)


@dataclasses.dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease in the eyes of its holder: it leads until `ends_at` on its monotonic clock, unless it renews."""

    lease: Lease
    renewed_at: float
    ends_at: float

    @classmethod
    def since(cls, lease: Lease, asked_at: float, times: LeaseTimes) -> HeldLease:
        """A tenure that the database granted. It counts from the question: who knows how long the answer took."""
        return cls(lease, asked_at, asked_at + times.valid_s - times.margin_s)

    def renew(self, asked_at: float, times: LeaseTimes) -> HeldLease:
        """The tenure after the database has renewed the lease."""
        return HeldLease.since(self.lease, asked_at, times)

    def is_over(self, now: float) -> bool:
        """Whether somebody else may lead, as far as the holder can know."""
        return now >= self.ends_at

    def next_renewal(self, times: LeaseTimes) -> float:
        """When to ask the database again."""
        return self.renewed_at + times.renew_s
