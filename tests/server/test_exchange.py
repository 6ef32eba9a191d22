"""Decentralised jobs over the wire: rounds, the relay, restarts, silent silos, and what a server never has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import grpc
import msgspec
import numpy as np
import pytest
from grpc import aio

from fedplat.admin import descriptions
from fedplat.gossip import steps
from fedplat.rounds import Coordinator
from fedplat.rounds.events import SilosLost
from fedplat.wire.v1 import admin_pb2, fleet_pb2, model_pb2
from fedplat.wire.v1.gossip_pb2 import SiloMessage, SiloReport
from fedplat_server.coordination import job_checks
from fedplat_server.errors import Code, RefusedError
from fedplat_server.protocols.relay import MISSED_HEARTBEATS, SilenceMonitor
from fedplat_server.verify.inspection import verify
from support import daemons
from support.daemons import Site, initial_model, until
from support.jobs import FAR_S, write_job
from support.raw_client import digest_of
from support.raw_silos import GOSSIP, RawSilo, play
from support.rounds.silos import Silos


def job_text(goal: int = 3, rounds: int = 2, more: str = GOSSIP, **deadlines: float) -> str:
    selection = {"goal": goal, "over_selection": 1.3, "min_fraction": 0.6}
    times = {"training_s": FAR_S, "upload_s": FAR_S, **deadlines}
    return write_job("gossip", rounds=rounds, selection=selection, deadlines=times, more=more)


async def make_silos(site: Site, count: int = 3, address: str = "127.0.0.1:1") -> list[RawSilo]:
    files: dict[str, bytes] = {}
    vector = initial_model().to_vector()
    return [RawSilo(client, vector, files, address) for client in await site.fleet(count)]


def find_bytes(folder: Path, content: bytes) -> list[Path]:
    """The files that contain some bytes."""
    return [path for path in folder.rglob("*") if path.is_file() and content in path.read_bytes()]


async def test_silos_exchange_models_and_the_server_gets_the_digest_of_their_mean(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_text())
        silos = await make_silos(site)
        await play(silos, rounds=2)
        await site.operator.until(job, "job", "COMPLETED")
        expected = initial_model().to_vector() + 4.0  # the mean of 1, 2 and 3, twice
        for silo in silos:
            np.testing.assert_allclose(silo.vector, expected, rtol=1e-6)
        initial, mean = await site.operator.versions(job)
        assert (mean.model.version, mean.round, mean.num_updates, mean.held_by_clients) == (1, 2, 3, True)
        assert (mean.model.digest, initial.held_by_clients) == (digest_of(silos[0].vector.tobytes()), False)
        with pytest.raises(aio.AioRpcError, match="does not have this model") as refused:
            await site.operator.export(job)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        rounds = await site.operator.rounds(job)
        assert [(each.round, each.merged, each.reported) for each in rounds] == [(1, 3, 3), (2, 3, 3)]
        assert dict(rounds[0].client_metrics)["confirmed_edges"] == 3.0
        shown = (await site.operator.show(job)).exchange
        assert (shown.topology, shown.num_silos, shown.num_edges, shown.num_confirmed) == ("ring", 3, 3, 3)
        assert descriptions.describe_exchange(shown).startswith(
            "neighbours, topology ring, 3 silos, 3 of 3 edges confirmed last; "
        )
        report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder, live=True)
        assert report.findings == []
    for content in silos[0].files.values():
        assert find_bytes(folder, content[:64]) == []


@pytest.mark.parametrize("phase", ["COLLECTING", "EXCHANGING"])
async def test_a_restarted_server_answers_as_before(folder: Path, phase: str) -> None:
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_text(rounds=1))
        silos = await make_silos(site)
        await asyncio.gather(*(silo.begin() for silo in silos))
        await asyncio.gather(*(silo.announce(wait_s=0.0) for silo in silos[: 2 if phase == "COLLECTING" else 3]))
        before = [(await silo.step(wait_s=0.0)).instruction for silo in silos]
    async with daemons.running(folder) as site:
        for silo in silos:
            silo.client = silo.client.over(site.channel)
            await silo.client.open_session()
        assert [(await silo.step(wait_s=0.0)).instruction for silo in silos] == before
        last = silos[2].exchange() if phase == "COLLECTING" else silos[2].resume()
        await asyncio.gather(last, *(silo.resume() for silo in silos[:2]))
        await site.operator.until(job, "job", "COMPLETED")
        assert len({silo.vector.tobytes() for silo in silos}) == 1


async def test_files_pass_through_the_relay_only_where_a_neighbour_waits_for_them(folder: Path) -> None:
    async with daemons.running(folder) as site:
        await site.operator.start(job_text(rounds=1))
        silos = await make_silos(site, address="")
        await asyncio.gather(*(silo.begin() for silo in silos))
        first, second, _ = silos
        content = b"sealed" * 7
        name = first.announcement().digest
        header: dict[str, Any] = {"receiver": second.name, "name": name}
        with pytest.raises(aio.AioRpcError, match="no silo waits for this file"):
            await first.client.upload(first.work.token, content, **header)
        await asyncio.gather(*(silo.announce(wait_s=0.0) for silo in silos))
        waiting = asyncio.create_task(second.client.receive_file(second.work.token, first.name, name))
        wrong: dict[str, Any]
        for wrong in ({"name": "0" * 64}, {"receiver": "c-0123456789abcdef"}, {"receiver": first.name}):
            with pytest.raises(aio.AioRpcError, match="no silo waits for this file"):
                await first.client.upload(first.work.token, content, **(header | wrong))
        limit = len(first.vector.tobytes()) + 16
        with pytest.raises(aio.AioRpcError, match=f"at most {limit} are accepted"):
            await first.client.upload(first.work.token, bytes(limit + 1), **header)
        await first.client.upload(first.work.token, content, end=17, **header)
        assert (await first.client.upload(first.work.token, content, offset=17, **header)).received_bytes == 42
        assert await waiting == content
        with pytest.raises(aio.AioRpcError, match="has not sent the file yet"):
            await second.client.receive_file(second.work.token, silos[2].name, name, wait_s=0.0)
        assert len(find_bytes(folder / "relay", content)) == 1
    async with daemons.running(folder) as site:
        for silo in silos:
            silo.client = silo.client.over(site.channel)
            await silo.client.open_session()
        assert await second.client.receive_file(second.work.token, first.name, name) == content
        await asyncio.gather(*(silo.resume() for silo in silos))

        async def gone() -> bool:
            return not list((folder / "relay").iterdir())

        await until(gone, "an empty relay")


async def test_a_silo_that_missed_a_mean_asks_for_it_through_the_relay(folder: Path) -> None:
    ring = GOSSIP.replace("tolerance = 1.0", 'exchange = "ring"')
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_text(goal=4, rounds=2, more=ring))
        silos = await make_silos(site, 4, address="")
        late, others = silos[3], silos[:3]
        await asyncio.gather(*(silo.begin() for silo in silos))
        await late.client.fail(late.work.token, model_pb2.REASON_CLIENT_STOPPED)
        for silo in silos:
            silo.files[f"now {silo.name}"] = silo.vector.tobytes()
        await asyncio.gather(*(silo.exchange() for silo in others))
        await asyncio.gather(*(silo.begin() for silo in silos))
        asks = await late.announce(wait_s=0.0)
        assert isinstance(asks.instruction, steps.AdoptMean)
        assert {each.silo for each in asks.instruction.holders} == {silo.name for silo in others}
        holder = others[0]
        told = await holder.announce(wait_s=0.0)
        (receiver,) = [each for each in told.mean_receivers if each.relay_key]
        assert receiver.silo == late.name
        sealed = b"the sealed mean"
        name = asks.instruction.digest
        await holder.client.upload(holder.work.token, sealed, receiver=late.name, name=name)
        received = await late.client.receive_file(late.work.token, holder.name, name)
        assert received == sealed
        late.adopt(asks.instruction)
        await asyncio.gather(holder.resume(), *(silo.exchange() for silo in silos[1:]))
        await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (SiloReport(), "missing required field `type`"),
        (SiloReport(announce=SiloReport.Announce()), "missing required field `model`"),
        (SiloReport(exchanged=SiloReport.Exchanged(missed=[""] * 1001)), "1001 entries; expected at most 1000"),
        (SiloReport(exchanged=SiloReport.Exchanged(missed=["x" * 2**16])), "at most 65536 are accepted"),
        ({"num_examples": 0.0}, "expected a number from 1e-06"),
        ({"digest": "model"}, "64 lower-case hexadecimal digits"),
        ({"size_bytes": 2**40}, "expected at most"),
        ({"address": "no address"}, "expected host:port"),
        ({"relay_signature": bytes(64)}, "not signed for this exchange"),
        ({"relay_signature": b""}, "the relay key has 32 bytes"),
    ],
)
async def test_messages_that_no_honest_silo_sends_are_refused(folder: Path, message: object, problem: str) -> None:
    async with daemons.running(folder) as site:
        await site.operator.start(job_text())
        (silo,) = await make_silos(site, 1)
        await silo.begin()
        if isinstance(message, dict):
            announced = msgspec.structs.replace(silo.announcement(), **cast(Any, message))
            sent = silo.step(steps.Announce(announced), wait_s=0.0)
        else:
            sent = silo.send(SiloMessage(report=cast(SiloReport, message)), wait_s=0.0)
        with pytest.raises(aio.AioRpcError, match=problem) as refused:
            await sent
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance((await silo.announce(wait_s=0.0)).instruction, steps.Wait)


@pytest.mark.calm("a watch may be cut")
async def test_a_watch_sees_how_far_the_exchange_is(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_text())
        silos = await make_silos(site)
        await asyncio.gather(*(silo.begin() for silo in silos))
        for silo in silos:
            await silo.announce(wait_s=0.0)
        request = admin_pb2.WatchJobRequest(job=job, only_new=True, progress_every_s=0.01)
        watch = site.operator.jobs.WatchJob(request)
        step = await anext(event.progress.step async for event in watch if event.progress.HasField("step"))
        watch.cancel()
        assert (step.phase, step.num_done, step.num_wanted) == (admin_pb2.ATTEMPT_PHASE_EXCHANGING, 0, 3)
        assert step == (await site.operator.show(job)).current.progress.step


async def test_a_key_for_a_ring_needs_the_signature_of_its_silo(folder: Path) -> None:
    ring = GOSSIP.replace("tolerance = 1.0", 'exchange = "ring"')
    async with daemons.running(folder) as site:
        await site.operator.start(job_text(goal=3, rounds=1, more=ring).replace("0.6", "1.0"))
        silos = await make_silos(site)
        await asyncio.gather(*(silo.begin() for silo in silos))
        asked = (await asyncio.gather(*(silo.announce() for silo in silos)))[0]
        assert isinstance(asked.instruction, steps.SendKey)
        with pytest.raises(aio.AioRpcError, match="not signed with the key with which the silo is enrolled"):
            await silos[0].step(steps.OfferKey(1, bytes(32), bytes(64), 1.0), wait_s=0.0)


async def test_no_silo_sends_an_update_to_the_server_or_takes_other_steps(folder: Path) -> None:
    async with daemons.running(folder) as site:
        await site.operator.start(job_text())
        (silo,) = await make_silos(site, 1)
        await silo.begin()
        for call in (
            lambda: silo.client.upload(silo.work.token, b"update"),
            lambda: silo.client.report_inline(silo.work.token, b"update"),
        ):
            with pytest.raises(aio.AioRpcError, match="send no updates to the server"):
                await call()
        for content, name in (({"secure": fleet_pb2.SecureMessage()}, "secure"), ({}, "unset")):
            with pytest.raises(aio.AioRpcError, match=f"the content of the step is {name}; expected gossip"):
                await silo.client.step(silo.work.token, 0.0, **content)


async def test_clients_of_other_jobs_take_no_steps(folder: Path) -> None:
    async with daemons.running(folder) as site:
        await site.operator.start(write_job())
        client = await site.enroll()
        work = await client.assignment()
        assert not work.HasField("gossip_setup")
        for content in ({"gossip": SiloMessage()}, {"secure": fleet_pb2.SecureMessage()}, {}):
            with pytest.raises(aio.AioRpcError, match="clients of this job take no steps"):
                await client.step(work.token, 0.0, **content)
        with pytest.raises(aio.AioRpcError, match="has not sent the file yet"):
            await client.receive_file(work.token, "another", "file", 0.0)
        assert (await client.step("unknown", 0.0)).HasField("refusal")


async def test_a_silent_silo_is_lost_and_the_others_continue(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_text(rounds=1, heartbeat_s=1.0))
        silos = await make_silos(site)
        await asyncio.gather(*(silo.begin() for silo in silos))
        # The third one never comes back; the long polls of the two others are signs of life.
        await asyncio.gather(*(silo.exchange() for silo in silos[:2]))
        await site.operator.until(job, "job", "COMPLETED")
        assert (await site.operator.reasons(job))[silos[2].name].startswith("LATE")
        assert list((await site.operator.show(job)).exchange.unreachable) == [silos[2].name]


class Calls:
    """What a client directory knows of calls."""

    def __init__(self) -> None:
        self.open = set[str]()
        self.last_seen_unix_s: dict[str, float] = {}

    def has_open_call(self, client_id: str) -> bool:
        return client_id in self.open


def test_silos_are_silent_after_three_heartbeats_without_a_call() -> None:
    silos = Silos(goal=3, deadlines={"heartbeat_s": 10.0}).start()
    coordinator: Coordinator = silos.driver.coordinator
    calls, lost, now = Calls(), list[SilosLost](), [1000.0]
    monitor = SilenceMonitor(coordinator, calls, lost.append, lambda: now[0])  # type: ignore[arg-type]
    calls.open = {"c0"}
    monitor.check()
    for _ in range(MISSED_HEARTBEATS):
        now[0] += 10.0
        calls.last_seen_unix_s["c1"] = now[0]
        monitor.check()
    assert lost == []
    now[0] += 0.1
    monitor.check()
    assert lost == [SilosLost("j", ("c2",))]
    silos.driver.do(*lost)
    now[0] += 29.0
    monitor.check()
    assert len(lost) == 1
    now[0] += 1.0
    monitor.check()
    assert lost[1:] == [SilosLost("j", ("c1",))]


def test_a_server_refuses_more_silos_than_it_coordinates() -> None:
    with pytest.raises(RefusedError, match=r"at most 200 silos .* simulate larger ones") as caught:
        job_checks.parse_submitted(job_text(goal=201), 10_000)
    assert caught.value.code is Code.INVALID_JOB_FILE


def test_the_status_of_an_exchange_in_words() -> None:
    found = admin_pb2.Exchange(topology="ring", kind="ring", num_silos=1, excluded=["c-1", "c-2"])
    assert descriptions.describe_exchange(found) == "ring all-reduce, 1 silo; rings leave out c-1, c-2"
    assert descriptions.join_names(["c-1"], 3) == "c-1 and 2 more"


async def test_edges_name_clients_of_the_population(folder: Path) -> None:
    async with daemons.running(folder) as site:
        names = sorted(client.client_id for client in await site.fleet(3))

        async def submit(*edges: tuple[str, str]) -> str:
            pairs = ", ".join(f'["{first}", "{second}"]' for first, second in edges)
            more = GOSSIP.replace('kind = "gossip"', f'kind = "gossip"\ntopology = "edges"\nedges = [{pairs}]')
            return await site.operator.start(job_text(more=more))

        first, second, third = names
        assert await submit((first, second), (second, third))
        for edges, text in (
            ([("north", "south")], "there is no silo 'north', 'south' in population demo"),
            ([(first, second), (second, "c-0123456789abcdef")], "there is no silo .c-0123456789abcdef"),
            ([(first, second)], "mode.edges name 2 silos, and 3 take part"),
        ):
            with pytest.raises(aio.AioRpcError, match=text):
                await submit(*edges)
