"""Silos of a decentralised job on raw calls: vectors for models, and no network between them but a dictionary."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping

import numpy as np

from fedplat.gossip import mix, steps
from fedplat.gossip.messages import Announcement
from fedplat.gossip.ring import key_payload
from fedplat.gossip.steps import SiloReport, SiloStep
from fedplat.model import Vector
from fedplat.secure_aggregation.primitives import KeyPair
from fedplat.secure_aggregation.relay import RelayExchange
from fedplat.wire import messages
from fedplat.wire.v1 import fleet_pb2, gossip_pb2
from support.raw_client import RawClient, digest_of

GOSSIP = """\
[mode]
kind = "gossip"
tolerance = 1.0
[updates]
weighting = "uniform"
"""


def means(vectors: Mapping[str, Vector]) -> Vector:
    return np.mean(list(vectors.values()), axis=0).astype(np.float32)


@dataclasses.dataclass
class RawSilo:
    """One silo; `files` are those that all silos offer, by digest."""

    client: RawClient
    vector: Vector
    files: dict[str, bytes]
    address: str = "127.0.0.1:1"
    mixed_round: int = 0
    adopted_round: int = 0
    stored: dict[str, Vector] = dataclasses.field(default_factory=dict[str, Vector])
    work: fleet_pb2.Assignment = dataclasses.field(default_factory=fleet_pb2.Assignment)
    relay: KeyPair = dataclasses.field(default_factory=lambda: KeyPair.draw(os.urandom))

    @property
    def name(self) -> str:
        return self.client.client_id

    async def begin(self) -> None:
        """Checks in until it has its part in a round."""
        self.work = await self.client.assignment(features=(steps.FEATURE,))

    async def step(self, report: SiloReport | None = None, wait_s: float = 60.0, known: str = "") -> SiloStep:
        done = steps.Progress(self.mixed_round, self.adopted_round)
        message = steps.SiloMessage(done=done, known=known, report=report)
        return await self.send(messages.to_message(gossip_pb2.SiloMessage, message), wait_s)

    async def send(self, message: gossip_pb2.SiloMessage, wait_s: float = 60.0) -> SiloStep:
        answer = await self.client.step(self.work.token, wait_s, gossip=message)
        assert answer.HasField("gossip"), answer
        return messages.to_record(answer.gossip, SiloStep, steps.MAX_STEP_BYTES)

    def announcement(self) -> Announcement:
        content = self.vector.tobytes()
        self.files[digest_of(content)] = content
        exchange = RelayExchange(self.work.job_id, self.work.round, self.work.attempt)
        key = exchange.advertise(self.name, self.relay, self.client.key.sign)
        return Announcement(
            digest=digest_of(content),
            size_bytes=len(content),
            address=self.address,
            num_examples=10.0,
            squared_norm=float(self.vector @ self.vector),
            relay_key=key.encryption_key,
            relay_signature=key.signature,
        )

    async def announce(self, wait_s: float = 60.0, **metrics: float) -> SiloStep:
        return await self.step(steps.Announce(self.announcement(), metrics), wait_s)

    async def act(self, step: SiloStep) -> SiloStep:
        """Does what a step says; returns the next one."""
        match step.instruction:
            case steps.FetchModels():
                received: list[steps.Received] = []
                for each in step.instruction.models:
                    other = np.frombuffer(self.files[each.digest], np.float32)
                    self.stored[each.contact.silo] = other
                    away = other - self.vector
                    received.append(steps.Received(each.contact.silo, each.digest, float(away @ away)))
                return await self.step(steps.Exchanged(tuple(received)), known=step.known)
            case steps.MixModels():
                row = step.instruction.row
                self.vector = mix(self.vector, [(weight, self.stored[name]) for name, weight in row.neighbours])
                self.mixed_round = row.round
            case steps.SendKey():
                pair, attempt = KeyPair.draw(os.urandom), step.instruction.attempt
                payload = key_payload(self.work.job_id, self.work.round, attempt, self.name, pair.public)
                key = steps.OfferKey(attempt, pair.public, self.client.key.sign(payload), 10.0)
                return await self.step(key, known=step.known)
            case steps.ReduceModels():  # the sum that a ring computes, without one
                mean = np.mean(
                    [np.frombuffer(self.files[f"now {each.silo}"], np.float32) for each in step.instruction.contacts],
                    axis=0,
                ).astype(np.float32)
                self.files[digest_of(mean.tobytes())] = mean.tobytes()
                done = steps.Completed(step.instruction.ring.attempt, digest_of(mean.tobytes()), 0.01)
                return await self.step(done, known=step.known)
            case steps.AdoptMean():
                self.adopt(step.instruction)
            case _:
                pass
        self.files[f"now {self.name}"] = self.vector.tobytes()
        return await self.step()

    def adopt(self, mean: steps.AdoptMean) -> None:
        """Replaces its model by a mean."""
        self.vector = np.frombuffer(self.files[mean.digest], np.float32)
        self.files[f"now {self.name}"] = self.vector.tobytes()
        self.adopted_round = self.mixed_round = mean.round

    async def finish_round(self, step: SiloStep) -> None:
        """Follows its instructions until the round is over for it."""
        while not isinstance(step.instruction, steps.Leave):
            step = await self.act(step)

    async def exchange(self) -> None:
        """Announces its model, and follows its instructions until the round is over for it."""
        await self.finish_round(await self.announce())

    async def resume(self) -> None:
        """Continues a round in which it has announced its model."""
        await self.finish_round(await self.step())

    async def play_round(self, change: float = 0.0) -> None:
        """Takes part in a round: trains, which adds a number to all entries, and exchanges."""
        await self.begin()
        self.vector = self.vector + np.float32(change)
        self.files[f"now {self.name}"] = self.vector.tobytes()
        await self.exchange()


async def play(silos: list[RawSilo], rounds: int = 1) -> None:
    """Rounds in which all silos take part; each trains by its position."""
    for _ in range(rounds):
        await asyncio.gather(*(silo.play_round(float(number)) for number, silo in enumerate(silos, 1)))
