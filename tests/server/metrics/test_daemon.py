"""A daemon serves what has happened in it, whatever its role."""

from __future__ import annotations

import asyncio
import errno
import math
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import structlog.testing
from grpc import aio

from fedplat import durable
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_server.config import LeaseTimes
from fedplat_server.metrics import collector, service
from support import daemons
from support.daemons import Site, initial_model, update_of
from support.jobs import job_file
from support.private_jobs import private
from support.raw_client import PATIENCE_S
from support.scrapes import Samples, promtool, scrape

pytestmark = pytest.mark.calm("it counts calls and transactions, of which a failing store needs more")
LARGE = Parameters.from_arrays({"weight": np.ones(100_000, np.float32)})
METRICS: dict[str, Any] = {"metrics_listen": "127.0.0.1:0"}


@pytest.fixture
async def site(folder: Path) -> AsyncGenerator[Site]:
    async with daemons.running(folder, **METRICS) as made:
        yield made


async def samples_of(site: Site) -> Samples:
    return Samples(await scrape(site.daemon.metrics.port))


async def test_a_job_of_two_rounds(site: Site) -> None:
    job = await site.operator.start(job_file(rounds=2), LARGE)
    clients = await site.fleet(2)
    num_bytes = 0
    for _ in range(2):
        for client, assignment in zip(clients, await site.assign(clients), strict=True):
            await client.download(assignment.model.digest)
            update = update_of(LARGE, 0)
            num_bytes += len(update.to_bytes())
            await client.deliver(assignment.token, update, metrics={"loss": 0.5, "secret": 1.0})
    await site.operator.until(job, "job", "COMPLETED")
    text = await scrape(site.daemon.metrics.port)
    assert promtool("check", "metrics", text=text) == ""
    samples, own = Samples(text), {"job_id": job, "job_name": "toy"}
    assert samples.by("outcome", "fedplat_assignments_total", **own) == {"merged": 4}
    assert samples.by("outcome", "fedplat_attempts_total", **own) == {"committed": 2}
    assert samples.value("fedplat_update_bytes_total", **own) == num_bytes
    sent = samples.by("form", "fedplat_model_bytes_total", **own)["file"]
    assert 4 * len(LARGE.to_bytes()) < sent < 1.01 * 4 * len(LARGE.to_bytes())  # with the frames of messages
    assert samples.value("fedplat_check_ins_total", population="demo", result="assigned") == 4
    assert samples.by("name", "fedplat_job_metric", **own) == {"loss": 0.5}
    calls = samples.by("grpc_method", "grpc_server_call_duration_seconds_count", grpc_status="OK")
    assert calls["fedplat.wire.v1.Fleet/Report"] == 4
    assert calls["fedplat.wire.v1.Jobs/CreateJob"] == 1
    actions = samples.by("action", "fedplat_audit_events_total")
    assert (actions["job created"], actions["job started"], actions["client enrolled"]) == (1, 1, 2)
    assert actions["server started"] == 1
    for name in ("fedplat_database_duration_seconds_count", "fedplat_blob_duration_seconds_count"):
        assert samples.by("operation", name).keys() >= {"write", "read"} or "blob" in name
    assert samples.by("operation", "fedplat_blob_duration_seconds_count")["fsync"] >= 2
    assert samples.value("fedplat_leader") == 1
    assert samples.values("process_resident_memory_bytes")
    assert {"j-", "c-"} & {value[:2] for value in samples.label_values("grpc_method")} == set()


async def test_small_models_are_part_of_assignments(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    assignment = await client.assignment()
    assert (await samples_of(site)).value("fedplat_model_bytes_total", form="inline") == len(assignment.model_bytes)
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))


async def test_refused_calls_and_unknown_methods(site: Site) -> None:
    client = await site.enroll()
    assert (await client.refusal()).reason
    for method in ("/fedplat.wire.v1.Fleet/NoSuchMethod", "/fedplat.wire.v1.Jobs/ListJobs"):
        with pytest.raises(aio.AioRpcError):
            await site.channel.unary_unary(method)(b"")
    poll = client.check_in(PATIENCE_S)
    await site.waiting(1)
    poll.cancel()
    await site.waiting(0)
    samples = await samples_of(site)
    assert samples.value("fedplat_check_ins_total", result="no_work") == 1
    count = "grpc_server_call_duration_seconds_count"
    assert samples.value(count, grpc_method="fedplat.wire.v1.Jobs/ListJobs", grpc_status="UNAUTHENTICATED") == 1
    assert samples.value(count, grpc_method="fedplat.wire.v1.Fleet/CheckIn", grpc_status="CANCELLED") == 1
    assert not any("NoSuchMethod" in method for method in samples.label_values("grpc_method"))


async def test_a_hidden_population_has_no_counts(site: Site) -> None:
    """As that of a job whose sample is secret."""
    clients = [await site.enroll("vault"), await site.enroll("demo")]
    site.daemon.metrics.instruments.populations.hide("vault")
    for client in clients:
        await client.refusal()
    assert (await samples_of(site)).by("population", "fedplat_check_ins_total") == {"demo": 1}


async def test_a_full_disk(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = (await samples_of(site)).by("place", "fedplat_storage_full_total")
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    token = (await client.assignment()).token
    for write in ("write_all", "write_at"):
        monkeypatch.setattr(durable, write, fail)
    with pytest.raises(aio.AioRpcError) as caught:
        await client.upload(token, update_of(initial_model(), 0).to_bytes())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    after = (await samples_of(site)).by("place", "fedplat_storage_full_total")
    assert after["updates"] > before.get("updates", 0.0)
    assert after.get("models", 0.0) == before.get("models", 0.0)
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))


async def test_the_loss_of_a_private_job_and_a_budget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "MIN_PAUSE_S", 0.01)
    monkeypatch.setattr(collector, "PAUSE_FACTOR", 0.0)
    monkeypatch.setattr(service, "SCRAPES_PER_MINUTE", 1e6)
    async with daemons.running(folder, **METRICS) as site:
        job = await site.operator.start(private(rounds=2))
        budget = admin_pb2.SetPrivacyBudgetRequest(population="demo", epsilon=8.0, delta=1e-6)
        await site.operator.privacy.SetPrivacyBudget(budget)
        clients = await site.fleet(2)
        for client, assignment in zip(clients, await site.assign(clients), strict=True):
            await client.deliver(assignment.token, update_of(initial_model(), 0))
        await site.operator.until(job, "version", "1")
        shown = (await site.operator.privacy.ShowPrivacy(admin_pb2.ShowPrivacyRequest())).jobs[0]

        async def is_shown() -> bool:
            spent = (await samples_of(site)).values("fedplat_privacy_epsilon_spent", job_id=job)
            return bool(spent) and math.isclose(spent[0], shown.released.epsilon)

        await daemons.until(is_shown, "the losses")
        samples = await samples_of(site)
        assert math.isclose(samples.value("fedplat_privacy_epsilon_planned", job_id=job), shown.planned.epsilon)
        assert samples.value("fedplat_privacy_epsilon_committed", population="demo") >= shown.planned.epsilon
        assert samples.value("fedplat_privacy_epsilon_budget", population="demo") == 8.0


async def test_a_restarted_daemon_knows_its_jobs(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_file(rounds=9, goal=1))
        client = await site.enroll()
        for _ in range(5):
            await client.deliver((await client.assignment()).token, update_of(initial_model(), 0))
        await site.operator.until(job, "version", "5")
        times = [version.created_unix_s for version in await site.operator.versions(job)]
    async with daemons.running(folder, **METRICS) as site:
        samples = await samples_of(site)
        assert samples.value("fedplat_job_round", job_id=job) == 5
        assert math.isclose(samples.value("fedplat_job_last_commit_timestamp_seconds", job_id=job), times[-1])
        assert samples.value("fedplat_job_usual_round_seconds", job_id=job) < times[-1] - times[0]
        assert samples.value("fedplat_job_idle_since_timestamp_seconds", job_id=job) > times[-1]


async def test_a_gateway_has_no_jobs_until_it_leads(tmp_path: Path, postgres: str) -> None:
    lease = LeaseTimes(valid_s=60.0, renew_s=0.2, margin_s=1.0, poll_s=0.05)
    options: dict[str, Any] = {"database": postgres, "lease": lease, **METRICS}
    async with daemons.running(tmp_path, **options) as leader:
        job = await leader.operator.start(job_file())
        async with daemons.running(tmp_path, **options) as gateway:
            samples = await samples_of(gateway)
            assert samples.value("fedplat_leader") == 0
            assert samples.values("fedplat_jobs") == []
            assert samples.values("process_cpu_seconds_total")
            assert (await samples_of(leader)).value("fedplat_leader") == 1
            leader.daemon.stop()
            await leader.task
            await daemons.until(lambda: leads(gateway), "the gateway leads")
            assert (await samples_of(gateway)).values("fedplat_job_round", job_id=job) == [0.0]


async def leads(site: Site) -> bool:
    return (await samples_of(site)).value("fedplat_leader") == 1


async def test_without_the_option_there_is_no_port(folder: Path) -> None:
    async with daemons.running(folder) as site:
        assert site.daemon.metrics.port == 0
        assert "metrics endpoint" not in {task.get_name() for task in asyncio.all_tasks()}


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("0.0.0.0", True)])
async def test_public_addresses_are_warned_of(folder: Path, host: str, warns: bool) -> None:
    with structlog.testing.capture_logs() as lines:
        async with daemons.running(folder, metrics_listen=f"{host}:0"):
            pass
    assert any(line["event"].startswith("the metrics need no login") for line in lines) is warns
