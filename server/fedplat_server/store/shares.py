"""What the transaction that writes assignments of a private job makes sure of, whatever the coordinator believes.

A client takes part in one of any `min_separation + 1` consecutive rounds at most, and in `max_participations` rounds:
the accounting counts on both (`fedplat.privacy.Mechanism`). Every assignment counts, whatever came of it; those of one
round count once, since one of its attempts is released at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from sqlalchemy import Connection, distinct, func, or_, select

from fedplat.job import JobSpec
from fedplat.rounds import AttemptKey, Change
from fedplat_server.errors import ParticipationError
from fedplat_server.store.tables import assignments


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """How far apart the rounds of a client have to be, and how many they may be (0: any number)."""

    min_separation: int
    max_participations: int

    def is_too_near(self, one: int, other: int) -> bool:
        """Whether a client may not take part in both rounds."""
        return 0 < abs(one - other) <= self.min_separation

    def refusal(self, key: AttemptKey, client_id: str, num_rounds: int) -> ParticipationError:
        """The error for an assignment with which the client takes part in so many rounds."""
        most = self.max_participations
        if 0 < most < num_rounds:
            why = f"it would take part in {num_rounds} rounds (privacy.max_participations = {most})"
        else:
            why = f"it takes part in a round too near by (selection.min_separation = {self.min_separation})"
        return ParticipationError(f"{key} must not have client {client_id}: {why}; nothing was written")


def share_of(spec: JobSpec) -> Share | None:
    """What holds for each client of a job; None if nothing does."""
    share = Share(spec.selection.min_separation, spec.max_participations)
    return share if share != Share(0, 0) else None


def begun(change: Change) -> Iterable[tuple[AttemptKey, Share]]:
    """The attempts of private jobs in which a change makes assignments."""
    share = share_of(change.job.spec) if change.job.spec.privacy is not None else None
    if share is not None:
        for row in change.history:
            if row.entity == "assignment" and not row.from_state:
                yield AttemptKey(change.job.job_id, row.round, row.attempt), share


def require(connection: Connection, key: AttemptKey, share: Share) -> None:
    """Raises `ParticipationError` if the attempt has a client that takes part too often; its rows are written."""
    mine, other = assignments.alias("mine"), assignments.alias("other")
    # Of each client by itself, so that no planner is tempted to join all assignments of a long job.
    same = (other.c.job_id == key.job_id) & (other.c.client_id == mine.c.client_id)
    near = other.c.round.between(key.round - share.min_separation, key.round + share.min_separation)
    num_near = select(func.count()).where(same, near, other.c.round != key.round).scalar_subquery()
    num_rounds = select(func.count(distinct(other.c.round))).where(same).scalar_subquery()
    wrong = [num_near > 0] if share.min_separation else []
    wrong += [num_rounds > share.max_participations] if share.max_participations else []
    made = (mine.c.job_id == key.job_id) & (mine.c.round == key.round) & (mine.c.number == key.number)
    query = select(mine.c.client_id, num_rounds).where(made, or_(*wrong)).limit(1)
    found = connection.execute(query).one_or_none()
    if found is not None:
        raise share.refusal(key, *found)
