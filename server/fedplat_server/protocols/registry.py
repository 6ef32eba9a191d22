"""Which half each kind has, by the names of `fedplat.rounds.protocols.registry`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fedplat.job import JobSpec
from fedplat.rounds import Change, JobState
from fedplat.rounds.protocols import base, registry
from fedplat.rounds.states import AttemptKind
from fedplat_server.protocols.evaluation import EvaluationHalf, WarmStartHalf
from fedplat_server.protocols.flower_app import FlowerAppHalf
from fedplat_server.protocols.gossip import GossipHalf
from fedplat_server.protocols.half import HalfParts, ServerHalf
from fedplat_server.protocols.secure import SecureHalf
from fedplat_server.protocols.ssp import StaleSynchronousHalf

HALVES: Mapping[str, type[ServerHalf]] = {
    "sync": ServerHalf,
    "buffered": ServerHalf,
    "ssp": StaleSynchronousHalf,
    "cyclic": ServerHalf,
    "secure": SecureHalf,
    "gossip": GossipHalf,
    "flower_app": FlowerAppHalf,
    "evaluation": EvaluationHalf,
    "warm_start": WarmStartHalf,
}


class ServerHalves:
    """The halves of a leading daemon, one for each row. A private job has that of its inner protocol."""

    def __init__(self, parts: HalfParts) -> None:
        self._halves = {name: make(parts) for name, make in HALVES.items()}
        self._inner = {each.name: each.name.removeprefix("private ") for each in registry.PRIVATE}

    def training_of(self, spec: JobSpec) -> ServerHalf:
        """Return the half of the training of jobs with a job file."""
        return self._find(base.training_name(spec))

    def of(self, job: JobState, kind: AttemptKind) -> ServerHalf:
        """Return the half of a job's attempts, or assignments, of a kind."""
        return self._find(base.protocol_of(job, kind).name)

    async def keep(self, jobs: Sequence[JobState], attempts: Collection[str]) -> None:
        """Remove what an earlier process has left: each half for its jobs."""
        for half in self._halves.values():
            await half.keep([job for job in jobs if half in self._list(job)], attempts)

    def begin(self) -> None:
        """Start the background tasks of the halves."""
        for half in self._halves.values():
            half.begin()

    def on_stored(self, change: Change) -> None:
        """Let the halves of a job follow a stored change of it."""
        for half in self._list(change.job):
            half.on_stored(change)

    async def close(self) -> None:
        """End what the halves have started."""
        for half in self._halves.values():
            await half.close()

    def _list(self, job: JobState) -> list[ServerHalf]:
        return [self._find(protocol.name) for protocol in base.list_protocols(job)]

    def _find(self, name: str) -> ServerHalf:
        return self._halves[self._inner.get(name, name)]
