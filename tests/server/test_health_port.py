"""The port for probes: health without TLS, from the first moment of the process, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc
from fedplat_server.auth import pki_folder
from fedplat_server.auth.pki_folder import PkiFolder
from fedplat_server.auth.tls import utc_now
from fedplat_server.config import ServerConfig
from fedplat_server.daemon import Daemon
from fedplat_server.database.store import Store, open_store
from fedplat_server.errors import ConfigError
from support import daemons, processes
from support.daemons import Gate

pytestmark = pytest.mark.calm("asks before there is a store")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def status_of(channel: aio.Channel, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    return (await stub.Check(request, wait_for_ready=True, timeout=daemons.PATIENCE_S)).status


async def test_a_daemon_is_alive_at_once_and_ready_when_it_answers_calls(folder: Path) -> None:
    made = PkiFolder.of(folder)
    made.make_authority(utc_now())
    made.make_server(pki_folder.all_hosts([]), utc_now())
    gate = Gate()

    async def open_later(database: str) -> Store:
        await gate()
        return await open_store(database)

    address = f"127.0.0.1:{processes.free_port()}"
    database = f"sqlite:///{folder / 'fedplat.sqlite'}"
    config = ServerConfig("127.0.0.1:0", folder, database, tls=made.files, health_listen=address, reflection=True)
    daemon = Daemon(config, open_later)
    task = asyncio.create_task(daemon.run())
    async with aio.insecure_channel(address) as channel:
        await gate.reached.wait()
        assert [await status_of(channel, name) for name in ("liveness", "")] == [SERVING, NOT_SERVING]
        gate.open()
        await daemon.started.wait()
        assert [await status_of(channel, name) for name in ("liveness", "")] == [SERVING, SERVING]

        operators: Any = admin_pb2_grpc.OperatorsStub(channel)
        with pytest.raises(aio.AioRpcError) as caught:
            await operators.GetStatus(admin_pb2.GetStatusRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert (await reflection_code(channel)) is grpc.StatusCode.UNIMPLEMENTED
        daemon.stop()
        await task
    async with aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def reflection_code(channel: aio.Channel) -> grpc.StatusCode:
    call: Any = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(iter([b""]))
    return await call.code()


async def test_a_port_that_is_taken_is_an_error(folder: Path) -> None:
    async with daemons.running(folder) as site:
        taken = f"127.0.0.1:{site.daemon.port}"
        database = f"sqlite:///{folder / 'other.sqlite'}"
        config = ServerConfig("127.0.0.1:0", folder / "other", database, health_listen=taken)
        with pytest.raises(ConfigError, match=rf"cannot listen on {taken}: .* choose another with --health HOST:PORT"):
            await Daemon(config).run()
