"""Run many clients in one process that train nothing and store no model, so that they need little memory.

    python benchmarks/light_clients.py TICKET_FILE COUNT

To the server each is a normal client: it signs its calls, gets every model and uploads an update of the same
size, zeros after the model's header. It stores only the header.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import struct
import sys
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import crowd
from crowd import FLEET, Member
from fedplat import wire
from fedplat.wire.auth import Ticket
from fedplat.wire.v1 import fleet_pb2, model_pb2

INLINE_BYTES = 256 * 1024
"""The SDK's default: an update up to this size is part of the report."""
MAX_CONNECTIONS = 100
WAIT_S = 60.0
NEXT_WAIT_S = 5.0
_ZEROS = bytes(wire.UPLOAD_CHUNK_BYTES)
_CHUNK = fleet_pb2.UploadRequest(data=_ZEROS).SerializeToString()


async def take_part(member: Member) -> None:
    """Work for the server until cancelled."""
    header, digest = b"", ""
    upcoming: fleet_pb2.Assignment | None = None
    while True:
        assignment, upcoming = upcoming, None
        if assignment is None:
            response = await crowd.wait_through_outages(member, WAIT_S)
            if not response.HasField("assignment"):
                await asyncio.sleep(response.refusal.retry.min_s)
                continue
            assignment = response.assignment
        token, model = assignment.token, assignment.model
        if model.digest != digest:
            content = assignment.model_bytes or await _download(member, model)
            header, digest = _header_of(content), model.digest
        size = model.size_bytes
        if size <= INLINE_BYTES:
            content = header + bytes(size - len(header))
            wait_s = NEXT_WAIT_S if assignment.check_in_with_report else None
            answer = await crowd.until_taken(functools.partial(member.report, token, content, wait_s))
            upcoming = answer.next if answer.HasField("next") else None
            continue
        update = _digest(header, size)
        await crowd.until_taken(functools.partial(_upload, member, token, header, size))
        request = fleet_pb2.ReportRequest(token=token, digest=update, num_examples=1.0)
        await member.call("Report", request.SerializeToString())


async def _download(member: Member, model: model_pb2.ModelRef) -> bytes:
    """Download a whole model, and return its first chunk."""
    request = fleet_pb2.DownloadRequest(digest=model.digest).SerializeToString()
    call: Any = member.channel.unary_stream(FLEET + "Download")
    begun, size = b"", 0
    async for message in call(request, metadata=member.signed("Download", request)):
        data = model_pb2.Chunk.FromString(message).data
        size += len(data)
        if not begun:
            begun = data
    if size != model.size_bytes:
        raise RuntimeError(f"the model has {size} bytes; expected {model.size_bytes}")
    return begun


def _header_of(content: bytes) -> bytes:
    return content[: 8 + struct.unpack("<Q", content[:8])[0]]


async def _upload(member: Member, token: str, header: bytes, size: int) -> None:
    fields = fleet_pb2.UploadHeader(token=token, digest=_digest(header, size), size_bytes=size)
    first = fleet_pb2.UploadRequest(header=fields).SerializeToString()

    async def messages() -> AsyncIterator[bytes]:
        yield first
        yield fleet_pb2.UploadRequest(data=header).SerializeToString()
        whole, rest = divmod(size - len(header), len(_ZEROS))
        for _ in range(whole):
            yield _CHUNK
        if rest:
            yield fleet_pb2.UploadRequest(data=_ZEROS[:rest]).SerializeToString()

    call: Any = member.channel.stream_unary(FLEET + "Upload")
    await call(messages(), metadata=member.signed("Upload", first))


@cache
def _digest(header: bytes, size: int) -> str:
    sha256 = hashlib.sha256(header)
    whole, rest = divmod(size - len(header), len(_ZEROS))
    for _ in range(whole):
        sha256.update(_ZEROS)
    sha256.update(_ZEROS[:rest])
    return sha256.hexdigest()


async def main(ticket: Ticket, count: int) -> None:
    """Enroll `count` clients and run them."""
    async with crowd.connections(ticket.server, ticket.ca, min(count, MAX_CONNECTIONS)) as channels:
        members = crowd.members(channels, count)
        await crowd.each(members, lambda member: member.enroll(ticket))
        await crowd.each(members, lambda member: member.open_session())
        await asyncio.gather(*map(take_part, members))


if __name__ == "__main__":
    asyncio.run(main(Ticket.from_text(Path(sys.argv[1]).read_text()), int(sys.argv[2])))
