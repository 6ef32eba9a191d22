"""The silos of a decentralised job: they train, announce their models, and follow the instructions of the coordinator.

What a silo has to do follows from the stored state of the job, as for the SDK (`fedplat.gossip.steps.instruct`). It
gets the models of its neighbours one after the other; a sender's upload is shared by its receivers. A silo whose
training is late trains on, and announces its model in the next round.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedplat.gossip import distance_from_mean, messages, steps
from fedplat.gossip.state import GossipPhase, GossipState
from fedplat.gossip.steps import AdoptMean, Contact, FetchModels, MixModels, Progress, ReduceModels, SendKey
from fedplat.model import Parameters
from fedplat.rounds import Attempt, JobState, commands, states
from fedplat.rounds.events import AssignmentFailed, Event, SiloReported, SilosLost
from fedplat.rounds.protocols.gossip import state_of
from fedplat.simulation.clients.device import DeviceAssignment, Sizes
from fedplat.simulation.gossip.silos import SiloTraining
from fedplat.simulation.protocols.base import ClientBehaviour, ClientWork
from fedplat.simulation.recording.result import GossipExchange

MISSED_HEARTBEATS = 3
"""Heartbeats that a silo misses until the server takes it for lost."""
_LOSS = 0x10551
_EXCHANGES = (GossipPhase.ANNOUNCING, GossipPhase.EXCHANGING)


@dataclasses.dataclass
class _Silo:
    """A silo: the assignment for which it trains, and its trained model as long as that is not mixed.

    `begun` is the last phase of the job in which it has begun to do something, by the number of its timer.
    """

    done: Progress = dataclasses.field(default_factory=Progress)
    training: DeviceAssignment | None = None
    is_trained: bool = False
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    begun: int = -1


class _Transfer(NamedTuple):
    """The model of a neighbour on its way to a silo."""

    task: DeviceAssignment
    sender: int
    size: int
    digest: str


class _Answer(NamedTuple):
    """What a silo reports, once it has arrived."""

    task: DeviceAssignment
    event: messages.GossipEvent


class SiloBehaviour(ClientBehaviour):
    """Silos that exchange models; `_dead` are those that `simulation.links.dead` has stopped."""

    def __init__(self, work: ClientWork) -> None:
        super().__init__(work)
        assert isinstance(work.training, SiloTraining)
        self._training, self._models, self._links = work.training, work.training.models, work.training.links
        self._silos = [_Silo() for _ in range(self._models.count)]
        self._dead: set[int] = set()
        self._means: dict[str, Parameters] = {}
        self._ring: tuple[int, int, str] = 0, 0, ""
        self._begun = -1
        self._fan_out: tuple[int, Counter[str]] = -1, Counter()
        self._bytes: npt.NDArray[np.float64] = np.zeros(self._models.count)

    # --- an assignment ---------------------------------------------------------------------------------------

    @override
    def first_sizes(self, round: int) -> Sizes:
        return self._training.sizes._replace(update=0.0)

    @override
    def begin(self, tasks: Sequence[DeviceAssignment]) -> None:
        super().begin(tasks)
        begun = {task.client: task.fraction for task in tasks if self._silos[task.client].training is task}
        if begun:
            self._models.begin_training(begun, tasks[0].key.round)

    @override
    def plan_first(self, task: DeviceAssignment) -> None:
        """Do what the silo has missed, then train, unless a trained model is there or the round has none."""
        silo, state = self._silos[task.client], state_of(self.work.job)
        silo.begun = -1
        self._follow(task)
        if task.client_id in state.announced:
            return  # it was away meanwhile
        if state.round <= state.rules.rounds and not silo.is_trained:
            silo.training = task
            self.work.schedule(task.report_at, self._finish_training, task)
        else:
            self.work.schedule(self._arrival(task.client), self._announce, task)

    def _finish_training(self, task: DeviceAssignment) -> Event | None:
        silo, client = self._silos[task.client], task.client
        if silo.training is not task:
            return None
        metrics, silo.training = self._models.finish_training(client), None
        if metrics is not None:
            silo.is_trained, silo.metrics = True, metrics
        if task.is_over:  # it was late: its model is announced in the next round
            self.work.idle.on_finished(client, self.work.now, failed=metrics is None)
            return None
        if metrics is None:
            text = "the trained model cannot be used (has the training diverged?)"
            return AssignmentFailed(task.key, task.client_id, states.Reason.TRAINER_ERROR, text)
        return self._announce(task)

    def _announce(self, task: DeviceAssignment) -> Event | None:
        if task.is_over:
            return None
        silo, number = self._silos[task.client], task.key.round
        self._models.publish(task.client, number)
        model = self._models.model_of(task.client).astype(np.float64)
        announcement = messages.Announcement(
            digest=f"model-{task.client}-{number}",
            size_bytes=self._models.model_bytes,
            num_examples=float(self.work.fleet.examples[task.client]),
            squared_norm=float(model @ model),
        )
        event = messages.SiloAnnounced(task.client_id, number, announcement, silo.done.mixed_round)
        return SiloReported(task.key, task.client_id, (event,), silo.metrics)

    @override
    def on_lost(self, task: DeviceAssignment) -> None:
        self._drop_training(task)

    @override
    def stop(self, task: DeviceAssignment, command: commands.Abort) -> None:
        self.work.forget(task)
        if command.reason is not states.Reason.TRAIN_TIMEOUT:
            self._drop_training(task)
        if self._silos[task.client].training is not task:  # else it trains on
            self.work.idle.on_finished(task.client, self.work.now, failed=False)

    def _drop_training(self, task: DeviceAssignment) -> None:
        silo = self._silos[task.client]
        if silo.training is task:
            self._models.drop_training(task.client)
            silo.training = None

    # --- silos that are away ---------------------------------------------------------------------------------

    @override
    def go_offline(self, task: DeviceAssignment) -> None:
        is_here = not task.is_over
        super().go_offline(task)
        if is_here:
            self._await_loss(task.client, task.returns_at)

    def _die(self, task: DeviceAssignment) -> None:
        """Take a silo offline until a later round."""
        self.work.forget(task)
        self._dead.add(task.client)
        self._await_loss(task.client, np.inf)

    def _await_loss(self, silo: int, until: float) -> None:
        """Let the server notice that a silo is silent, if it is longer away than the server waits."""
        noticed_at = self.work.now + MISSED_HEARTBEATS * self.work.spec.deadlines.heartbeat_s
        if noticed_at < until:
            self.work.schedule(noticed_at, self._lose, (silo, until))

    def _lose(self, absence: tuple[int, float]) -> Event | None:
        silo, until = absence
        is_back = silo in self.work.tasks or (until == np.inf and silo not in self._dead)
        return None if is_back else SilosLost(self.work.job.job_id, (str(silo),))

    # --- the phases of a round -------------------------------------------------------------------------------

    @override
    def on_next_step(self, command: commands.NextStep) -> None:
        attempt = self.work.job.open_attempt
        if attempt is None or attempt.key != command.key:
            return  # it has ended: `on_attempt_ended`
        timer = state_of(self.work.job).timer
        if timer == self._begun:
            return  # each report of a phase wakes all silos, which have begun with theirs
        self._begun = timer
        for task in [task for task in self.work.tasks.values() if task.key == command.key]:
            is_over = state_of(self.work.job).phase not in _EXCHANGES
            if is_over and self._links.is_dead(task.client, command.key.round, at_end=True):
                self._die(task)
            else:
                self._follow(task)

    def _follow(self, task: DeviceAssignment) -> None:
        """Begin what a silo has to do now, unless it does it already."""
        state, silo = state_of(self.work.job), self._silos[task.client]
        found = self._catch_up(task.client, state)
        if silo.begun == state.timer:
            return
        silo.begun = state.timer
        match found:
            case FetchModels():
                self._fetch(task, found, state)
            case SendKey():
                self._send_at(self._arrival(task.client), task, self._offer_key(task, found, state))
            case ReduceModels():
                self._reduce(task, found.ring)
            case _:
                pass

    def _catch_up(self, client: int, state: GossipState) -> steps.Wait | FetchModels | SendKey | ReduceModels:
        """Mix and adopt what a silo has to; return what it has to do then."""
        silo = self._silos[client]
        while True:
            found = steps.instruct(state, str(client), silo.done, _contact)
            match found:
                case MixModels():
                    self._models.mix(found.row)
                    silo.done, silo.is_trained = Progress(found.row.round, silo.done.adopted_round), False
                case AdoptMean():
                    self._adopt(client, found, state)
                case _:
                    return found

    def _adopt(self, client: int, found: AdoptMean, state: GossipState) -> None:
        """Take a mean as the silo's model; at the end of an exchange with neighbours it is exported only."""
        silo, is_ring = self._silos[client], state.rules.options.exchange == "ring"
        if is_ring:
            self._models.replace_all(self._means[found.digest], [client])
            silo.is_trained = False
        silo.done = Progress(found.round if is_ring else silo.done.mixed_round, found.round)

    def _fetch(self, task: DeviceAssignment, found: FetchModels, state: GossipState) -> None:
        """Plan when each model arrives, and which are lost."""
        if self._fan_out[0] != state.timer:
            self._fan_out = state.timer, Counter(sender for senders in state.senders.values() for sender in senders)
        fleet, receiver, ready = self.work.fleet, task.client, self.work.now
        links = np.array([(int(each.contact.silo), receiver) for each in found.models], np.int64)
        lost = self._links.is_lost(self.work.seed ^ _LOSS, state.round, links)
        for each, is_lost in zip(found.models, lost.tolist(), strict=True):
            sender = int(each.contact.silo)
            size = self._models.pull_bytes(receiver, sender)
            rate = min(fleet.download[receiver], fleet.upload[sender] / self._fan_out[1][each.contact.silo])
            ready += float(fleet.latency_s[receiver] + fleet.latency_s[sender] + size / rate)
            if is_lost:
                self._send_at(ready, task, messages.ModelMissed(task.client_id, each.contact.silo, state.round))
            else:
                self.work.schedule(ready, self._receive, _Transfer(task, sender, size, each.digest))

    def _receive(self, transfer: _Transfer) -> Event | None:
        task, state = transfer.task, state_of(self.work.job)
        if task.is_over or (state.phase, state.round) != (GossipPhase.EXCHANGING, task.key.round):
            return None
        distance = self._models.store(task.client, transfer.sender)
        self._count_bytes([transfer.sender], [task.client], float(transfer.size))
        event = messages.ModelReceived(task.client_id, str(transfer.sender), state.round, transfer.digest, distance)
        return SiloReported(task.key, task.client_id, (event,))

    def _offer_key(self, task: DeviceAssignment, found: SendKey, state: GossipState) -> messages.KeyOffered:
        return messages.KeyOffered(
            silo=task.client_id,
            round=state.round,
            attempt=found.attempt,
            key=task.client.to_bytes(messages.KEY_BYTES, "big"),  # stands for a key: masks change no result
            largest=self._models.largest(task.client),
            mixed_round=self._silos[task.client].done.mixed_round,
        )

    def _reduce(self, task: DeviceAssignment, ring: messages.BeginRing) -> None:
        """Plan when a silo of a ring has the mean."""
        silos = [int(member.silo) for member in ring.members]
        sent = 2 * (len(silos) - 1) / len(silos) * self._models.model_bytes
        if self._ring[:2] != (ring.round, ring.attempt):
            average = state_of(self.work.job).average
            self._means = {key: mean for key, mean in self._means.items() if average and key == average.digest}
            mean, digest = self._models.reduce(ring)
            self._means[digest], self._ring = mean, (ring.round, ring.attempt, digest)
            self._count_bytes(silos, silos, sent)
        fleet, digest = self.work.fleet, self._ring[2]
        rate = float(min(fleet.upload[silos].min(), fleet.download[silos].min()))
        latency = 2.0 * float(fleet.latency_s[silos].max())
        duration = 2 * (len(silos) - 1) * (latency + self._models.model_bytes / len(silos) / rate)
        away = self._models.distance_from(task.client, self._means[digest])
        event = messages.RingCompleted(task.client_id, ring.round, ring.attempt, digest, away)
        self._send_at(self.work.now + duration, task, event)

    def _send_at(self, at: float, task: DeviceAssignment, event: messages.GossipEvent) -> None:
        self.work.schedule(at, self._send, _Answer(task, event))

    def _send(self, answer: _Answer) -> Event | None:
        task = answer.task
        return None if task.is_over else SiloReported(task.key, task.client_id, (answer.event,))

    def _arrival(self, client: int) -> float:
        return self.work.now + float(self.work.fleet.latency_s[client])

    def _count_bytes(self, senders: list[int], receivers: list[int], size: float) -> None:
        """Count a file that each of the senders has sent, and each of the receivers has got."""
        self._bytes[senders] += size
        self._bytes[receivers] += size
        self.work.statistics.bytes_up += size * len(senders)
        self.work.statistics.bytes_down += size * len(receivers)

    # --- the end of a round ----------------------------------------------------------------------------------

    @override
    def on_attempt_ended(self, job: JobState, attempt: Attempt) -> None:
        """Let the silos of a round mix, measure how far apart they are, and release them; others are aborted."""
        state, number = state_of(job), attempt.key.round
        if attempt.phase is not states.AttemptPhase.COMMITTED:
            return
        for name, assignment in attempt.assignments.items():
            task = self.work.tasks.get(int(name))
            if task is None or task.key != attempt.key or assignment.state is not states.AssignmentState.MERGED:
                continue
            if self._links.is_dead(task.client, number, at_end=True) and self._links.is_dead(task.client, number + 1):
                self._die(task)  # it mixes when it is back
            else:
                self._catch_up(task.client, state)
                self.finish(task, failed=False)
        if state.outcome is not None:
            self._training.model = self._means[state.outcome.digest]
        self._measure(attempt, state)
        self._revive(number + 1)

    def _measure(self, attempt: Attempt, state: GossipState) -> None:
        """Record the numbers of an exchange, and score the mean of all models."""
        metrics, number, rounds = attempt.metrics, attempt.key.round, state.rules.rounds
        exchange = GossipExchange(
            silos=int(metrics["silos"]),
            edges=int(metrics.get("edges", 0)),
            confirmed=int(metrics.get("confirmed_edges", 0)),
            trains=number <= rounds,
            distance=distance_from_mean(self._models.models()),
            reported=metrics.get("relative_distance", math.inf),
            busiest_bytes=float(np.max(self._bytes)),
        )
        self.work.statistics.on_exchanged(exchange)
        self._bytes[:] = 0.0
        if self.work.spec.evaluation.is_due(number, rounds):
            self._training.scores = self._models.evaluate()

    def _revive(self, number: int) -> None:
        """Let the silos check in that are not dead any more in a round that begins."""
        for silo in sorted(self._dead):
            if not self._links.is_dead(silo, number):
                self._dead.remove(silo)
                self.work.idle.on_finished(silo, self.work.now, failed=False)

    @override
    def count_failures(self, job: JobState) -> int:
        return state_of(job).failures


def _contact(silo: str) -> Contact:
    return Contact(silo, bytes(messages.KEY_BYTES))
