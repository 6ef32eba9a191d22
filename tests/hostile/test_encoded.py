"""Compression bombs in the payload of an encoded update: refused, and the server's memory stays as it was."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from grpc import aio

from fedplat import codecs
from fedplat.admin import AdminClient, submission
from fedplat.codecs.container import Format
from fedplat.job import parse_job
from fedplat.model import BLOCK, Parameters
from fedplat.wire.auth import Ticket
from support import processes
from support.jobs import write_job
from support.raw_client import RawClient, digest_of, private_key, reason_name

GROWTH_BYTES = 64 * 2**20
OPTIONS = codecs.Plain(zstd=True)
MODEL = Parameters.from_arrays({"weight": np.zeros(2 * BLOCK, "f4")})
JOB = write_job(
    "bait",
    population="hostile",
    deadlines={"selection_s": 3600, "training_s": 3600},
    retry={"base_s": 0.01, "max_s": 0.01},
    compression={"uplink": {"codec": "none", "zstd": True}},
)


def frames(content: bytes, *, says_size: bool = True, count: int = 1) -> bytes:
    """Zstd frames as the codec writes them: each after its length."""
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=says_size)
    frame = compressor.compress(content)
    return (struct.pack("<I", len(frame)) + frame) * count


def bombs() -> Iterator[tuple[str, bytes]]:
    huge, block = bytes(2**28), bytes(4 * BLOCK)
    yield "a quarter of a gigabyte in a frame that says so", frames(huge)
    yield "a quarter of a gigabyte in a frame that does not", frames(huge, says_size=False)
    small = frames(block)
    lie = bytearray(frames(huge))
    lie[4:16] = small[4:16]  # the head of a frame of one block
    yield "a quarter of a gigabyte in a frame that claims a block", bytes(lie)
    yield "a thousand blocks", frames(block, count=1000)
    yield "one block alone", small
    yield "a frame that claims four gigabytes", struct.pack("<I", 2**32 - 1) + small[4:]
    yield "two frames of which one is inside the other", struct.pack("<I", len(small)) + small
    yield "rubbish", bytes(range(256)) * 4


@pytest.mark.slow
@pytest.mark.fault("F27")
def test_bombs(tmp_path: Path) -> None:
    with processes.server(tmp_path / "server", "--insecure") as server, server.admin() as admin:
        asyncio.run(attack(server, admin))


async def attack(server: processes.Server, admin: AdminClient) -> None:
    prefix = Format(OPTIONS, MODEL.schema).prefix
    before = admin.status().peak_rss_bytes
    job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), MODEL)).job_id
    async with aio.insecure_channel(server.address) as channel:
        client = RawClient(channel, private_key("hostile"))
        ticket = Ticket.from_text(server.ticket("hostile"))
        await client.enroll(population="hostile", idempotency_key="a hostile client", token=ticket.secret)
        await client.open_session()
        for name, payload in bombs():
            work = await client.assignment(codecs=tuple(codecs.CODECS))
            refusal = (await client.deliver(work.token, prefix + payload)).refusal
            assert reason_name(refusal.reason) == "REJECTED_SCHEMA", name
        work = await client.assignment(codecs=tuple(codecs.CODECS))
        good = b"".join(Format(OPTIONS, MODEL.schema).encode(MODEL, np.random.default_rng(1)))
        assert (await client.deliver(work.token, good)).receipt.digest == digest_of(good)
    for _ in admin.watch_job(job):
        pass
    assert admin.status().peak_rss_bytes - before < GROWTH_BYTES
