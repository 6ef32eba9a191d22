"""Which half each kind has, by the names of `fedplat.rounds.protocols.registry`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from fedplat.job import JobSpec
from fedplat.rounds import Change, JobState
from fedplat.rounds.protocols import base, registry
from fedplat.rounds.states import AttemptKind
from fedplat_server.aggregation.secure_attempts import SecureAttempts
from fedplat_server.database.sql_clients import ClientStore
from fedplat_server.flower.runs import FlowerRuns
from fedplat_server.protocols import evaluation, flower_app, gossip, procedure, relay, ssp
from fedplat_server.protocols.half import HalfParts, ServerHalf, StepPolls
from fedplat_server.protocols.relay import SilenceMonitor
from fedplat_server.protocols.secure import SecureHalf


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindParts:
    """The parts from which each half gets its own."""

    common: HalfParts
    calls: StepPolls
    secure: SecureAttempts
    make_relay: Callable[[relay.ListWaiting], relay.Relay]
    clients: ClientStore
    flower: FlowerRuns


def _make_plain(parts: KindParts) -> ServerHalf:
    return ServerHalf(parts.common)


def _make_gossip(parts: KindParts) -> ServerHalf:
    runner, clock = parts.calls.runner, asyncio.get_running_loop().time
    silence = SilenceMonitor(runner.coordinator, parts.calls.clients, runner.post, clock)
    return gossip.GossipHalf(parts.common, parts.calls, parts.clients, parts.make_relay, silence)


HALVES: Mapping[str, Callable[[KindParts], ServerHalf]] = {
    "sync": _make_plain,
    "buffered": _make_plain,
    "ssp": lambda parts: ssp.StaleSynchronousHalf(parts.common),
    "cyclic": _make_plain,
    "secure": lambda parts: SecureHalf(parts.common, parts.calls, parts.secure),
    "gossip": _make_gossip,
    "flower_app": lambda parts: flower_app.FlowerAppHalf(parts.common, parts.flower),
    "procedure": lambda parts: procedure.ProcedureHalf(parts.common),
    "secure_procedure": lambda parts: procedure.SecureProcedureHalf(parts.common, parts.calls, parts.secure),
    "evaluation": lambda parts: evaluation.EvaluationHalf(parts.common),
    "warm_start": lambda parts: evaluation.WarmStartHalf(parts.common),
}


class ServerHalves:
    """The halves of a leading daemon, one for each row. A private job has that of its inner protocol."""

    def __init__(self, halves: Mapping[str, ServerHalf]) -> None:
        self._halves = halves
        self._inner = {each.name: each.name.removeprefix("private ") for each in registry.PRIVATE}

    @classmethod
    def make(cls, parts: KindParts) -> ServerHalves:
        """Make the half of each kind."""
        return cls({name: make(parts) for name, make in HALVES.items()})

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

    def on_stored(self, changes: Iterable[Change]) -> None:
        """Let the halves of jobs follow stored changes, and drop what attempts with a new version have begun."""
        for change in changes:
            for half in self._list(change.job):
                half.on_stored(change)
            if change.committed is not None:
                self.training_of(change.job.spec).end(change.committed)

    async def close(self) -> None:
        """End what the halves have started."""
        for half in self._halves.values():
            await half.close()

    def _list(self, job: JobState) -> list[ServerHalf]:
        return [self._find(protocol.name) for protocol in base.list_protocols(job)]

    def _find(self, name: str) -> ServerHalf:
        return self._halves[self._inner.get(name, name)]
