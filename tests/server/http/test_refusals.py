"""Every code of the server has the same status, text and retry window over gRPC and over HTTP/1.1, in each form."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest
from grpc import aio

from fedplat.wire import METADATA_RETRY
from fedplat.wire.auth import METADATA_CODE
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, fleet_pb2, fleet_pb2_grpc
from fedplat_server.errors import Code, RefusedError
from fedplat_server.rpc.admission import Admission
from support import daemons
from support.http_channel import HttpPeer, HttpStubChannel

pytestmark = [pytest.mark.slow, pytest.mark.calm("no call reaches a store")]
WANTED = "fedplat-wanted"
TEXT = 'of 100 % or "naïve"\n\tand more'
"""Characters that the trailers of gRPC quote, and that JSON quotes."""


@contextlib.asynccontextmanager
async def _refuse(self: Admission, method: str, context: Any) -> AsyncGenerator[Any]:
    (wanted,) = [value for key, value in context.invocation_metadata() if key == WANTED]
    raise RefusedError(Code[wanted], TEXT)
    yield


async def refusals(channel: aio.Channel, code: Code) -> list[tuple[str, str, str, str]]:
    """The outcomes of a unary call, of an upload and a download, and of streams of responses and of requests."""
    fleet: Any = fleet_pb2_grpc.FleetStub(channel)
    jobs: Any = admin_pb2_grpc.JobsStub(channel)
    metadata = ((WANTED, code.name),)
    header = fleet_pb2.UploadRequest(header=fleet_pb2.UploadHeader(size_bytes=1))
    return [
        await outcome(fleet.Heartbeat(fleet_pb2.HeartbeatRequest(), metadata=metadata)),
        await outcome(fleet.Upload(iter([header, fleet_pb2.UploadRequest(data=b"1")]), metadata=metadata)),
        await outcome(anext(aiter(fleet.Download(fleet_pb2.DownloadRequest(), metadata=metadata)))),
        await outcome(anext(aiter(jobs.WatchJob(admin_pb2.WatchJobRequest(), metadata=metadata)))),
        await outcome(jobs.UploadModel(iter([admin_pb2.UploadModelRequest(data=b"1")]), metadata=metadata)),
    ]


async def outcome(call: Any) -> tuple[str, str, str, str]:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    trailing = dict(caught.value.trailing_metadata() or ())
    code, retry = (str(trailing.get(key, "")) for key in (METADATA_CODE, METADATA_RETRY))
    return caught.value.code().name, caught.value.details() or "", code, retry


async def test_every_code_is_the_same_over_both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "admit", _refuse)
    async with daemons.running(folder, http_listen="127.0.0.1:0", http_operators=True) as site:
        http = cast(aio.Channel, HttpStubChannel(HttpPeer(site.daemon.http_port)))
        for code in Code:
            over_grpc, over_http = await refusals(site.channel, code), await refusals(http, code)
            assert over_grpc == over_http, code
            retry = f"{code.retry.min_s:g} {code.retry.max_s:g}" if code.retry is not None else ""
            assert over_http == [(code.status, str(RefusedError(code, TEXT)), code.name, retry)] * 5
