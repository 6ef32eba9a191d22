"""The driver of a decentralised job: the production coordinator, simulated silos and links, and virtual time.

In a round each silo trains (examples x epochs / speed), announces its model, and gets those of its neighbours one after
the other; a sender's upload is shared by its receivers. Silos that are late announce in the next round instead.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fedplat.gossip import distance_from_mean
from fedplat.gossip.coordinator import begin, step
from fedplat.gossip.messages import (
    KEY_BYTES,
    Announcement,
    AssignNeighbours,
    BeginRing,
    BeginRound,
    CommitAverage,
    CommitRow,
    EndJob,
    GossipCommand,
    GossipEvent,
    KeyOffered,
    ModelMissed,
    ModelReceived,
    RequestKeys,
    RingCompleted,
    SetTimer,
    SiloAnnounced,
    SiloDeparted,
    SiloReturned,
    TimerPassed,
)
from fedplat.gossip.state import GossipPhase, GossipRules, GossipState
from fedplat.job import JobSpec
from fedplat.model import Parameters
from fedplat.simulation.clients import Fleet
from fedplat.simulation.clients.distributions import hash_uniform, hashed_normal
from fedplat.simulation.clients.event_queue import EventQueue
from fedplat.simulation.clients.links import LinkOptions
from fedplat.simulation.gossip.silos import SiloModels
from fedplat.simulation.recording.result import AttemptResult, GossipExchange, describe_end
from fedplat.simulation.recording.statistics import Observer

_SILENCES = 3
"""Heartbeats that a silo misses until it counts as departed."""
MAX_FAILURES = 20
"""Failed attempts in a row that end a simulation."""
_LOSS, _ABSENT, _NOISE = 0x10551, 0xAB5E, 0x2015E


def rules_of(spec: JobSpec) -> GossipRules:
    """Return the rules of a decentralised job."""
    assert spec.gossip is not None
    return GossipRules(
        options=spec.gossip,
        rounds=spec.rounds,
        goal=spec.selection.goal,
        minimum=spec.selection.minimum,
        training_s=spec.deadlines.training_s,
        exchange_s=spec.deadlines.upload_s,
        max_attempts=spec.retry.max_attempts,
        by_examples=spec.updates.weighting == "examples",
    )


class _Traffic:
    """The bytes that each silo has sent and received in a round."""

    def __init__(self, count: int) -> None:
        self.sent: npt.NDArray[np.float64] = np.zeros(count)
        self.received: npt.NDArray[np.float64] = np.zeros(count)


@dataclasses.dataclass
class _Silo:
    """What a silo is doing: `trains` until its model is `ready` to be announced.

    `mixed` is the last round that it mixed, and `announced` the last one that it announced a model for.
    """

    trains: bool = False
    ready: bool = False
    mixed: int = 0
    announced: int = 0


class GossipDriver:
    """One decentralised job, its silos and the clock; `observe` is called with each round that has ended."""

    def __init__(
        self,
        spec: JobSpec,
        fleet: Fleet,
        models: SiloModels,
        links: LinkOptions,
        seed: int,
        observe: Observer | None = None,
    ) -> None:
        self.now, self.records = 0.0, list[AttemptResult]()
        self.state = GossipState(rules_of(spec))
        self.exported: Parameters | None = None
        self.merged: npt.NDArray[np.int64] = np.zeros(models.count, np.int64)
        self.num_events = 0
        self._spec, self._fleet, self._models, self._links, self._seed = spec, fleet, models, links, seed
        self._observe = observe
        self._silos = [_Silo() for _ in range(models.count)]
        self._queue: EventQueue[Callable[[], GossipEvent | None]] = EventQueue()
        self._timer: tuple[int, float] = (0, np.inf)
        self._opened_at = 0.0
        self._traffic = _Traffic(models.count)
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._mean: Parameters | None = None

    def run(self, until_s: float) -> str:
        """Run until the job has ended or cannot progress, or until `until_s`. Raises what training raises.

        Return why it is still running then; empty if it is not.
        """
        self._apply(*begin(self.state.rules))
        while self.state.phase is not GossipPhase.ENDED:
            moment = min(self._queue.first(), self._timer[1])
            if moment > until_s:
                return describe_end(until_s)
            if self.state.failures >= MAX_FAILURES:
                return f"no progress after {self.state.failures} failed attempts in a row; last: {self.state.reason}"
            self.now = max(self.now, moment)
            if self._queue.first() <= self._timer[1]:
                for make_event in self._queue.due(self.now):
                    if (event := make_event()) is not None:
                        self._process(event)
            else:
                number, self._timer = self._timer[0], (0, np.inf)
                self._process(TimerPassed(number))
        return ""

    def _process(self, event: GossipEvent) -> None:
        self.num_events += 1
        self._apply(*step(self.state, event))

    def _apply(self, state: GossipState, commands: Sequence[GossipCommand]) -> None:
        before, self.state = self.state, state
        rows = [each for each in commands if isinstance(each, CommitRow)]
        for row in rows:
            self._mix(row)
        if rows and state is not before:
            self._record(before, state)
        assigns = [each for each in commands if isinstance(each, AssignNeighbours)]
        if assigns:
            self._exchange(assigns)
        for command in commands:
            self._carry_out(command, before)

    def _carry_out(self, command: GossipCommand, before: GossipState) -> None:
        match command:
            case BeginRound():
                self._begin_round(command)
            case SetTimer():
                self._timer = command.timer, self.now + command.seconds
            case RequestKeys():
                self._offer_keys(command)
            case BeginRing():
                self._run_ring(command)
            case CommitAverage():
                self._take_average(command, before)
            case EndJob():
                self.exported = self._mean if command.status == "COMPLETED" else None
            case AssignNeighbours() | CommitRow():
                pass  # carried out together, before the others

    def _begin_round(self, command: BeginRound) -> None:
        number = command.round
        self._opened_at = self.now
        self._traffic, self._metrics = _Traffic(self._models.count), {}
        here = [silo for silo in range(self._models.count) if self._takes_part(silo, number)]
        for silo in here:
            self._catch_up(silo)
            if str(silo) in self.state.away:
                self._after(0.0, SiloReturned, str(silo))
        for silo in range(self._models.count):
            if silo not in here and str(silo) not in self.state.away:
                self._after(_SILENCES * self._spec.deadlines.heartbeat_s, self._depart, silo, number)
        idle = [silo for silo in here if not self._silos[silo].trains and not self._silos[silo].ready]
        if command.trains and idle:
            self._models.begin_training(idle, number)
        for silo in here:
            state = self._silos[silo]
            if silo in idle and command.trains:
                state.trains = True
                self._after(self._training_s(silo, number), self._finish, silo)
            elif not state.trains:
                state.ready = True
                self._after(0.0, self._announce, silo)

    def _takes_part(self, silo: int, number: int) -> bool:
        """Return whether a silo is there in a round: it is not dead, and does not fail or vanish by chance."""
        options = self._fleet.options
        chance = float(hash_uniform(self._seed ^ _ABSENT, np.array([silo]), number)[0])
        return not self._links.is_dead(silo, number) and chance >= options.fails + options.vanishes

    def _is_gone(self, silo: int, number: int) -> bool:
        """Return whether a silo is dead at the end of a round."""
        return self._links.is_dead(silo, number, at_end=True)

    def _catch_up(self, silo: int) -> None:
        """Mix the row that a silo was sent while it was away, or take the mean of a ring that it missed."""
        row, average = self.state.rows.get(str(silo)), self.state.average
        if row is not None and row.round > self._silos[silo].mixed:
            self._mix(row)
        if average is not None and average.round > self._silos[silo].mixed and self._mean is not None:
            self._models.replace_all(self._mean, [silo])
            self._silos[silo] = _Silo(mixed=average.round)

    def _training_s(self, silo: int, number: int) -> float:
        fleet, options = self._fleet, self._fleet.options
        seconds = float(fleet.examples[silo] / fleet.speed[silo]) * float(self._spec.config.get("epochs", 1))
        if options.noise:
            seconds *= float(np.exp(options.noise * hashed_normal(self._seed ^ _NOISE, np.array([silo]), number)[0]))
        return seconds

    def _finish(self, silo: int) -> GossipEvent | None:
        metrics = self._models.finish_training(silo)
        self._silos[silo].trains, self._silos[silo].ready = False, metrics is not None
        if metrics is None:
            return SiloDeparted(str(silo))  # until the next round
        self._metrics[silo] = metrics
        self._after(float(self._fleet.latency_s[silo]), self._announce, silo)
        return None

    def _announce(self, silo: int) -> GossipEvent | None:
        state, number, average = self._silos[silo], self.state.round, self.state.average
        if self.state.phase is not GossipPhase.ANNOUNCING or not state.ready or state.announced == number:
            return None  # it announces when the next round begins
        if average is not None and average.round > state.mixed:
            self._catch_up(silo)  # what it has trained was from an old model
            return None
        state.announced = number
        self._models.publish(silo, number)
        model = self._models.model_of(silo).astype(np.float64)
        announcement = Announcement(
            digest=f"model-{silo}-{number}",
            size_bytes=self._models.model_bytes,
            num_examples=float(self._fleet.examples[silo]),
            squared_norm=float(model @ model),
        )
        return SiloAnnounced(str(silo), number, announcement, state.mixed)

    def _exchange(self, assigns: Sequence[AssignNeighbours]) -> None:
        """Plan when each model arrives, and which are lost."""
        number = self.state.round
        pairs = [(int(each.silo), int(assign.silo)) for assign in assigns for each in assign.neighbours]
        links = np.array(pairs, np.int64).reshape(-1, 2)
        lost = self._links.is_lost(self._seed ^ _LOSS, number, links)
        fan_out = Counter(links[:, 0].tolist())
        ready: dict[int, float] = {}
        for (sender, receiver), is_lost in zip(links.tolist(), lost.tolist(), strict=True):
            size = self._models.pull_bytes(receiver, sender)
            rate = min(self._fleet.download[receiver], self._fleet.upload[sender] / fan_out[sender])
            latency = self._fleet.latency_s[receiver] + self._fleet.latency_s[sender]
            ready[receiver] = ready.get(receiver, 0.0) + float(latency + size / rate)
            if is_lost:
                self._after(ready[receiver], self._miss, receiver, sender)
            else:
                self._after(ready[receiver], self._receive, receiver, sender, size, number)

    def _receive(self, receiver: int, sender: int, size: int, number: int) -> GossipEvent | None:
        if (self.state.phase, self.state.round) != (GossipPhase.EXCHANGING, number):
            return None
        distance = self._models.store(receiver, sender)
        self._traffic.sent[sender] += size
        self._traffic.received[receiver] += size
        digest = self.state.announced[str(sender)].digest
        return ModelReceived(str(receiver), str(sender), number, digest, distance)

    def _miss(self, receiver: int, sender: int) -> GossipEvent:
        return ModelMissed(str(receiver), str(sender), self.state.round)

    def _depart(self, silo: int, number: int) -> GossipEvent | None:
        return SiloDeparted(str(silo)) if self.state.round == number else None

    def _mix(self, row: CommitRow) -> None:
        silo = int(row.silo)
        if self._is_gone(silo, self.state.round) and self._is_gone(silo, row.round):
            return  # it mixes when it is back
        self._models.mix(row)
        self._silos[silo] = _Silo(mixed=row.round)

    def _offer_keys(self, command: RequestKeys) -> None:
        for name in command.members:
            silo = int(name)
            if self._is_gone(silo, command.round):
                self._after(_SILENCES * self._spec.deadlines.heartbeat_s, self._depart, silo, command.round)
            else:
                self._after(float(self._fleet.latency_s[silo]), self._offer_key, silo, command.round, command.attempt)

    def _offer_key(self, silo: int, number: int, attempt: int) -> GossipEvent:
        key = silo.to_bytes(KEY_BYTES, "big")  # stands for a key: masks change no result
        return KeyOffered(
            silo=str(silo),
            round=number,
            attempt=attempt,
            key=key,
            largest=self._models.largest(silo),
            mixed_round=self._silos[silo].mixed,
        )

    def _run_ring(self, command: BeginRing) -> None:
        silos = [int(member.silo) for member in command.members]
        self._mean, digest = self._models.reduce(command)
        key = command.round, command.attempt
        count, size = len(silos), self._models.model_bytes
        sent = 2 * (count - 1) / count * size
        self._traffic.sent[silos] += sent
        self._traffic.received[silos] += sent
        rate = float(min(self._fleet.upload[silos].min(), self._fleet.download[silos].min()))
        latency = 2.0 * float(self._fleet.latency_s[silos].max())
        duration = 2 * (count - 1) * (latency + size / count / rate)
        for silo in silos:
            away = self._models.distance_from(silo, self._mean)
            self._after(duration, self._complete, silo, RingCompleted(str(silo), *key, digest, away))

    def _complete(self, silo: int, event: RingCompleted) -> GossipEvent | None:
        return None if self._is_gone(silo, event.round) else event

    def _take_average(self, command: CommitAverage, before: GossipState) -> None:
        """Replace models by the mean, which with `exchange = "ring"` ends a round and else the job."""
        if self.state is before or self._mean is None:
            return
        here = [silo for silo in range(self._models.count) if not self._is_gone(silo, command.round)]
        idle = [silo for silo in here if not self._silos[silo].trains]
        self._models.replace_all(self._mean, idle)
        for silo in idle:
            self._silos[silo] = _Silo(mixed=command.round)
        if self.state.rules.options.exchange == "ring":
            self._record(before, self.state)

    def _after(self, seconds: float, make_event: Callable[..., GossipEvent | None], *arguments: object) -> None:
        self._queue.put(self.now + seconds, lambda: make_event(*arguments))

    def _record(self, before: GossipState, after: GossipState) -> None:
        """Record the round that has ended."""
        number, rounds = before.round, self._spec.rounds
        members = [int(name) for name in before.announced]
        self.merged[members] += 1
        is_due = self._spec.evaluation.is_due(number, rounds)
        exchange = GossipExchange(
            silos=len(members),
            edges=len(before.edges),
            confirmed=after.confirmed,
            trains=number <= rounds,
            distance=distance_from_mean(self._models.models()),
            reported=after.consensus.relative,
            busiest_bytes=float(np.max(self._traffic.sent + self._traffic.received)),
        )
        record = AttemptResult(
            round=number,
            attempt=max(before.attempt, 1),
            kind="TRAIN",
            phase="COMMITTED",
            opened_at=self._opened_at,
            collecting_at=self._opened_at,
            ended_at=self.now,
            version=number,
            counts={"MERGED": len(members)},
            metrics=self._mean_metrics(),
            evaluation=dict(self._models.evaluate()) if is_due else {},
            num_updates=len(members),
            total_weight=float(self._fleet.examples[members].sum()),
            bytes_down=float(self._traffic.received.sum()),
            bytes_up=float(self._traffic.sent.sum()),
            exchange=exchange,
        )
        self.records.append(record)
        if self._observe is not None:
            self._observe(record)

    def _mean_metrics(self) -> dict[str, float]:
        """Return the mean of each metric that all silos reported, weighted by their examples."""
        if not self._metrics:
            return {}
        names = set[str].intersection(*(set(each) for each in self._metrics.values()))
        weights = self._fleet.examples[list(self._metrics)]
        return {
            name: float(np.average([each[name] for each in self._metrics.values()], weights=weights))
            for name in sorted(names)
        }
