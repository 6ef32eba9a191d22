"""The long poll: who gets work, who is refused and why, and which call gets the answer."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from fedplat import wire
from fedplat.model import Parameters
from fedplat.rounds import ModelVersion
from fedplat.wire.v1 import admin_pb2, fleet_pb2
from fedplat_server.config import Limits
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.read_cache import InlineModels
from support import daemons
from support.daemons import Gate, RawClient, Site, initial_model, reason_name, update_of
from support.jobs import job_file


async def test_returns_at_once_when_there_is_an_assignment(site: Site) -> None:
    client = await site.enroll()
    waiting = client.check_in(wait_s=daemons.PATIENCE_S * 10)
    await site.waiting(1)
    job = await site.operator.start(
        job_file("toy", rounds=7, goal=1, more="[config]\nlr = 0.5\nsteps = 3\nfast = true")
    )
    response = await asyncio.wait_for(waiting, daemons.PATIENCE_S)
    given = response.assignment
    assert (given.job_id, given.job_name, given.round, given.attempt) == (job, "toy", 1, 1)
    assert (given.trainer, given.task, given.heartbeat_s) == ("toy", fleet_pb2.TASK_TRAIN, 10.0)
    assert {name: value.WhichOneof("kind") for name, value in given.config.items()} == {
        "lr": "double_value",
        "steps": "int_value",
        "fast": "bool_value",
    }
    assert (response.protocol_version, bool(response.software_version)) == (1, True)


async def test_refused_with_reason_and_window_after_the_wait(site: Site) -> None:
    client = await site.enroll()
    refusal = await client.refusal(wait_s=0.05)
    assert (reason_name(refusal.reason), bool(refusal.text)) == ("NO_WORK", True)
    assert 0.0 <= refusal.retry.min_s < refusal.retry.max_s
    await site.operator.start(job_file(goal=5, where='region == "eu"'))
    for region, trainer, reason in (
        ("eu", "toy", "NOT_SELECTED"),
        ("us", "toy", "NOT_ELIGIBLE"),
        ("eu", "other", "NOT_ELIGIBLE"),
    ):
        refusal = await client.refusal(labels={"region": region}, trainers=(trainer,))
        assert reason_name(refusal.reason) == reason
    for wait_s in (-1.0, float("nan"), float("-inf")):
        await client.refusal(wait_s)
    await site.waiting(0)


async def test_only_the_clients_that_the_expression_wants_are_assigned(site: Site) -> None:
    us, eu = await site.fleet(2)
    not_wanted = us.check_in(labels={"region": "us"})
    await site.waiting(1)
    await site.operator.start(job_file(goal=1, where='region == "eu"'))
    await eu.assignment(labels={"region": "eu"})
    await site.waiting(1)
    assert not not_wanted.done()
    not_wanted.cancel()
    await site.waiting(0)


async def test_a_second_check_in_supersedes_the_first(site: Site) -> None:
    client = await site.enroll()
    first = client.check_in()
    await site.waiting(1)
    second = client.check_in()
    assert (await first).HasField("refusal")
    await site.waiting(1)
    await site.operator.start(job_file(goal=1))
    assert (await second).HasField("assignment")


async def test_a_client_that_vanishes_leaves_the_waiting_room(site: Site) -> None:
    client = await site.enroll()
    call = client.check_in()
    await site.waiting(1)
    call.cancel()
    await site.waiting(0)


@pytest.mark.fault("F15", "F21")
async def test_an_open_assignment_is_handed_out_again_with_a_new_token(site: Site) -> None:
    await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    first = await client.assignment()
    second = await client.assignment()
    assert second.token != first.token
    assert (second.job_id, second.round, second.attempt) == (first.job_id, first.round, first.attempt)
    assert 0.0 < second.training_timeout_s <= first.training_timeout_s
    assert reason_name((await client.heartbeat(first.token, wait_s=0.0)).stop.reason) == "STALE"
    assert reason_name((await client.report(first.token, "0" * 64)).refusal.reason) == "STALE"
    with pytest.raises(aio.AioRpcError) as caught:
        await client.upload(first.token, b"content")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert (await client.deliver(second.token, update_of(initial_model(), 0))).HasField("receipt")


async def test_another_population_gets_nothing(site: Site) -> None:
    await site.operator.start(job_file(goal=1))
    stranger = await site.enroll("other")
    assert reason_name((await stranger.refusal()).reason) == "NO_WORK"


@pytest.mark.fault("F32")
async def test_a_full_waiting_room(folder: Path) -> None:
    async with daemons.running(folder, limits=Limits(max_waiting=1)) as site:
        one, two = await site.fleet(2)
        waiting = one.check_in()
        await site.waiting(1)
        refusal = await two.refusal(wait_s=daemons.PATIENCE_S)
        assert (reason_name(refusal.reason), refusal.retry.min_s > 0) == ("OVERLOADED", True)
        waiting.cancel()


@pytest.mark.fault("F36")
async def test_clients_that_wait_while_the_server_stops_are_told(folder: Path) -> None:
    async with daemons.running(folder) as site:
        client, working = await site.fleet(2)
        await site.operator.start(job_file(goal=1))
        assignment = await working.assignment()
        heartbeat = working.heartbeat(assignment.token)
        waiting = client.check_in()
        await site.waiting(1)
        site.daemon.stop()
        refusal = (await waiting).refusal
        assert (reason_name(refusal.reason), refusal.retry.max_s > refusal.retry.min_s > 0) == ("DRAINING", True)
        with pytest.raises(aio.AioRpcError):
            await heartbeat
    await site.task


@pytest.mark.fault("F28")
async def test_another_protocol_version(site: Site) -> None:
    client = await site.enroll()
    for version in (0, 2, 2**32 - 1):
        calls = (
            client.check_in(version=version),
            client.stub.GetChallenge(fleet_pb2.GetChallengeRequest(protocol_version=version)),
            client.stub.OpenSession(fleet_pb2.OpenSessionRequest(protocol_version=version)),
            client.stub.Enroll(fleet_pb2.EnrollRequest(population="demo", protocol_version=version)),
        )
        for call in calls:
            with pytest.raises(aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            older = "update the client" if version < 1 else "update the server first"
            assert re.search(rf"version {version}; supported: 1\. .*{older}", caught.value.details() or "")


@pytest.mark.fault("F28")
async def test_clients_of_the_previous_protocol_are_served(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await site.enroll()
    monkeypatch.setattr(wire, "PROTOCOL_VERSION", 3)
    monkeypatch.setattr(wire, "OLDEST_PROTOCOL_VERSION", 2)
    for version, served in ((1, False), (2, True), (3, True), (4, False)):
        call = client.stub.GetChallenge(fleet_pb2.GetChallengeRequest(protocol_version=version))
        if served:
            await call
        else:
            with pytest.raises(aio.AioRpcError, match="supported: 2 to 3"):
                await call


TOO_MUCH: tuple[dict[str, Any], ...] = (
    {"trainers": tuple(f"t{n}" for n in range(300))},
    {"evaluators": tuple(f"t{n}" for n in range(300))},
    {"trainers": ("no such name!",)},
    {"labels": {f"label_{n}": "" for n in range(65)}},
    {"labels": {"not a name": "x"}},
    {"labels": {"region": "x" * 201}},
    {"labels": {"region": "\x1b[2J"}},
    {"labels": {"region": "\x00"}},
)


async def test_what_a_client_says_of_itself_is_bounded(site: Site) -> None:
    client = await site.enroll()
    for options in TOO_MUCH:
        with pytest.raises(aio.AioRpcError) as caught:
            await client.check_in(0.0, **options)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, options


async def saved_while_waiting(
    site: Site, client: RawClient
) -> tuple[Gate, aio.UnaryUnaryCall[object, fleet_pb2.CheckInResponse]]:
    """A check-in whose assignment is held up while it is stored."""
    gate = Gate()
    waiting = client.check_in()
    await site.waiting(1)
    job = await site.operator.create(job_file(goal=1))
    site.store.before["save"] = gate
    start = asyncio.ensure_future(site.operator.jobs.StartJob(admin_pb2.JobRequest(job=job.job_id)))
    await gate.reached.wait()
    del site.store.before["save"]
    start.add_done_callback(lambda _: None)
    return gate, waiting


async def test_a_check_in_while_its_assignment_is_stored_gets_the_living_token(site: Site) -> None:
    client = await site.enroll()
    gate, first = await saved_while_waiting(site, client)
    second = client.check_in()
    assert (await first).HasField("refusal")  # superseded: the second has arrived
    gate.open()
    token = (await second).assignment.token
    assert (await client.heartbeat(token, wait_s=0.0)).HasField("proceed")


async def test_a_small_model_comes_with_the_assignment_and_a_large_one_does_not(site: Site) -> None:
    clients, large = (
        await site.fleet(2),
        Parameters.from_arrays({"weight": np.zeros(wire.INLINE_MODEL_BYTES // 4, "f4")}),
    )
    waiting = [client.check_in(wait_s=daemons.PATIENCE_S) for client in clients]
    await site.waiting(2)
    await site.operator.start(job_file("small", goal=1))
    await site.operator.start(job_file("large", goal=1), large)
    given = {(assigned := (await call).assignment).job_name: assigned for call in waiting}
    assert given["small"].model_bytes == initial_model().to_bytes()
    assert (given["large"].model_bytes, given["large"].model.size_bytes) == (b"", large.schema.file_size_bytes)


async def test_a_model_that_cannot_be_read_is_not_sent_along(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    models, missing = InlineModels(blobs), ModelVersion(version=1, round=1, attempt=1, digest="0" * 64, size_bytes=4)
    assert await models.content(missing) == b""
    blob = await asyncio.to_thread(blobs.put_chunks, [b"here"])
    here = ModelVersion(version=2, round=2, attempt=1, digest=blob.digest, size_bytes=blob.size_bytes)
    assert await asyncio.gather(*(models.content(here) for _ in range(3))) == [b"here"] * 3
    await asyncio.to_thread(blobs.delete, blob.digest)
    assert await models.content(here) == b"here"
