"""The server's half of stale synchronous parallel jobs: only their clocks are shown."""

from __future__ import annotations

from typing_extensions import override

from fedplat.rounds import JobState
from fedplat.rounds.protocols import ssp
from fedplat.wire.v1 import admin_pb2
from fedplat_server.protocols.half import ServerHalf

MAX_NAMED = 10
"""Number of clients that wait for slower ones which a description of a job names."""


class StaleSynchronousHalf(ServerHalf):
    """Stale synchronous parallel jobs: clients are averaged as in a buffered job."""

    @override
    def show(self, job: JobState) -> admin_pb2.Job:
        found, withheld = ssp.clocks_of(job), ssp.list_withheld(job)
        clocks = admin_pb2.Clocks(
            minimum=found.minimum,
            maximum=found.maximum,
            num_members=len(found.clocks),
            num_withheld=len(withheld),
            withheld=withheld[:MAX_NAMED],
            num_resting=len(found.list_resting()),
        )
        return admin_pb2.Job(num_rounds=job.spec.rounds, clocks=clocks)
