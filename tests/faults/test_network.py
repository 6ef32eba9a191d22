"""Bad networks between real clients and a real server: cuts, partitions, stragglers, and everybody at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
import pytest
from grpc import aio

from faults import proxy
from fedplat.model import Parameters
from fedplat.wire.auth import Ticket
from fedplat.wire.v1 import admin_pb2, fleet_pb2
from fedplat_client import Client, ClientOptions, Task, TrainResult
from support import daemons
from support.daemons import RawClient, Site, initial_model, reason_name, update_of
from support.jobs import job_file

CheckIn: TypeAlias = "aio.UnaryUnaryCall[Any, fleet_pb2.CheckInResponse]"  # a string: generic for the checker only
LARGE = Parameters.from_arrays({"weight": np.zeros(300_000, np.float32)})
HURRY = (
    "[deadlines]\ntraining_s = {training_s}\nselection_s = 3600\nheartbeat_s = 0.1\n"
    "[retry]\nbase_s = 0.01\nmax_s = 0.01"
)


class Device:
    """A client of the SDK in a thread; its trainer adds one, and waits where a test wants it to."""

    def __init__(self, address: str, ticket: Ticket, folder: Path, **options: float) -> None:
        self.training = threading.Event()
        self.go_on = threading.Event()
        self.num_trained = 0
        times = {"first_backoff_s": 0.01, "max_backoff_s": 0.1, "call_timeout_s": 2.0, **options}
        made = ClientOptions(check_in_wait_s=5.0, **times)  # pyright: ignore[reportArgumentType]
        there = Ticket(address, ticket.population, ticket.secret)
        self.client = Client.from_ticket(there.to_text(), data_dir=folder, options=made)
        self.client.add_trainer("toy", self._train)

    def _train(self, task: Task) -> TrainResult:
        self.num_trained += 1
        self.training.set()
        while not self.go_on.wait(0.02):
            task.progress(0.5)
        task.parameters["weight"] += np.float32(1.0)
        return TrainResult(parameters=task.parameters, num_examples=1)


@contextlib.asynccontextmanager
async def at_work(device: Device) -> AsyncGenerator[None]:
    running = asyncio.create_task(asyncio.to_thread(device.client.run))
    try:
        yield
    finally:
        device.go_on.set()
        device.client.stop()
        await running


async def happens(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, daemons.PATIENCE_S)


@contextlib.asynccontextmanager
async def behind_a_proxy(site: Site, client: RawClient, network: proxy.Proxy) -> AsyncGenerator[RawClient]:
    """The same client, through the proxy."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100))
    async with aio.insecure_channel(network.address, options=options) as channel:
        yield client.over(channel)


@pytest.mark.fault("F14")
async def test_an_upload_that_is_cut_again_and_again_arrives(site: Site, tmp_path: Path) -> None:
    """The upload has 1.2 MB, and no connection carries more than 500 kB."""
    async with proxy.running(site.address) as network:
        network.set(proxy.Weather(to_server=proxy.Way(cut_after=500_000)))
        device = Device(network.address, await site.operator.ticket(), tmp_path / "client", call_timeout_s=30.0)
        device.go_on.set()
        job = await site.operator.start(job_file(goal=1), LARGE)
        async with at_work(device):
            await site.operator.until(job, "job", "COMPLETED")
        assert network.num_accepted >= 3
    assert device.num_trained == 1
    assert (await site.operator.model(job))["weight"].tolist()[:2] == [1.0, 1.0]


@pytest.mark.fault("F16")
async def test_a_report_that_arrives_after_the_deadline_is_late(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1, more=HURRY.format(training_s=0.3)))
    update = update_of(initial_model(), 0).to_bytes()
    async with proxy.running(site.address) as network, behind_a_proxy(site, await site.enroll(), network) as client:
        token = (await client.assignment()).token
        network.set(proxy.ONLY_TO_CLIENT)
        report = asyncio.ensure_future(client.report_inline(token, update))
        await site.operator.until(job, "attempt", "ABANDONED")
        network.set(proxy.CLEAR)
        refusal = (await report).refusal
    assert reason_name(refusal.reason) == "TRAIN_TIMEOUT"
    assert refusal.retry.max_s > 0.0
    assert (await site.operator.rounds(job))[0].late == 1
    assert (await site.operator.show(job)).model.version == 0


@pytest.mark.fault("F19", "F12")
async def test_a_client_without_a_receipt_reports_until_it_gets_one(site: Site, tmp_path: Path) -> None:
    """The server receives every report, and the client no receipt: the update counts once."""
    job = await site.operator.start(job_file(goal=1))
    async with proxy.running(site.address) as network:
        device = Device(network.address, await site.operator.ticket(), tmp_path / "client")
        async with at_work(device):
            await happens(device.training)
            network.set(proxy.ONLY_TO_SERVER)
            device.go_on.set()
            await site.operator.until(job, "job", "COMPLETED")
            network.set(proxy.CLEAR)
            await site.waiting(1)  # it has its receipt, and asks for more work
    assert device.num_trained == 1
    assert (await site.operator.versions(job))[-1].num_updates == 1


@pytest.mark.fault("F19")
@pytest.mark.slow
async def test_a_client_that_is_not_heard_times_out_and_works_again_later(site: Site, tmp_path: Path) -> None:
    job = await site.operator.start(job_file(goal=1, more=HURRY.format(training_s=4.0)))
    async with proxy.running(site.address) as network:
        device = Device(network.address, await site.operator.ticket(), tmp_path / "client")
        async with at_work(device):
            await happens(device.training)
            network.set(proxy.ONLY_TO_CLIENT)
            device.go_on.set()
            await site.operator.until(job, "attempt", "ABANDONED")
            assert (await site.operator.rounds(job))[0].late == 1
            network.set(proxy.CLEAR)
            await site.operator.until(job, "job", "COMPLETED")
    assert device.num_trained >= 2
    np.testing.assert_array_equal((await site.operator.model(job))["weight"], initial_model()["weight"] + 1.0)


@pytest.mark.slow
@pytest.mark.fault("F15", "F33")
async def test_everybody_vanishes_and_comes_back(site: Site, tmp_path: Path) -> None:
    """Attempts are abandoned; the job gives a reason and backs off; it continues when the clients return."""
    more = "[deadlines]\ntraining_s = 4.0\nselection_s = 0.2\nheartbeat_s = 0.1\n[retry]\nbase_s = 0.2\nmax_s = 0.4"
    job = await site.operator.start(job_file(goal=2, more=more))
    async with proxy.running(site.address) as network, contextlib.AsyncExitStack() as stack:
        devices = [
            Device(network.address, await site.operator.ticket(), tmp_path / f"client-{number}") for number in range(2)
        ]
        for device in devices:
            await stack.enter_async_context(at_work(device))
        for device in devices:
            await happens(device.training)
        network.set(proxy.BLACKHOLE)
        network.cut()

        async def waits() -> bool:
            shown = await site.operator.show(job)
            return "0 of at least 2 needed clients" in shown.reason and shown.current.attempt >= 3

        start = asyncio.get_running_loop().time()
        await daemons.until(waits, "the job to report that no client is there")
        num_attempts = (await site.operator.show(job)).current.attempt
        assert num_attempts <= 3 + (asyncio.get_running_loop().time() - start) / 0.1  # back-off, no busy loop
        network.set(proxy.CLEAR)
        for device in devices:
            device.go_on.set()
        await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.slow
@pytest.mark.fault("F32")
async def test_a_thousand_clients_come_back_at_once(site: Site) -> None:
    """All connections are reset at once, and all clients check in again at once: soon all of them wait."""
    count, num_channels = 1000, 20
    enrolled = await asyncio.gather(*(site.enroll() for _ in range(count)))
    async with proxy.running(site.address) as network, contextlib.AsyncExitStack() as stack:
        groups = [enrolled[start::num_channels] for start in range(num_channels)]
        clients: list[RawClient] = []
        for group in groups:
            options = (("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100))
            channel = await stack.enter_async_context(aio.insecure_channel(network.address, options=options))
            clients += [one.over(channel) for one in group]
        calls = [client.check_in() for client in clients]
        await site.waiting(count)
        network.cut()
        lost = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(exc, aio.AioRpcError) for exc in lost)
        assert {exc.code() for exc in lost if isinstance(exc, aio.AioRpcError)} == {grpc.StatusCode.UNAVAILABLE}
        calls = [client.check_in() for client in clients]
        await site.waiting(count)
        job = await site.operator.start(job_file(goal=20))
        content = update_of(initial_model(), 0).to_bytes()

        async def work(client: RawClient, call: CheckIn) -> None:
            token = (await call).assignment.token
            assert (await client.report_inline(token, content)).HasField("receipt")

        working = [asyncio.create_task(work(client, call)) for client, call in zip(clients, calls, strict=True)]
        await site.operator.until(job, "job", "COMPLETED")

        async def reported() -> bool:
            return sum(task.done() for task in working) == 20

        await daemons.until(reported, "twenty receipts")
        await asyncio.gather(*(task for task in working if task.done()))
        for call in calls:  # the others wait for more work
            call.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        status = await site.operator.operators.GetStatus(admin_pb2.GetStatusRequest())
        assert (status.num_clients, status.num_busy) == (count, 0)
