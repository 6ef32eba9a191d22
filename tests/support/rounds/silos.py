"""Silos of a decentralised job beside a coordinator: they follow their instructions, without models."""

from __future__ import annotations

from typing import Any

from fedplat.gossip import steps
from fedplat.gossip.messages import Announcement, GossipEvent, KeyOffered, ModelReceived, RingCompleted, SiloAnnounced
from fedplat.gossip.state import GossipState
from fedplat.gossip.steps import Contact, Instruction, Progress
from fedplat.rounds import Proposal
from fedplat.rounds.events import ClientCheckedIn, SiloReported
from fedplat.rounds.protocols.gossip import state_of
from support.rounds.driver import Driver, make_client, make_job, make_spec


def silo_spec(goal: int = 3, rounds: int = 2, **sections: Any) -> Any:
    mode = {"kind": "gossip"} | sections.pop("mode", {})
    updates = {"weighting": "uniform"} | sections.pop("updates", {})
    sections["selection"] = {"over_selection": 1.3} | sections.get("selection", {})
    return make_spec(goal, rounds, mode=mode, updates=updates, **sections)


def silo(name: str) -> ClientCheckedIn:
    return make_client(name, features=frozenset({steps.FEATURE}))


def contact(name: str) -> Contact:
    return Contact(name, bytes(32), f"{name}:1")


class Silos:
    """The silos of one job, whose only messages are those that a test lets them send."""

    def __init__(self, goal: int = 3, rounds: int = 2, **sections: Any) -> None:
        self.driver = Driver(make_job(spec=silo_spec(goal, rounds, **sections)))
        self.names = [f"c{number}" for number in range(goal)]
        self.done = {name: Progress() for name in self.names}

    @property
    def state(self) -> GossipState:
        return state_of(self.driver.job)

    def start(self) -> Silos:
        self.check_in(*self.names)
        self.driver.start()
        return self

    def check_in(self, *names: str) -> Proposal:
        return self.driver.do(*(silo(name) for name in names))

    def report(self, name: str, *events: GossipEvent, **metrics: float) -> Proposal:
        return self.driver.do(SiloReported(self.driver.key_of(name), name, events, metrics))

    def announce(self, *names: str, **metrics: float) -> None:
        for name in names:
            number = self.state.round
            model = Announcement(digest=f"{name}-{number}", size_bytes=4, num_examples=10.0, squared_norm=4.0)
            self.report(name, SiloAnnounced(name, number, model, self.done[name].mixed_round), **metrics)

    def instruction(self, name: str) -> Instruction:
        return steps.instruct(self.state, name, self.done[name], contact)

    def follow(self, name: str) -> Instruction:
        """Does what the silo is instructed to do."""
        found, number = self.instruction(name), self.state.round
        match found:
            case steps.FetchModels():
                models = [(each.contact.silo, each.digest) for each in found.models]
                self.report(name, *(ModelReceived(name, sender, number, digest, 0.0001) for sender, digest in models))
            case steps.MixModels():
                self.done[name] = Progress(found.row.round, self.done[name].adopted_round)
            case steps.SendKey():
                key = KeyOffered(
                    silo=name,
                    round=number,
                    attempt=found.attempt,
                    key=name.encode().ljust(32),
                    largest=1.0,
                    mixed_round=self.done[name].mixed_round,
                )
                self.report(name, key)
            case steps.ReduceModels():
                self.report(name, RingCompleted(name, number, found.ring.attempt, "mean", 0.0001))
            case steps.AdoptMean():
                ring = self.state.rules.options.exchange == "ring"
                self.done[name] = Progress(found.round if ring else self.done[name].mixed_round, found.round)
            case _:
                pass
        return found

    def play(self, *names: str) -> None:
        """Follows instructions until these silos (by default all) have nothing to do."""
        busy = True
        while busy:
            busy = not all(isinstance(each, steps.Wait) for each in [self.follow(name) for name in names or self.names])

    def play_round(self) -> None:
        """One round in which all silos take part."""
        self.check_in(*(name for name in self.names if self.driver.coordinator.assignment_of(name) is None))
        self.announce(*self.names)
        self.play()
