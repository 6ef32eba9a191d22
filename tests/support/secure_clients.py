"""Clients of secure aggregations: raw calls with the real participant, one step at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from grpc import aio

from fedplat.model import Parameters
from fedplat.secure_aggregation import encoding
from fedplat.secure_aggregation.messages import Survivors, UnmaskRequest
from fedplat.secure_aggregation.participant import Participant, ParticipantLimits
from fedplat.secure_aggregation.setup import FEATURE, Setup
from fedplat.wire.v1 import fleet_pb2
from support.daemons import Site
from support.jobs import FAR_S, write_job
from support.raw_client import PATIENCE_S, RawClient, digest_of, reason_name

_T = TypeVar("_T")
LIMITS = ParticipantLimits()
STEP_S = 20.0
"""For a job some of whose clients never answer: the server waits for them for 5% of this when it has enough answers."""


class Ask(Protocol):
    """Asks the server, as a client; a test may ask again if the server has died."""

    async def __call__(self, question: Callable[[RawClient], Awaitable[_T]], /) -> _T: ...


class EndedError(Exception):
    """The server has refused a step or a report."""

    def __init__(self, refusal: fleet_pb2.Refusal) -> None:
        super().__init__(f"{reason_name(refusal.reason)}: {refusal.text}")
        self.reason = reason_name(refusal.reason)
        self.text = refusal.text


@dataclasses.dataclass
class SecureWork:
    """The part of a client in one attempt. `encoded` is what it must not reveal; `asked` are the survivors."""

    ask: Ask
    client: RawClient
    token: str
    setup: Setup
    participant: Participant
    update: npt.NDArray[np.float32]
    num_examples: float = 1.0
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    roster: bytes = b""
    held: bytes = b""
    encoded: npt.NDArray[np.uint32] | None = None
    masked: bytes = b""
    asked: list[Survivors] = dataclasses.field(default_factory=list[Survivors])

    async def step(self, wait_s: float = PATIENCE_S, **message: bytes) -> fleet_pb2.StepResponse:
        """Takes a step until there is an input."""
        while True:
            response = await self.ask(lambda client: client.secure_step(self.token, wait_s, **message))
            if response.HasField("refusal"):
                raise EndedError(response.refusal)
            if not response.HasField("waiting"):
                return response

    async def advertise(self) -> None:
        self.roster = (await self.step(keys=self.participant.advertise())).secure.roster

    async def share(self) -> None:
        self.held = (await self.step(shares=self.participant.share(self.roster))).secure.shares

    def mask(self) -> None:
        vector = encoding.encode(self.setup.encoding, self.update, self.num_examples, self.metrics, os.urandom)
        self.encoded = vector.copy()
        self.participant.mask(self.held, vector)
        self.masked = b"".join(encoding.write_file(self.setup, vector))

    async def report(self, **fields: Any) -> None:
        """Uploads the masked update and reports it."""
        digest = digest_of(self.masked)

        async def deliver(client: RawClient) -> fleet_pb2.ReportResponse:
            return await client.report_inline(self.token, self.masked, digest, **fields)

        response = await self._deliver(deliver)
        if not response.HasField("receipt"):
            raise EndedError(response.refusal)

    async def _deliver(
        self, deliver: Callable[[RawClient], Awaitable[fleet_pb2.ReportResponse]]
    ) -> fleet_pb2.ReportResponse:
        while True:
            try:
                return await self.ask(deliver)
            except aio.AioRpcError as exc:
                if exc.code() is not grpc.StatusCode.ABORTED:  # else the server asks for the bytes again
                    raise

    async def confirm(self, response: fleet_pb2.StepResponse) -> fleet_pb2.StepResponse:
        """Confirms the survivors, if the job asks for that; the input of the last step."""
        if not response.secure.HasField("survivors"):
            return response
        self.asked.append(Survivors.from_bytes(response.secure.survivors))
        return await self.step(confirmation=self.participant.confirm(response.secure.survivors))

    async def answer(self, response: fleet_pb2.StepResponse) -> None:
        """Answers the shares, unless the masks were removed without this client."""
        if response.secure.HasField("unmask"):
            self.asked.append(UnmaskRequest.from_bytes(response.secure.unmask).survivors)
            await self.step(answer=self.participant.answer(response.secure.unmask))

    async def until_reported(self) -> None:
        await self.advertise()
        await self.share()
        self.mask()
        await self.report()

    async def finish(self) -> None:
        await self.answer(await self.confirm(await self.step()))

    async def take_part(self) -> None:
        await self.until_reported()
        await self.finish()


def new_participant(setup: Setup, client: RawClient) -> Participant:
    """The participant of a client, with new secrets."""
    return Participant(setup, client.public_key, client.key.sign, LIMITS)


def begin(
    client: RawClient,
    assignment: fleet_pb2.Assignment,
    update: npt.NDArray[np.float32],
    num_examples: float = 1.0,
    metrics: Mapping[str, float] | None = None,
    ask: Ask | None = None,
) -> SecureWork:
    """The work for an assignment, before its first step."""

    async def ask_this(question: Callable[[RawClient], Awaitable[_T]], /) -> _T:
        return await question(client)

    setup = Setup.from_bytes(assignment.secure_setup)
    work = SecureWork(ask or ask_this, client, assignment.token, setup, new_participant(setup, client), update)
    return dataclasses.replace(work, num_examples=num_examples, metrics=metrics or {})


async def begin_all(site: Site, clients: Sequence[RawClient], size: int) -> list[SecureWork]:
    """The work of each of these clients in the next attempt, with random updates."""
    assignments = await asyncio.gather(*(client.assignment(features=(FEATURE,)) for client in clients))
    rng = np.random.default_rng(7)
    updates = rng.normal(scale=0.1, size=(len(clients), size)).astype(np.float32)
    examples = [1.0 + number % 4 for number in range(len(clients))]
    return [begin(*each) for each in zip(clients, assignments, updates, examples, strict=True)]


async def together(works: Sequence[SecureWork], *names: str) -> None:
    """Has all of these clients take steps of these names, each at its own pace."""

    async def take(work: SecureWork) -> None:
        for name in names:
            made = getattr(work, name)()
            if made is not None:
                await made

    await asyncio.gather(*(take(work) for work in works))


def expected_model(base: Parameters, survivors: Sequence[SecureWork]) -> npt.NDArray[np.float32]:
    """The model that the updates of these clients make, from integers that were not masked."""
    setup = survivors[0].setup
    total = np.zeros(setup.encoding.length, np.uint32)
    for work in survivors:
        assert work.encoded is not None
        total += work.encoded
    decoded = encoding.decode(setup.encoding, total, len(survivors))
    mean = decoded.update / np.float32(decoded.weight)
    return base.to_vector() + mean.astype(np.float32)


def secure_job(goal: int = 5, rounds: int = 1, more: str = "", **options: Any) -> str:
    """The file of a job with secure aggregation; `options` are of its table. Deadlines are far away."""
    return write_job(
        "secret",
        rounds=rounds,
        more=more,
        selection={"goal": goal, "min_fraction": 0.5},
        deadlines={"training_s": FAR_S, "selection_s": FAR_S, "upload_s": FAR_S},
        retry={"base_s": 0.01, "max_s": 0.01},
        updates={"clip_norm": 10.0, "max_examples": 4},
        secure_aggregation={"step_s": FAR_S, **options},
    )
