"""What selection asks of the past, in a SQL database."""

from __future__ import annotations

from sqlalchemy import Connection, and_, select

from fedplat.rounds import Participation
from fedplat.rounds.states import AttemptKind
from fedplat_server.store.database import Database
from fedplat_server.store.tables import assignments, attempts


class SqlParticipations:
    """What `SqlStore` does of `participations.ParticipationStore`."""

    _database: Database

    async def participations(self, job_id: str, rounds: range) -> list[Participation]:
        """The assignments of a job's attempts to train in these rounds; see the port."""
        mine = assignments.c
        same = [mine[name] == attempts.c[name] for name in ("job_id", "round", "number")]
        query = (
            select(mine.client_id, mine.round, mine.number, mine.num_examples, mine.took_s, mine.metrics)
            .join(attempts, and_(*same))
            .where(mine.job_id == job_id, mine.round >= rounds.start, mine.round < rounds.stop)
            .where(attempts.c.kind == AttemptKind.TRAIN)
            .order_by(mine.round, mine.number, mine.reported_revision.is_(None), mine.reported_revision, mine.client_id)
        )

        def work(connection: Connection) -> list[Participation]:
            return [Participation(*row) for row in connection.execute(query)]

        return await self._database.read(work)
