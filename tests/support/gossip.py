"""A decentralised job in progress, and the events of its silos."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedplat.gossip import Gossip
from fedplat.gossip.coordinator import begin, step
from fedplat.gossip.messages import (
    Announcement,
    GossipCommand,
    GossipEvent,
    KeyOffered,
    ModelReceived,
    RingCompleted,
    SiloAnnounced,
    TimerPassed,
)
from fedplat.gossip.state import GossipRules


def rules(goal: int = 4, minimum: int = 2, rounds: int = 2, **options: Any) -> GossipRules:
    return GossipRules(
        options=Gossip(**options), rounds=rounds, goal=goal, minimum=minimum, training_s=60.0, exchange_s=30.0
    )


class Job:
    """A job in progress; `commands` are those of the last event."""

    def __init__(self, of: GossipRules) -> None:
        self.state, self.commands = begin(of)

    def send(self, *events: GossipEvent) -> tuple[GossipCommand, ...]:
        commands: list[GossipCommand] = []
        for event in events:
            self.state, new = step(self.state, event)
            commands += new
        self.commands = tuple(commands)
        return self.commands

    def of(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.commands if isinstance(each, kind)]

    def expire(self) -> tuple[GossipCommand, ...]:
        return self.send(TimerPassed(self.state.timer))

    def announce(self, *silos: str, mixed: int = 0) -> tuple[GossipCommand, ...]:
        number = self.state.round
        return self.send(*(announced(silo, number, mixed) for silo in silos))

    def receive(self, *links: tuple[str, str]) -> tuple[GossipCommand, ...]:
        number = self.state.round
        return self.send(*(ModelReceived(to, sender, number, f"{sender}-{number}", 4.0) for to, sender in links))

    def offer(self, *silos: str, mixed: int = 0) -> tuple[GossipCommand, ...]:
        number, attempt = self.state.round, self.state.attempt
        return self.send(
            *(
                KeyOffered(
                    silo=each, round=number, attempt=attempt, key=each.encode() * 32, largest=2.0, mixed_round=mixed
                )
                for each in silos
            )
        )

    def complete(self, *silos: str, digest: str = "mean", away: float = 0.0) -> tuple[GossipCommand, ...]:
        number, attempt = self.state.round, self.state.attempt
        return self.send(*(RingCompleted(each, number, attempt, digest, away) for each in silos))


def announced(silo: str, number: int, mixed: int = 0) -> SiloAnnounced:
    model = Announcement(
        digest=f"{silo}-{number}", size_bytes=100, address=f"{silo}:1", num_examples=2.0, squared_norm=100.0
    )
    return SiloAnnounced(silo, number, model, mixed)


def both(*edges: tuple[str, str]) -> Iterable[tuple[str, str]]:
    return [link for a, b in edges for link in ((a, b), (b, a))]
