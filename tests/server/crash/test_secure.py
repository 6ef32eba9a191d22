"""The server dies in each phase of a secure aggregation: the attempt continues, and the sets that it asks for stay."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from pathlib import Path

import numpy as np
import pytest

from fedplat.rounds.states import AttemptPhase
from fedplat.secure_aggregation.messages import UnmaskRequest
from fedplat.secure_aggregation.setup import FEATURE
from fedplat.wire.v1 import admin_pb2
from support import secure_clients
from support.crash import scenario
from support.crash.nursery import Nursery, Order
from support.crash.scenario import KILLED, Member, World
from support.raw_client import PATIENCE_S
from support.secure_clients import EndedError, SecureWork, secure_job

pytestmark = pytest.mark.slow
NUM_CLIENTS = 5
SIZE = scenario.base_model().schema.num_floating
HELD = {
    AttemptPhase.ADVERTISING: "advertise",
    AttemptPhase.SHARING: "share",
    AttemptPhase.COLLECTING: "report",
    AttemptPhase.CONFIRMING: "confirm",
    AttemptPhase.UNMASKING: "answer",
}
"""The step that clients take in each phase."""
NUM_HELD = 2
"""Clients that take this step only after the crash; so many that the phase cannot end without them."""


@dataclasses.dataclass
class Cohort:
    """The clients of a world, and their work in each attempt. Some wait before a step until the server has died."""

    world: World
    held: str = ""
    free: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    works: list[SecureWork] = dataclasses.field(default_factory=list[SecureWork])
    attempts: list[int] = dataclasses.field(default_factory=list[int])

    async def take_part(self, member: Member) -> None:
        """Works until it is cancelled."""
        update = np.random.default_rng(member.number).normal(scale=0.1, size=SIZE).astype(np.float32)
        while True:
            answer = await member.ask(lambda client: client.check_in(features=(FEATURE,)))
            if answer.HasField("assignment"):
                work = secure_clients.begin(
                    member.client, answer.assignment, update, 1.0 + member.number % 4, ask=member.ask
                )
                self.works.append(work)
                self.attempts.append(answer.assignment.attempt)
                with contextlib.suppress(EndedError):
                    await self._work(member, work)

    async def _work(self, member: Member, work: SecureWork) -> None:
        await self._wait(member, "advertise")
        await work.advertise()
        await self._wait(member, "share")
        await work.share()
        work.mask()
        await self._wait(member, "report")
        await work.report()
        response = await work.step()
        await self._wait(member, "confirm")
        response = await work.confirm(response)
        if response.secure.HasField("unmask"):
            work.asked.append(UnmaskRequest.from_bytes(response.secure.unmask).survivors)
            await self._wait(member, "answer")
            await work.answer(await work.step())  # it is asked again, perhaps by the server's next life

    async def _wait(self, member: Member, step: str) -> None:
        if step == self.held and member.number < NUM_HELD:
            await self.free.wait()


async def run(world: World, phase: AttemptPhase | None, point: str = "", *, confirm: bool = False) -> Cohort:
    """A round whose server dies in a phase, or at a point."""
    cohort = Cohort(world, HELD[phase] if phase is not None else "")
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        living = group.create_task(world.live([point]))
        members = [await scenario.enroll(world, number) for number in range(NUM_CLIENTS)]
        await scenario.operate(world, secure_job(NUM_CLIENTS, confirm=confirm))
        working = [group.create_task(cohort.take_part(member)) for member in members]
        if phase is not None:
            await world.ask(lambda site: site.operator.until(world.job, "attempt", phase))
            await world.stop(signal.SIGKILL)
            cohort.free.set()
        await world.ask(lambda site: site.operator.events(world.job))
        await check(cohort)
        for task in working:
            task.cancel()
        await world.stop()
        await living
    assert world.statuses == [KILLED, 0]
    return cohort


async def check(cohort: Cohort) -> None:
    """The model is that of the survivors, and each attempt has asked for one set of them."""
    job = await cohort.world.ask(lambda site: site.operator.show(cohort.world.job))
    assert job.status == admin_pb2.JOB_STATUS_COMPLETED
    asked: dict[int, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for attempt, work in zip(cohort.attempts, cohort.works, strict=True):
        asked.setdefault(attempt, set()).update((each.survivors, each.dropped) for each in work.asked)
    assert all(len(sets) <= 1 for sets in asked.values()), asked
    last = job.current.attempt
    survivors = [
        work for attempt, work in zip(cohort.attempts, cohort.works, strict=True) if attempt == last and work.masked
    ]
    assert job.current.merged == len(survivors)
    model = await cohort.world.ask(lambda site: site.operator.model(cohort.world.job))
    expected = secure_clients.expected_model(scenario.base_model(), survivors)
    assert model.to_vector().tobytes() == expected.tobytes()


@pytest.fixture
async def world(zygote: Nursery, folder: Path) -> World:
    order = Order(folder, f"sqlite:///{folder / 'fedplat.sqlite'}", folder.parent / "server.log")
    return World(zygote, order)


@pytest.mark.fault("S2")
@pytest.mark.parametrize("phase", sorted(HELD))
async def test_killed_in_each_phase(world: World, phase: AttemptPhase) -> None:
    """The attempt continues with what was acknowledged: no client trains twice."""
    cohort = await run(world, phase, confirm=phase is AttemptPhase.CONFIRMING)
    assert set(cohort.attempts) == {1}
    if phase is AttemptPhase.UNMASKING:
        assert all(len(work.asked) == 2 for work in cohort.works[:NUM_HELD])


POINTS = [
    *("commit.model.before", "commit.model.after", "blob.rename.after:2"),
    *(f"save.{moment}:{number}" for moment in ("before", "uncommitted", "after") for number in (4, 8)),
]


@pytest.mark.fault("S2")
@pytest.mark.parametrize("point", POINTS)
async def test_killed_around_transactions_and_the_commit(world: World, point: str) -> None:
    await run(world, None, point)
