"""Thousands of streams that never end, opened without a credential, cost little memory and stop no other client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fedplat_server.rpc.admission import READS_PER_CONNECTION
from fedplat_server.rpc.serving import MAX_STREAMS
from hostile import flood
from hostile.held_streams import DEFAULT_WINDOW, Holder
from support import processes

pytestmark = pytest.mark.slow

NUM_CONNECTIONS, NUM_STREAMS = 10, 1000
MESSAGE_BYTES = 2**17
MOST_BYTES = MAX_STREAMS * DEFAULT_WINDOW + 2 * READS_PER_CONNECTION * MESSAGE_BYTES
"""What a connection may hold: the windows of the streams that gRPC admits, and the messages that are read.

A message that was read and ended may still be on its way back. If the daemon read all messages, it would be twice as
much. It is counted at the sender: the daemon's own memory depends on when a busy machine lets it end streams.
"""
ELSEWHERE = "127.0.0.2"
"""The attacker's address; all of 127.0.0.0/8 is this host's."""


@contextlib.asynccontextmanager
async def attacking(holders: list[Holder], address: str) -> AsyncGenerator[None]:
    """Holds streams open until the end of the block."""
    tasks = [asyncio.create_task(holder.run(address, ELSEWHERE)) for holder in holders]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("method", "acknowledges"),
    [("Fleet/GetChallenge", True), ("Fleet/GetChallenge", False), ("Jobs/CreateJob", True)],
)
@pytest.mark.fault("F38")
async def test_streams_of_a_stranger_cost_little_memory(tmp_path: Path, method: str, acknowledges: bool) -> None:
    """With `acknowledges`, the attacker accepts the server's settings; until then HTTP/2 gives it larger windows."""
    path = f"/fedplat.wire.v1.{method}"
    holders = [Holder(path, NUM_STREAMS, MESSAGE_BYTES, acknowledges=acknowledges) for _ in range(NUM_CONNECTIONS)]
    with processes.server(tmp_path / "server", "--insecure") as server:
        honest = flood.Honest(server, tmp_path)

        async def complete_a_job() -> None:
            """Waits until honest clients have completed one more job."""
            before = honest.num_completed
            for _ in range(int(processes.PATIENCE_S / 0.05)):
                if honest.num_completed > before:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("gave up waiting for an honest job")

        with honest.at_work():
            await complete_a_job()
            async with attacking(holders, server.address):
                while any(holder.num_begun < NUM_STREAMS and not holder.is_over for holder in holders):
                    await complete_a_job()
                await complete_a_job()
        held = [holder.most_held_bytes for holder in holders]
        assert max(held) < MOST_BYTES, held
        assert "Traceback" not in server.log_text()
