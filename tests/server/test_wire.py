"""What arrives at the socket: rubbish, bombs, probes, and handlers that fail."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import structlog
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from fedplat import wire
from fedplat.rounds.states import REASON_TEXTS, AttemptKind, AttemptPhase, JobStatus, Reason
from fedplat.wire.v1 import admin_pb2, fleet_pb2, model_pb2
from fedplat_server import logs
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import convert
from fedplat_server.rpc import interceptor
from support import access
from support.access import ADMIN_METADATA
from support.daemons import Site, initial_model, running, update_of
from support.jobs import job_file

METHODS = [
    *(f"/fedplat.wire.v1.Fleet/{method.name}" for method in fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].methods),
    *access.METHODS,
]

NAMES = ("Fleet", "Jobs", "Clients", "Operators", "Privacy", "Events", "Webhooks")
OUR_SERVICES = [f"fedplat.wire.v1.{name}" for name in NAMES]


def raw(channel: aio.Channel, method: str) -> aio.UnaryUnaryMultiCallable[bytes, bytes]:
    """A method without codecs: what a test sends is what goes over the wire."""
    return channel.unary_unary(method)


async def alive(site: Site) -> None:
    assert (await site.operator.operators.GetStatus(admin_pb2.GetStatusRequest())).process_id == os.getpid()


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.code()


@pytest.mark.fault("F23")
async def test_bytes_that_are_no_message_are_refused(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    client = await site.enroll()
    for method in METHODS:
        for content in (b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f"):
            metadata = client.signed(method.rpartition("/")[2], None) if ".Fleet/" in method else ADMIN_METADATA
            one = site.channel.unary_unary(method)(content, metadata=metadata)
            many = site.channel.unary_stream(method)(content, metadata=metadata)
            for call in (one, anext(aiter(many))):
                assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT, method
    assert not caplog.records  # else anybody could fill the log
    await alive(site)


@pytest.mark.parametrize("method", ["/fedplat.wire.v1.Fleet/Report", "/fedplat.wire.v1.Jobs/StartJob"])
@pytest.mark.fault("F27")
async def test_messages_that_are_too_large_are_refused(site: Site, method: str) -> None:
    """By gRPC while they come, if they are larger than any; else by us, before they are decoded."""
    client = await site.enroll()
    for size, status in (
        (wire.MAX_REQUEST_BYTES + 1, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (interceptor.max_bytes(method) + 1, grpc.StatusCode.INVALID_ARGUMENT),
    ):
        metadata = client.signed(method.rpartition("/")[2], None) if ".Fleet/" in method else ADMIN_METADATA
        assert await code_of(raw(site.channel, method)(bytes(size), metadata=metadata)) is status
    await alive(site)


@pytest.mark.fault("F27")
async def test_a_compressed_bomb_is_not_inflated(site: Site) -> None:
    async with aio.insecure_channel(site.address, compression=grpc.Compression.Gzip) as channel:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        content = bytes(16 * wire.MAX_MESSAGE_BYTES)
        metadata = (await site.enroll()).signed("Report", None)
        call = raw(channel, "/fedplat.wire.v1.Fleet/Report")(content, metadata=metadata)
        assert await code_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        # The caller's own copies are in this process, too; the server's inflated one would be one more.
        assert grown < 3 * len(content)
    await alive(site)


async def test_methods_that_do_not_exist(site: Site) -> None:
    for method in ("Fleet/Nothing", "Jobs/Nothing", "Admin/ListJobs"):  # the last one is of older versions
        call = raw(site.channel, f"/fedplat.wire.v1.{method}")(b"", metadata=ADMIN_METADATA)
        assert await code_of(call) is grpc.StatusCode.UNIMPLEMENTED, method


async def test_health_of_each_service(site: Site) -> None:
    stub: Any = health_pb2_grpc.HealthStub(site.channel)
    for service in ("", *OUR_SERVICES):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert await code_of(stub.Check(health_pb2.HealthCheckRequest(service="x"))) is grpc.StatusCode.NOT_FOUND


async def test_health_can_be_watched_and_says_when_the_server_stops(site: Site) -> None:
    stub: Any = health_pb2_grpc.HealthStub(site.channel)
    watching = stub.Watch(health_pb2.HealthCheckRequest())
    answers = aiter(watching)
    assert (await anext(answers)).status == health_pb2.HealthCheckResponse.SERVING
    site.daemon.stop()
    assert (await anext(answers)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watching.cancel()


async def test_reflection_names_the_services_if_the_operator_wants_that(folder: Path) -> None:
    def names(address: str) -> set[str]:
        with grpc.insecure_channel(address) as channel:
            return set(ProtoReflectionDescriptorDatabase(channel).get_services())

    async with running(folder) as site:
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(names, site.address)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    async with running(folder, reflection=True) as site:
        found = await asyncio.to_thread(names, site.address)
    assert {*OUR_SERVICES, "grpc.health.v1.Health"} <= found


# --- handlers that fail ----------------------------------------------------------------------------------------------


@pytest.fixture
async def log(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[io.StringIO]:
    """The log as the daemon writes it."""
    written = io.StringIO()

    class Immediate:
        def __init__(self, _: int) -> None: ...

        def write(self, text: str) -> int:
            return written.write(text)

        def flush(self) -> None: ...

    monkeypatch.setattr(logs, "Sink", Immediate)
    monkeypatch.setattr("logging.basicConfig", Mock())
    logs.configure("DEBUG", json=True)
    yield written
    structlog.reset_defaults()


async def test_an_unexpected_error_is_a_number_for_the_caller_and_a_traceback_in_the_log(
    log: io.StringIO, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await site.enroll()
    secret = client.session_id

    async def bug(*_: object) -> None:
        credential = secret
        raise KeyError(f"an invented bug with {len(credential)}")

    site.store.before["count_clients"] = bug
    site.store.before["find_assignment"] = bug
    for call in (
        site.operator.operators.GetStatus(admin_pb2.GetStatusRequest()),
        client.heartbeat("a-secret-token", 0.0),
        client.upload("a-secret-token", b"content"),
    ):
        with pytest.raises(aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        details = caught.value.details() or ""
        assert "invented" not in details
        number = details.rpartition(": ")[2]
        lines = [json.loads(line) for line in log.getvalue().splitlines()]
        found = [line for line in lines if line.get("number") == number]
        assert len(found) == 1
        assert "an invented bug" in json.dumps(found[0]["exception"])
    assert secret not in log.getvalue()
    assert "a-secret-token" not in log.getvalue()


async def test_no_secret_is_logged_in_the_course_of_a_round(log: io.StringIO, site: Site) -> None:
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    first = await client.assignment()
    second = await client.assignment()
    await client.deliver(second.token, update_of(initial_model(), 0))
    await site.operator.until(job, "job", "COMPLETED")
    for secret in (first.token, second.token, client.session_id):
        assert secret not in log.getvalue()
    assert "COMPLETED" in log.getvalue()


# --- the catalogue ---------------------------------------------------------------------------------------------------


def test_every_code_has_a_status_and_a_message() -> None:
    for code in Code:
        status = grpc.StatusCode[code.status]
        assert status is not grpc.StatusCode.OK
        refused = RefusedError(code, "because")
        assert code.message
        assert refused.retry is None or "try again" not in code.message  # callers add when
        assert str(refused) == f"{code.message}: because"
        may_pass = status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert refused.retry is not None or not may_pass
    assert [code for code in Code if code.status == grpc.StatusCode.INTERNAL.name] == [Code.INTERNAL]


def test_every_reason_has_words_and_goes_over_the_wire_and_back() -> None:
    assert set(REASON_TEXTS) == set(Reason) == set(convert.REASONS)
    for reason in Reason:
        assert convert.reason_from_wire(convert.REASONS[reason]) is reason
    names = {name.removeprefix("REASON_") for name in model_pb2.Reason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    assert names == {reason.name for reason in Reason}
    assert convert.reason_from_wire(model_pb2.REASON_UNSPECIFIED) is None


@pytest.mark.parametrize(
    ("prefix", "wire_enum", "ours"),
    [
        ("JOB_STATUS_", admin_pb2.JobStatus, JobStatus),
        ("ATTEMPT_KIND_", admin_pb2.AttemptKind, AttemptKind),
        ("ATTEMPT_PHASE_", admin_pb2.AttemptPhase, AttemptPhase),
    ],
)
def test_statuses_correspond_one_to_one(prefix: str, wire_enum: Any, ours: Any) -> None:
    assert {name.removeprefix(prefix) for name in wire_enum.keys()} == {one.name for one in ours} | {"UNSPECIFIED"}  # noqa: SIM118
    assert len(set(wire_enum.values())) == len(wire_enum.keys())


@pytest.mark.parametrize(("scalar", "kind"), [(True, "bool"), (3, "int"), (0.5, "double"), ("x", "string"), (0, "int")])
def test_hyper_parameters_keep_their_type(scalar: bool | int | float | str, kind: str) -> None:
    value = convert.value(scalar)
    assert value.WhichOneof("kind") == f"{kind}_value"
    assert getattr(value, f"{kind}_value") == scalar
